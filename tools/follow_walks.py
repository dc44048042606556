# SPDX-License-Identifier: Apache-2.0
"""Follows three paths through the code as a reader would, and counts how often the file changes.

    python tools/follow_walks.py                the counts, and the files in the order of reading
    python tools/follow_walks.py chat --list    one walk, with its functions

    admission   a request whose blocks are in the CPU tier is admitted while another runs: once
                to load its blocks and, after the load, once to run
    chat        a chat completion, from its HTTP route to the event with its first token
    settings    the tiers' settings, from the command line to the opening of the SSD store

The simulated reader reads a walk's first functions from top to bottom and opens each function that
is called:

    stay      the reading of one file until another file is opened
    return    a stay in a file that has been read before

The reader follows calls into the files of `followed`. A function in the files of `doors` is opened,
which is a stay, but its calls are not followed, because its docstring describes it. A function that
calls no function of the package is no stay. A return to a caller is a stay only if the caller then
calls another function that is opened. In a walk with `opens_once`, each function is opened once.

The admission walk imports only `LLM` and `SamplingParams` from the package, and the other walks use
only the command line. So the tool can follow another version of the package with the same names, if
its Python imports that version."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

BLOCK_TOKENS = 16
TOKEN = 100  # the token id of which the followed prompt consists
NUM_OTHERS = 6  # other prompts, with twice the blocks of the pool
WAIT_SECONDS = 60.0


@dataclass(slots=True)
class Call:
    """A call of a function of the package, with the calls that this function made."""

    file: str
    name: str = ""
    inner: list[Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Walk:
    """A path through the code: the first functions, the files to follow, and a function to run."""

    roots: tuple[tuple[str, str], ...]  # first functions, as (file, function)
    followed: tuple[str, ...]  # files and folders whose calls are followed
    doors: tuple[str, ...]
    happen: Callable[[Follower], None]
    apart: tuple[str, ...] = ()  # files in a followed folder that are neither followed nor doors
    end: tuple[str, str] = ("", "")  # the walk ends at a call of this (file, function)
    is_wanted: Callable[[FrameType], bool] = lambda _: True  # selects calls of the roots
    opens_once: bool = True


class Follower:
    """A profiler that records calls below the roots of a walk, in any thread or coroutine."""

    def __init__(self, walk: Walk) -> None:
        import stratakv

        self._root = Path(stratakv.__file__).parent
        self._walk = walk
        self._open: dict[int, list[tuple[FrameType, Call]]] = {}  # open calls by thread
        self._suspended: dict[FrameType, Call] = {}  # calls of coroutines and generators
        self._paths: dict[CodeType, str] = {}  # code → file; "" outside of the package
        self.walks: list[Call] = []
        self.is_over = False
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)

    def close(self) -> None:
        """Stop recording, in this thread and in threads that are started later."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        calls = self._open.setdefault(threading.get_ident(), [])
        if event == "return" and calls and calls[-1][0] is frame:
            calls.pop()
        if event != "call" or self.is_over:
            return
        if (call := self._suspended.get(frame)) is None:
            call = self._begin(frame, calls)
        if call is not None:
            calls.append((frame, call))

    def _begin(self, frame: FrameType, calls: list[tuple[FrameType, Call]]) -> Call | None:
        """Record a new call as a root or inside the open call; return None for any other call."""
        code = frame.f_code
        path = self._path(code)
        if not path or code.co_name.startswith("<"):
            return None
        place = (path, code.co_name)
        is_root = place in self._walk.roots and self._walk.is_wanted(frame)
        if not (calls or is_root):
            return None
        call = Call(path, code.co_qualname)
        if is_root and not calls:
            self.walks.append(call)
        else:
            calls[-1][1].inner.append(call)
        self.is_over = place == self._walk.end
        if code.co_flags & 0x2A0:  # a generator, coroutine or both
            self._suspended[frame] = call
        return call

    def _path(self, code: CodeType) -> str:
        if code not in self._paths:
            path = Path(code.co_filename)
            place = path.relative_to(self._root) if path.is_relative_to(self._root) else Path()
            # In a checkout, the installed packages in .venv are below the package's root.
            self._paths[code] = "" if place.parts[:1] in ((), (".venv",)) else place.as_posix()
        return self._paths[code]


def stays(walk: Walk, calls: Sequence[Call]) -> list[tuple[str, list[str]]]:
    """Return the stays: files in the order of reading, each with the functions that are opened."""
    found: list[tuple[str, list[str]]] = []
    opened: set[tuple[str, str]] = set()

    def read(call: Call, name: str = "") -> None:
        if not found or found[-1][0] != call.file:
            found.append((call.file, []))
        if name:
            found[-1][1].append(name)

    def go(call: Call) -> None:
        read(call, call.name)
        for inner in call.inner:
            is_followed = inner.file.startswith(walk.followed)
            is_last = (inner.file, inner.name.rpartition(".")[2]) == walk.end
            place = (inner.file, inner.name)
            if not (is_followed or inner.file.startswith(walk.doors)) or inner.file in walk.apart:
                continue
            if (walk.opens_once and place in opened) or not (inner.inner or is_last):
                continue
            opened.add(place)
            read(call)
            go(inner if is_followed else Call(inner.file, inner.name))

    for call in calls:
        go(call)
    return found


