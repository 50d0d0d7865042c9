# SPDX-License-Identifier: Apache-2.0
"""What the fork server of ``engine_process`` imports once for all engines."""

import transformers.modeling_utils  # noqa: F401
import vllm.distributed.elastic_ep.elastic_execute
import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.llama_eagle3
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm import LLM, SamplingParams  # noqa: F401
