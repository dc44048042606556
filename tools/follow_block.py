# SPDX-License-Identifier: Apache-2.0
"""Follows a prompt's KV blocks to the SSD and back; counts the modules and calls between files.

    python tools/follow_block.py             the counts
    python tools/follow_block.py --list      the modules and doors too
    python tools/follow_block.py --runs 3    three times, each in a process of its own

An engine with the embedded model, a small pool and a smaller slab computes a prompt. The engine
then computes other prompts until pool and slab have evicted the first prompt's blocks, and computes
the first prompt again. A module counts if one of its functions ran, in any thread, between the
first and the last request; code that runs only at the start or end of the engine does not count. A
door is a pair of functions in different files below `FLOORS`, one of which called the other. The
exit status is 1 unless the request's own counts say that its blocks came from the SSD.

The tool imports only `LLM` and `SamplingParams` from the package, so it can be run on another
version: it follows the package that this Python imports."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

# Folders of the code that handles blocks; calls in other folders are not counted as doors.
FLOORS = ("connector", "tiers", "kernels", "engine/scheduler", "engine/cache")
# Files that were moved out of FLOORS on 2026-11-28 or later, and still count as in FLOORS.
ONCE_ON_FLOORS: tuple[str, ...] = ()
NOT_OURS = ("tests", "tools", ".venv", "build")
BLOCK_TOKENS = 16
PROMPT_TOKENS = 4 * BLOCK_TOKENS + 1  # the prompt has four whole blocks that can be reused
POOL_BLOCKS = 16
SLAB_BYTES = "1MiB"  # ten blocks of the embedded model
NUM_OTHERS = 8  # other prompts, with twice the blocks of pool and slab together


class Follower:
    """A profiler that records every call while `is_on`, in threads that start later."""

    def __init__(self) -> None:
        self.is_on = False
        self.codes: set[CodeType] = set()
        self.calls: set[tuple[CodeType | None, CodeType]] = set()  # (caller, called function)
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)

    def close(self) -> None:
        """Stop recording, in this thread and in threads that are started later."""
        self.is_on = False
        threading.setprofile(None)
        sys.setprofile(None)

    def way(self, root: Path) -> Way:
        """Return the modules and doors below `root` among the recorded calls."""
        # The body of a module or class runs at an import, which is not counted.
        codes = {code for code in self.codes if code.co_flags & CO_OPTIMIZED}
        paths = {code: path for code in codes if (path := _path_below(root, code.co_filename))}
        modules = {
            path: len((root / path).read_text(encoding="utf-8").splitlines())
            for path in sorted(set(paths.values()))
        }
        doors = {
            f"{paths[caller]} {caller.co_qualname} > {paths[called]} {called.co_qualname}"
            for caller, called in self.calls
            if caller in paths and called in paths and paths[caller] != paths[called]
            if _below(paths[caller], FLOORS) and _below(paths[called], FLOORS)
        }
        return Way(modules, sorted(doors))

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            self.codes.add(frame.f_code)
            caller = frame.f_back
            self.calls.add((caller and caller.f_code, frame.f_code))


class Way(NamedTuple):
    """The modules and doors that a prompt's blocks passed."""

    modules: dict[str, int]  # path of each module with a function that ran → its number of lines
    doors: list[str]


def _path_below(root: Path, name: str) -> str | None:
    """Return the path below `root` of a file of the package; None for any other file."""
    path = Path(name).resolve()
    if name.startswith("<") or not path.is_relative_to(root):
        return None
    below = path.relative_to(root)
    return None if below.parts[0] in NOT_OURS else below.as_posix()


def follow(pause_seconds: float) -> tuple[Way, dict[str, int]]:
    """Return the modules and doors of the blocks, and the last request's cached tokens by tier."""
    follower = Follower()  # created before torch and the engine start threads
    import stratakv
    from stratakv.engine import LLM, SamplingParams

    root = Path(stratakv.__file__).resolve().parent
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with (
        tempfile.TemporaryDirectory(prefix="stratakv-follow-") as folder,
        LLM(
            num_threads=1,
            num_blocks=POOL_BLOCKS,
            block_size=BLOCK_TOKENS,
            max_model_len=2 * PROMPT_TOKENS,
            kv_offload="cpu,ssd",
            kv_offload_load="always",
            kv_offload_cpu_bytes=SLAB_BYTES,
            kv_offload_ssd_path=folder,
            kv_offload_ssd_bytes="64MiB",
        ) as llm,
    ):
        follower.is_on = True
        for number in [*range(NUM_OTHERS + 1), 0]:
            [output] = llm.generate([[100 + number] * PROMPT_TOKENS], params)
            time.sleep(pause_seconds)  # time for the tiers to write evicted blocks
        follower.is_on = False
    follower.close()
    return follower.way(root), output.cached_tokens_by_tier


def report(ways: Sequence[Way], *, lists: bool) -> None:
    """Print the counts of one run or several runs."""
    runs = [way.modules for way in ways]
    every: dict[str, int] = {}
    for run in runs:
        every |= run
    print("modules         lines")
    for name, floors in (("all", ("",)), (f"only {', '.join(FLOORS)}", FLOORS)):
        chosen = [
            {path: lines for path, lines in run.items() if _below(path, floors)} for run in runs
        ]
        modules = _range([len(run) for run in chosen])
        print(f"{modules:12}  {_range([sum(run.values()) for run in chosen]):13}  {name}")
    folders: dict[str, dict[str, int]] = defaultdict(dict)
    for path, lines in every.items():
        folders[path.split("/")[0] if "/" in path else "."][path] = lines
    for folder, found in folders.items():
        print(f"  {len(found):10}  {sum(found.values()):<13,}  {folder}/")
        if lists:
            print(*(f"{'':14}{lines:<13}  {path}" for path, lines in found.items()), sep="\n")
    unsure = [path for path in every if not all(path in run for run in runs)]
    if unsure:
        print(f"not in every run: {', '.join(unsure)}")
    doors = sorted(set().union(*(way.doors for way in ways)))
    print(f"{len(doors)} doors in {len(ways)} runs together")
    if lists:
        print(*(f"  {door}" for door in doors), sep="\n")


def _below(path: str, folders: Sequence[str]) -> bool:
    return path in ONCE_ON_FLOORS or any(
        not folder or path.startswith(f"{folder}/") for folder in folders
    )


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if the blocks did not come back from the SSD."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name each module and door")
    parser.add_argument("--json", action="store_true", help="print the way of one run as JSON")
    parser.add_argument("--runs", type=int, default=1, help="how often (default 1)")
    parser.add_argument(
        "--pause", type=float, default=0.2, help="seconds after each request (default 0.2)"
    )
    given = parser.parse_args(words)
    if given.json:
        way, cached = follow(given.pause)
        print(json.dumps({**way._asdict(), "cached_tokens": cached}))
        return 0 if _came_from_ssd(cached) else 1
    command = [sys.executable, __file__, "--json", "--pause", str(given.pause)]
    runs = []
    for _ in range(given.runs):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout:
            return 1  # the child has printed the reason
        answer = json.loads(done.stdout)
        print(f"cached tokens of the last request: {answer['cached_tokens']}")
        if done.returncode:
            print("its blocks did not come back from the SSD; try a longer --pause")
            return 1
        runs.append(Way(answer["modules"], answer["doors"]))
    report(runs, lists=given.list)
    return 0


def _came_from_ssd(cached: dict[str, int]) -> bool:
    return cached.get("ssd", 0) > 0


if __name__ == "__main__":
    sys.exit(main())
