# SPDX-License-Identifier: Apache-2.0
"""Follows one prompt's blocks out to the SSD and back, and counts the modules that take part.

    python tools/follow_block.py             the counts
    python tools/follow_block.py --list      the modules too
    python tools/follow_block.py --runs 3    three times, each in a process of its own

One engine with the embedded model, a pool of few blocks and a slab of fewer computes a prompt, then
others until the pool and the slab have evicted the prompt's blocks, then the prompt again. A module
takes part if one of its functions ran, in any thread, from the first of these requests to the last;
what runs only while the engine starts or closes does not count. The request's own counts must say
that the blocks came back from the SSD; otherwise the exit status is 1.

The tool uses nothing of the package but `LLM` and `SamplingParams`, so the same file can be run on
another version: what counts is the package that this Python imports.
"""

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
from typing import Any

# The floors that a block passes; the rest is about text, sampling, the model and the process.
FLOORS = ("connector", "tiers", "kernels", "engine/scheduler", "engine/cache")
NOT_OURS = ("tests", "tools", ".venv", "build")
BLOCK_TOKENS = 16
PROMPT_TOKENS = 4 * BLOCK_TOKENS + 1  # four whole blocks can be reused
POOL_BLOCKS = 16
SLAB_BYTES = "1MiB"  # ten blocks of the embedded model
NUM_OTHERS = 8  # prompts, twice what the pool and the slab hold together


class Follower:
    """Notes every function that begins while it is on, in threads started after it was made."""

    def __init__(self) -> None:
        self.is_on = False
        self.codes: set[CodeType] = set()
        threading.setprofile(self._hear)
        sys.setprofile(self._hear)

    def close(self) -> None:
        """Hear no more, and start no thread that does."""
        self.is_on = False
        threading.setprofile(None)
        sys.setprofile(None)

    def lines_of_modules(self, root: Path) -> dict[str, int]:
        """Path below `root` -> lines, for each of our modules with a function that ran."""
        found = {}
        # A module's or a class's body runs when it is imported, which is no part of the way.
        names = {code.co_filename for code in self.codes if code.co_flags & CO_OPTIMIZED}
        for path in {Path(name).resolve() for name in names if not name.startswith("<")}:
            if path.is_relative_to(root) and path.relative_to(root).parts[0] not in NOT_OURS:
                text = path.read_text(encoding="utf-8")
                found[path.relative_to(root).as_posix()] = len(text.splitlines())
        return dict(sorted(found.items()))

    def _hear(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            self.codes.add(frame.f_code)


def follow(pause_seconds: float) -> tuple[dict[str, int], dict[str, int]]:
    """The modules that took part, with their lines, and where the prompt's tokens came from."""
    follower = Follower()  # before torch and the engine start threads
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
            time.sleep(pause_seconds)  # for the tiers to write what the next prompt displaces
        follower.is_on = False
    follower.close()
    return follower.lines_of_modules(root), output.cached_tokens_by_tier


def report(runs: Sequence[dict[str, int]], *, lists: bool) -> None:
    """Print the counts of one run or several."""
    every: dict[str, int] = {}
    for run in runs:
        every |= run
    print("modules         lines")
    for name, floors in (("all", ("",)), (f"only {', '.join(FLOORS)}", FLOORS)):
        chosen = [_below(run, floors) for run in runs]
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


def _below(run: dict[str, int], folders: Sequence[str]) -> dict[str, int]:
    return {
        path: lines
        for path, lines in run.items()
        if any(not folder or path.startswith(f"{folder}/") for folder in folders)
    }


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def main(words: Sequence[str] | None = None) -> int:
    """The command line; 1 where the blocks did not come back from the SSD."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name each module")
    parser.add_argument("--json", action="store_true", help="print the modules of one run as JSON")
    parser.add_argument("--runs", type=int, default=1, help="how often (default 1)")
    parser.add_argument(
        "--pause", type=float, default=0.2, help="seconds after each request (default 0.2)"
    )
    given = parser.parse_args(words)
    if given.json:
        modules, cached = follow(given.pause)
        print(json.dumps({"modules": modules, "cached_tokens": cached}))
        return 0 if _came_from_ssd(cached) else 1
    command = [sys.executable, __file__, "--json", "--pause", str(given.pause)]
    runs = []
    for _ in range(given.runs):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if not done.stdout:
            return 1  # it has said why
        answer = json.loads(done.stdout)
        print(f"cached tokens of the last request: {answer['cached_tokens']}")
        if done.returncode:
            print("its blocks did not come back from the SSD; try a longer --pause")
            return 1
        runs.append(answer["modules"])
    report(runs, lists=given.list)
    return 0


def _came_from_ssd(cached: dict[str, int]) -> bool:
    return cached.get("ssd", 0) > 0


if __name__ == "__main__":
    sys.exit(main())
