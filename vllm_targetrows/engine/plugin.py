# SPDX-License-Identifier: Apache-2.0
"""Entry point of group ``vllm.general_plugins``: called in the front end, the engine core and every worker."""

from __future__ import annotations


def register() -> None:
    """Teach this process the method ``targetrows``.  May be called any number of times."""
    from vllm_targetrows.engine.compat import install

    install()
