# SPDX-License-Identifier: Apache-2.0
"""Processes of engines, several a second: forked from a process that has imported torch.

`nursery_site/nursery_client.py` asks for them; `python -m tests.worker_nursery PARENT FD PATH`
is this side. Each child is a process of its own, with a number that can be stopped and killed: a
worker that runs `faulty_worker.run`, or whatever `python -m MODULE` runs. For tests that are not
about the start itself: the environment that only a new program reads, such as the linker's, is the
nursery's.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .faulty_worker import Plan, run
from .nursery_site.nursery_client import LIFE, MOST_BYTES, VARIABLE

ROOT = Path(__file__).resolve().parents[1]
CHILD_SECONDS = 600  # after which one that nobody ended ends by SIGALRM
# What `stratakv serve`, its core and `stratakv cache-server` import, so that no child has to;
# but for gRPC, which reads its variables when it is imported.
MODULES = (
    "engine.api.app", "engine.api.http.http_server",
    "engine.api.openai.templates.template_worker",
    "engine.cli.cache_server", "engine.cli.main", "engine.cli.serve",
    "engine.client.process_client",
    "engine.core.engine_core", "engine.core.process",
    "engine.core.worker_process.worker_process",
    "engine.structured.processes.grammar_process", "engine.text.tokenizer", "tiers.ssd",
)  # fmt: skip
# In place of 1 GiB: a pool is filled with zeros at the start, at up to 2.6 processor seconds a GiB.
POOL_BYTES = 24 << 20
_MOST_DESCRIPTORS = 8
# Where descriptors lie that are not yet where they belong.
_FIRST_FREE = 200


class Job(NamedTuple):
    """A child's: what it was asked for, and the descriptors that came with it."""

    request: dict[str, Any]
    received: Sequence[int]


def main(descriptor: int, listening: int, path: str) -> None:
    _import_modules()
    alive: set[int] = set()
    with (
        socket.socket(fileno=descriptor) as parent,
        socket.socket(fileno=listening) as listener,
        selectors.DefaultSelector() as selector,
    ):
        selector.register(parent, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        job = None
        while job is None and all(key.fileobj is listener for key, _ in selector.select()):
            job = _answer(listener, alive)
    if job is not None:
        _leave(_run(job, path))
    for pid in alive:
        os.kill(pid, signal.SIGKILL)  # it is ours until it is waited for
        os.waitpid(pid, 0)


def _answer(listener: socket.socket, alive: set[int]) -> Job | None:
    """One question. A job in the child that was asked for."""
    connection, _ = listener.accept()
    with connection:
        text, received, _, _ = socket.recv_fds(connection, MOST_BYTES, _MOST_DESCRIPTORS)
        if not text:
            return None
        request = json.loads(text)
        answer: int | None
        if "module" in request:
            answer = os.fork()
            if not answer:
                return Job(request, received)
            alive.add(answer)
        elif "poll" not in request:
            answer = os.getpid()
        else:
            answer = _status(request["poll"])
            if answer is not None:
                alive.discard(request["poll"])
        for number in received:
            os.close(number)
        connection.send(json.dumps(answer).encode())
    return None


def _import_modules() -> None:
    for name in MODULES:
        importlib.import_module(f"stratakv.{name}")
    for name in ("llguidance", "xgrammar"):  # a second of a processor, and many grammars
        with suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("httpx")  # of huggingface_hub, which reads its variables itself
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]  # which xgrammar has brought: each child reads its own variables
    importlib.import_module(".page_program", __package__)
    for name in ("engine.core.setup.model_check", "engine.worker.runtime.pool_sizing"):
        module: Any = sys.modules[f"stratakv.{name}"]
        assert module.DEFAULT_POOL_BYTES > POOL_BYTES
        module.DEFAULT_POOL_BYTES = POOL_BYTES
    gc.collect()
    gc.freeze()  # a child collects only what is its own


def _run(job: Job, path: str) -> int:
    """In a child: its whole life; the exit status."""
    request, received = job
    try:
        os.setsid()
        signal.alarm(int(request["environment"].get(LIFE, CHILD_SECONDS)))
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        _place(received, [0, 1, 2, *request["descriptors"]])
        if request["plan"] is not None:
            return run(msgspec.convert(request["plan"], Plan))
        named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        there = [each for each in sys.path if each != str(ROOT)]
        sys.path = [each for each in named if each and each not in there] + there
        sys.argv = [request["module"], *request["arguments"]]
        os.environ[VARIABLE] = path  # what it starts comes from the nursery too
        module = importlib.import_module(request["module"])
        if hasattr(module, "main"):
            return module.main() or 0
        del sys.modules[module.__name__]
        runpy.run_module(module.__name__, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _place(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the descriptors received under the numbers that they had."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, _FIRST_FREE) for number in received]
    os.closerange(3, _FIRST_FREE)
    for number, wanted in zip(high, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)


def _leave(status: int) -> None:
    """As an interpreter does, but for taking it down piece by piece."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _status(pid: int) -> int | None:
    """The exit status, negative for a signal; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
