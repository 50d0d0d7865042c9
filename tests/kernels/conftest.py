# SPDX-License-Identifier: Apache-2.0
"""The kernels run in the interpreter: it must be chosen before triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
