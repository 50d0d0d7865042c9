# SPDX-License-Identifier: Apache-2.0
"""What a process that runs vLLM on the CPU should find in its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def preload_environment() -> dict[str, str]:
    """Return the variables to add to a child's environment so that it loads Intel's OpenMP first.

    vLLM's CPU kernels are slow in speculative decoding on GNU's OpenMP. The intel-openmp wheel puts ``libiomp5.so``
    under the environment's ``lib/``; where it is not installed, or is preloaded already, there is nothing to add.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    preloaded = os.environ.get("LD_PRELOAD", "")
    if not library.is_file() or library.name in preloaded:
        return {}
    return {"LD_PRELOAD": f"{library}:{preloaded}" if preloaded else str(library)}