def _let_in(follower: Follower) -> None:
    """Send a request, evict its blocks to the CPU tier, and send the request again. Raises
    RuntimeError unless the blocks came from the tier."""
    from stratakv.engine import LLM, SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(
        num_threads=1,
        num_blocks=24,
        block_size=BLOCK_TOKENS,
        max_model_len=10 * BLOCK_TOKENS,
        kv_offload="cpu",
        kv_offload_load="always",
        kv_offload_cpu_bytes="64MiB",
    ) as llm:
        prompt = [TOKEN] * (4 * BLOCK_TOKENS + 1)
        for number in range(NUM_OTHERS + 1):
            llm.generate([[TOKEN + number] * len(prompt)], params)
            time.sleep(0.1)  # time for the tier to store what the next prompt evicts
        follower.walks.clear()
        _, output = llm.generate([[TOKEN - 1] * BLOCK_TOKENS, prompt], params)
    if not (cached := output.cached_tokens_by_tier).get("cpu"):
        raise RuntimeError(f"the blocks did not come from the tier: {cached}")


def _is_followed_request(frame: FrameType) -> bool:
    request = frame.f_locals.get("request")
    return request is not None and int(request.prompt_token_ids[0]) == TOKEN


def _command(*words: str) -> None:
    """Run the command line once, in this process."""
    from stratakv.engine.cli.main import main as command_line

    with contextlib.redirect_stdout(io.StringIO()):
        command_line(list(words))


def _free_port() -> int:
    """Return a free port, below the system's client ports, which another process may take."""
    for port in random.sample(range(15_000, 30_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def _chat(follower: Follower) -> None:
    """Run a server in this thread, and in another thread a client with one streamed request."""
    port = _free_port()
    # So many tokens that the first output, at which the walk ends, is never the last output.
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 64,
        "ignore_eos": True,
        "stream": True,
    }

    def request(method: str, path: str, *content: bytes) -> None:
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)) as server:
            server.request(method, path, *content, headers={"Content-Type": "application/json"})
            server.getresponse().read()

    def ask() -> None:
        end = time.monotonic() + WAIT_SECONDS
        try:
            while time.monotonic() < end:
                with contextlib.suppress(OSError):
                    request("GET", "/health")
                    break
                time.sleep(0.1)
            request("POST", "/v1/chat/completions", json.dumps(body).encode())
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    client = threading.Thread(target=ask)
    client.start()
    _command("serve", "--port", str(port), "--num-threads", "1", "--log-level", "error")
    client.join()


def _open_store(follower: Follower) -> None:
    """Run the command `generate`, whose engine is in this process, with an SSD tier."""
    with tempfile.TemporaryDirectory() as folder:
        tiers = ["--kv-offload", "cpu,ssd", "--kv-offload-cpu-bytes", "16MiB"]
        disk = ["--kv-offload-ssd-path", folder, "--kv-offload-ssd-bytes", "64MiB"]
        _command("generate", *tiers, *disk, "--num-threads", "1", "--prompt", "hello")


WALKS = {
    "admission": Walk(
        roots=(("engine/scheduler/waiting/admission.py", "_consider"),),
        followed=("engine/scheduler/",),
        doors=("engine/cache/kv_cache_manager.py", "connector/"),
        happen=_let_in,
        is_wanted=_is_followed_request,
        opens_once=False,
    ),
    "chat": Walk(
        roots=(
            ("engine/api/openai/chat.py", "create_chat_completion"),
            ("engine/api/openai/response/streaming.py", "__call__"),
            ("engine/api/openai/response/streaming.py", "_send_events"),
        ),
        followed=(
            "engine/api/openai/chat.py",
            "engine/api/openai/request/",
            "engine/api/openai/response/",
        ),
        doors=("engine/api/", "engine/client/", "engine/text/"),
        happen=_chat,
        end=("engine/api/openai/response/streaming.py", "write"),
    ),
    "settings": Walk(
        roots=(
            ("engine/cli/args.py", "parse_all"),
            ("engine/cli/args.py", "engine_config_of"),
            ("engine/core/offload.py", "open_tiers"),
        ),
        followed=(
            "engine/cli/args.py", "engine/config/", "engine/core/offload.py", "connector/build.py",
            "tiers/settings/", "tiers/tier_settings.py", "tiers/assemble.py",
            "tiers/reopening_store.py",
        ),
        doors=("connector/", "tiers/"),
        apart=("engine/config/engine_config.py",),  # has the other settings of an engine
        happen=_open_store,
        end=("tiers/ssd/store.py", "__init__"),
    ),
}  # fmt: skip


def main() -> int:
    """Run the command line; return 1 if a walk did not reach its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("walks", nargs="*", default=[], choices=[*WALKS, []])
    parser.add_argument("--list", action="store_true", help="name the functions of each stay")
    given = parser.parse_args()
    status = 0
    for name in given.walks or WALKS:
        walk = WALKS[name]
        follower = Follower(walk)
        try:
            walk.happen(follower)
        finally:
            follower.close()
        found = stays(walk, follower.walks)
        files = {file for file, _ in found}
        returns = len(found) - len(files)
        print(f"{name}: {len(found)} stays, {returns} of them returns, in {len(files)} files")
        print(" > ".join(Path(file).stem for file, _ in found))
        if given.list:
            print(*(f"    {file}: {', '.join(names)}" for file, names in found), sep="\n")
        if not found or (any(walk.end) and not follower.is_over):
            print(f"{name}: the walk did not come to its end", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
