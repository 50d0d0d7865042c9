# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, timed request by request at its parent's orders.

``vllm_targetrows.measure`` starts it with one end of a socket pair.  It loads the engine, reports, and then answers one
order after another; between two orders it sleeps in ``recv``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Serve the parent at the other end of the file descriptor in ``sys.argv[1]`` until it hangs up."""
    if sys.platform.startswith("linux"):  # a parent that was killed must not leave an engine behind
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    orders: dict[str, Callable[..., Any]] = {"tokenize": tokenize, "generate": generate}
    try:
        llm = _start(connection.recv())
        connection.send(("ready", None))
        while True:
            order, arguments = connection.recv()
            connection.send(("done", orders[order](llm, **arguments)))
    except EOFError:
        return
    except Exception as error:
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}"))


def _start(engine: dict[str, Any]) -> Any:
    from vllm import LLM

    return LLM(**engine)


def tokenize(llm: Any, conversations: list[list[dict[str, str]]]) -> list[list[int]]:
    """The token ids of each conversation in the target's chat template, ready for an answer."""
    tokenizer = llm.get_tokenizer()
    return [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in conversations
    ]


def generate(llm: Any, prompts: list[list[int]], sampling: dict[str, Any]) -> dict[str, Any]:
    """Decode ``prompts`` together and time every step.

    Returns:
        ``seconds`` from the first request's arrival to the last token; ``replies``, for each prompt its ``tokens``, its
        ``text`` and, for each of the engine's steps that gave it tokens, the step's number in ``steps``, the time in
        ``arrivals`` and their number in ``counts``; ``state``, what the plugin's counters counted after every request
        had its first token (``None`` for an engine without the plugin).
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    replies: dict[str, dict[str, Any]] = {
        str(i): {"tokens": [], "text": "", "steps": [], "arrivals": [], "counts": []} for i in range(len(prompts))
    }
    before: Any = None
    step = 0
    parameters = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
    start = time.perf_counter()
    for name, prompt in zip(replies, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
    while engine.has_unfinished_requests():
        step += 1
        for output in engine.step():
            new = output.outputs[0]
            if new.token_ids:
                reply = replies[output.request_id]
                reply["steps"].append(step)
                reply["arrivals"].append(time.perf_counter() - start)
                reply["counts"].append(len(new.token_ids))
                reply["tokens"].extend(new.token_ids)
                reply["text"] += new.text
        if before is None and all(reply["steps"] for reply in replies.values()):
            before = _state(llm)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "replies": list(replies.values()), "state": difference(_state(llm), before)}


def difference(after: Any, before: Any) -> Any:
    """``after - before`` of counters in nested dicts; keys that ``before`` lacks count from zero."""
    if isinstance(after, dict):
        return {key: difference(value, (before or {}).get(key, 0)) for key, value in after.items()}
    return after - (before or 0) if isinstance(after, int | float) else after


def _state(llm: Any) -> dict[str, Any] | None:
    """The counters of the first worker; every rank of a tensor-parallel engine takes the same decisions."""
    if os.environ.get("VLLM_PLUGINS") == "":
        return None
    state: dict[str, Any] = llm.collective_rpc("targetrows_state")[0]
    return state


if __name__ == "__main__":
    main()
