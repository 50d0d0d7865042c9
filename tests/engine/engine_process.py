# SPDX-License-Identifier: Apache-2.0
"""Run a function that starts vLLM in a process of its own.

Every engine gets a fresh process, forked from a server that has imported vLLM once: an engine on a tiny model then
starts in about two seconds, shares no state with another one, and goes away with its process group, whatever happened.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # The engine core in the process itself: one start-up less, and a test can reach into it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A tiny model is fastest on one thread, and then does not suffer from busy neighbours.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

#: For ``environment``, where a model is large enough for vLLM's own thread binding to pay.
ALL_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "auto", "OMP_NUM_THREADS": str(os.cpu_count())}

_context: Any = None
_starting = threading.Lock()


def run(
    function: Callable[..., Any], *args: Any, timeout: float = 300, environment: dict[str, str] | None = None
) -> Any:
    """Return ``function(*args)``, computed in a new process.

    Args:
        function: a module's top-level function; it and ``args`` and its result are pickled.
        timeout: seconds after which the process is ended and ``TimeoutError`` raised.
        environment: more variables for the process.

    Raises:
        RuntimeError: the function raised or the process died; with its traceback and the end of its output.
    """
    with _starting:
        context = _server()
    receiver, sender = context.Pipe(duplex=False)
    lifeline, alive = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        call = (function, args, {**ENVIRONMENT, **(environment or {})}, str(log), sender, lifeline)
        process = context.Process(target=_child, args=call)
        process.start()
        sender.close()
        lifeline.close()
        try:
            if not receiver.poll(timeout):
                raise TimeoutError(f"{function.__name__} took longer than {timeout} s:\n{_tail(log)}")
            try:
                value, error = receiver.recv()
            except EOFError:
                process.join(10)
                raise RuntimeError(f"the process died, exit code {process.exitcode}:\n{_tail(log)}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            receiver.close()
            alive.close()
        if error:
            raise RuntimeError(f"{error}\n{_tail(log)}")
        return value


def _server() -> Any:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["engine_preload"])
        before = dict(os.environ)
        # Python 3.11's fork server imports what it preloads before it sets sys.path, and passes over what is not found.
        os.environ.update(
            ENVIRONMENT, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        )
        # The working folder off its path: the repository's triton_kernels/ would shadow vLLM's own copy there.
        os.environ["PYTHONSAFEPATH"] = "1"
        os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"  # of processes that are ended, not closed
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
    return _context


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    log: str,
    sender: Connection,
    lifeline: Connection,
) -> None:
    os.setsid()  # its own group, so that its workers end with it
    threading.Thread(target=_end_with_the_test, args=(lifeline,), daemon=True).start()
    os.environ.update(environment)
    tempfile.tempdir = str(Path(log).parent)  # this process ends without cleaning up
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        answer = (function(*args), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    sys.stdout.flush()
    sender.send(answer)
    sender.close()
    os._exit(0)  # vLLM's own shutdown takes longer than the whole test


def _end_with_the_test(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()  # returns only when the process that holds the other end is gone
    os.killpg(0, signal.SIGKILL)


def _tail(log: Path, characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-characters:] if log.exists() else ""
