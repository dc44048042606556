# SPDX-License-Identifier: Apache-2.0
"""Follows one waiting request through admission, and counts how often its reader changes files.

    python tools/walk_admission.py

One engine with the embedded model, a pool of few blocks and a CPU tier. A prompt whose blocks only
the tier has is let in beside another one: once to be loaded, once, when its blocks have come, to
run. The walk is that of somebody who reads the two calls from top to bottom and opens what is
called:

    stay      a file that is read without leaving it
    return    a stay in a file where the reader was before

The files of the scheduler are followed. The cache manager and the connector are doors: opening one
is a stay, what is behind it is none, for their docstrings say what they do. Functions that call
nothing of ours are read in passing, and coming back to a caller counts only where it goes on to
call something that is not.

The tool uses nothing of the package but `LLM` and `SamplingParams`, so the same file can be run on
another version: what counts is the package that this Python imports.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT_FILE, ROOT_FUNCTION = "engine/scheduler/admission.py", "_consider"
FOLLOWED = "engine/scheduler/"
DOORS = ("engine/cache/kv_cache_manager.py", "connector/")
BLOCK_TOKENS = 16
TOKEN = 100  # the followed prompt's only one
NUM_OTHERS = 6  # prompts, twice what the pool holds


@dataclass(slots=True)
class Call:
    """One call of a function of ours, with those made in it."""

    file: str
    inner: list[Call] = field(default_factory=list)


class Follower:
    """Notes the calls made while the followed request is considered, on any thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[int, list[tuple[FrameType, Call]]] = {}  # by thread
        self.walks: list[Call] = []
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)

    def close(self) -> None:
        """Hear no more, and start no thread that does."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        calls = self._open.setdefault(threading.get_ident(), [])
        if event == "return" and calls and calls[-1][0] is frame:
            calls.pop()
        if event != "call":
            return
        code = frame.f_code
        begins = not calls and code.co_name == ROOT_FUNCTION and self._is_followed(frame)
        if not (calls or begins) or code.co_name.startswith("<"):
            return
        path = Path(code.co_filename)
        if not path.is_relative_to(self._root):
            return
        call = Call(path.relative_to(self._root).as_posix())
        if calls:
            calls[-1][1].inner.append(call)
        elif call.file == ROOT_FILE:
            self.walks.append(call)
        else:
            return
        calls.append((frame, call))

    def _is_followed(self, frame: FrameType) -> bool:
        request = frame.f_locals.get("request")
        return request is not None and int(request.prompt_token_ids[0]) == TOKEN


def follow() -> tuple[list[Call], dict[str, int]]:
    """The two calls that let the request in, and where its tokens came from."""
    import stratakv
    from stratakv.engine import LLM, SamplingParams

    follower = Follower(Path(stratakv.__file__).parent)
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
            time.sleep(0.1)  # for the tier to take what the next prompt displaces
        follower.walks.clear()
        _, output = llm.generate([[TOKEN - 1] * BLOCK_TOKENS, prompt], params)
    follower.close()
    return follower.walks, output.cached_tokens_by_tier


def stays(walks: Sequence[Call]) -> list[str]:
    """The files in the order in which they are read."""
    found: list[str] = []

    def read(call: Call) -> None:
        if not found or found[-1] != call.file:
            found.append(call.file)

    def walk(call: Call) -> None:
        read(call)
        for inner in call.inner:
            is_door = inner.file.startswith(DOORS)
            if inner.inner and (is_door or inner.file.startswith(FOLLOWED)):
                read(call)
                walk(Call(inner.file) if is_door else inner)

    for call in walks:
        walk(call)
    return found


def main() -> int:
    """The command line; 1 where the request's blocks did not come from the tier."""
    walks, cached = follow()
    if not cached.get("cpu"):
        print(f"the blocks did not come from the tier: {cached}", file=sys.stderr)
        return 1
    files = stays(walks)
    returns = len(files) - len(set(files))
    print(f"{len(files)} stays, {returns} of them returns, in {len(set(files))} files")
    print(" > ".join(Path(file).stem for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
