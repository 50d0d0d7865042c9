# SPDX-License-Identifier: Apache-2.0
"""The worker: vLLM's own, with the runner of ``runner.py``."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm.v1.worker import cpu_worker

from vllm_targetrows.engine.compat import register_attention_backends
from vllm_targetrows.engine.runner import SCRATCH_SHARE, TargetRowsCPURunner


class TargetRowsWorker(cpu_worker.CPUWorker):
    """CPU worker whose requests are decoded with trees."""

    def init_device(self) -> None:
        register_attention_backends()
        # The worker names its runner's class in one place, where no option reaches.
        with patch.object(cpu_worker, "CPUModelRunner", TargetRowsCPURunner):
            super().init_device()

    def determine_available_memory(self) -> int:
        """Memory for the scheduler's blocks; the rest is for the scratch blocks."""
        return int(super().determine_available_memory() / (1 + SCRATCH_SHARE))

    def targetrows_state(self) -> dict[str, Any]:
        """For ``collective_rpc("targetrows_state")``: see ``TreeRounds.targetrows_state``."""
        return self.model_runner.targetrows_state()

    def targetrows_save_recording(self) -> str | None:
        """For ``collective_rpc``: see ``TreeRounds.targetrows_save_recording``."""
        return self.model_runner.targetrows_save_recording()
