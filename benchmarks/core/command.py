# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core`: how fast the engine names blocks, hands them out and makes up steps.

No model is computed: the real block hasher, cache manager and scheduler do their work, and the
worker's answers are made up; or the whole engine does, beside a device that is a clock
(`device.py`). All figures are taken in turn, in as many rounds as there are repeats, so that what
else the machine does meets them alike; each is the median of its rounds, and a ratio is the median
of the ratios within a round. Token ids are int32 throughout.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.cache.block_hash import make_block_hasher
from ...engine.cache.kv_cache_manager import KVCacheManager
from ...engine.config import SchedulerConfig
from ...engine.observer import Observer
from ...engine.request import BlockHasher, Request, TokenArray
from ...engine.sampling_params import SamplingParams
from ...engine.scheduler.output import ModelRunnerOutput
from ...engine.scheduler.scheduler import Scheduler
from ...tiers.block import DIGEST_BYTES, Identity
from ...tiers.settings import readers
from ..harness.peer import PeerFailed
from ..harness.plots import caption, draw_bars, new_figure, save_figure
from ..harness.report import Report, median, print_table, ratios, run_and_tell
from .device import DEVICE_SECONDS, DeviceSteps, device_engines, step_trace
from .hash_peers import pickle_sha256_chain
from .vllm_cases import PEERS, Seconds, VllmPeer, add_peers, interpreter, print_peers

BLOCK_SIZE = 16
PROMPT_TOKENS = 4096
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
HALF = PROMPT_TOKENS // 2
VOCABULARY = 128_000
NUM_RUNNING = 256
NUM_WAITING = 4096
DECODE_PROMPT_TOKENS = 512
# Requests of the cycles; enough that the pool has dropped what one left before it comes again.
_REQUESTS = 24
_POOL_REQUESTS = 8
_SEED = 11
_TOKEN = 7

ROOT = Identity("benchmark", "", "bfloat16", BLOCK_SIZE).root()


class WrongWork(RuntimeError):
    """A piece of work did not do what its figure would claim."""


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: `work` does `count` units, after `prepare`, which is not timed."""

    name: str
    unit: str
    count: int
    work: Callable[[], object]
    prepare: Callable[[], object] | None = None


def hash_cases(num_tokens: int) -> list[Case]:
    """The same tokens hashed in each form, and SHA-256 alone as the limit."""
    tokens = _tokens(np.random.default_rng(_SEED), num_tokens)
    request = Request("hash", tokens, SamplingParams(max_tokens=1))
    ids: list[int] = tokens.tolist()
    count = num_tokens // BLOCK_SIZE
    # As many bytes as the blocks and their parents have, in one piece; several times, or it would
    # be over so soon that, unlike the others, it seldom has to share its processor.
    times = 8
    raw = times * (request.all_token_ids.tobytes() + bytes(count * DIGEST_BYTES))

    def hashing(digests_of: Callable[[], list[bytes]]) -> Callable[[], None]:
        def work() -> None:
            named = len(digests_of())
            if named != count:
                raise WrongWork(f"{named} of {count} blocks were named")

        return work

    def ours(algorithm: str) -> Callable[[], list[bytes]]:
        hasher = make_block_hasher(ROOT, BLOCK_SIZE, algorithm)
        return lambda: hasher.digests(request)

    return [
        Case("hash", "tokens/s", num_tokens, hashing(ours("sha256"))),
        Case("hash_pickle_sha256", "tokens/s", num_tokens,
             hashing(lambda: pickle_sha256_chain(ROOT, ids, BLOCK_SIZE))),
        Case("hash_sha256_cbor", "tokens/s", num_tokens, hashing(ours("sha256_cbor"))),
        Case("sha256_alone", "tokens/s", times * num_tokens, lambda: hashlib.sha256(raw).digest()),
    ]  # fmt: skip


def cycle_case(count: int) -> Case:
    """Look up, allocate and free a request whose first half is cached, over and over.

    Each second half takes blocks that an older one left, so names are dropped and given all along.
    """
    rng = np.random.default_rng(_SEED)
    prefix = _tokens(rng, HALF)
    requests = cycle(
        [_prompt(f"r{i}", np.concatenate((prefix, _tokens(rng, HALF)))) for i in range(_REQUESTS)]
    )
    manager = _manager(_POOL_REQUESTS * PROMPT_BLOCKS)
    run_through(manager, next(requests))

    def work() -> None:
        for _ in range(count):
            cached = run_through(manager, next(requests))
            if cached != HALF:
                raise WrongWork(f"{cached} tokens were found, not {HALF}")

    return Case("cycles_half_cached", "cycles/s", count, work)


def evicting_case(count: int) -> Case:
    """The same with nothing cached and a full pool: every block that is taken drops a name."""
    rng = np.random.default_rng(_SEED)
    requests = cycle([_prompt(f"r{i}", _tokens(rng, PROMPT_TOKENS)) for i in range(_REQUESTS)])
    manager = _manager(_POOL_REQUESTS * PROMPT_BLOCKS)
    for _ in range(_POOL_REQUESTS):
        run_through(manager, next(requests))

    def work() -> None:
        before = manager.pool.num_evicted
        for _ in range(count):
            run_through(manager, next(requests))
        evicted = manager.pool.num_evicted - before
        if evicted != count * PROMPT_BLOCKS:
            raise WrongWork(f"{evicted} blocks were evicted, not {count * PROMPT_BLOCKS}")

    return Case("cycles_evicting", "cycles/s", count, work)


def look_up_cases(count: int) -> list[Case]:
    """Finding a prefix of 4,096 tokens, and finding that there is none."""
    rng = np.random.default_rng(_SEED)
    manager = _manager(2 * PROMPT_BLOCKS)
    known = _prompt("known", _tokens(rng, PROMPT_TOKENS))
    unknown = _prompt("unknown", _tokens(rng, PROMPT_TOKENS))
    run_through(manager, known)

    def looking(request: Request, expected: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                _, found = manager.get_computed_blocks(request)
                if found != expected:
                    raise WrongWork(f"{found} tokens were found, not {expected}")

        return work

    # The last block is never a hit: its last token must be computed to get its logits.
    return [
        Case("look_up_hit", "look-ups/s", count, looking(known, PROMPT_TOKENS - BLOCK_SIZE)),
        Case("look_up_miss", "look-ups/s", count, looking(unknown, 0)),
    ]


def step_case(name: str, count: int, waiting: int, max_steps: int, *heard: Observer) -> Case:
    """Steps of 256 requests that each get one token, with others waiting; at most `max_steps`
    in all calls together, or the requests would come to their end."""
    decodes = Decodes(waiting, max_steps, *heard)

    def work() -> None:
        for _ in range(count):
            decodes.step()

    return Case(name, "steps/s", count, work)


def device_cases(engines: Mapping[str, DeviceSteps]) -> list[Case]:
    """Whole steps of the engines."""

    def stepping(engine: DeviceSteps, count: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                if (tokens := engine.step()) != NUM_RUNNING:
                    raise WrongWork(f"{tokens} tokens came out, not {NUM_RUNNING}")

        return work

    # The others have had their turns: until its queue is as full as it stays, the device was idle.
    return [
        Case(f"device_steps_{name}", "steps/s", _DEVICE_STEPS,
             stepping(engine, _DEVICE_STEPS), stepping(engine, _FILLING_STEPS))
        for name, engine in engines.items()
    ]  # fmt: skip


def decode_lengths() -> list[int]:
    """Of the prompts: they differ, so that as many requests begin a block in each step."""
    return [DECODE_PROMPT_TOKENS + i % BLOCK_SIZE for i in range(NUM_RUNNING)]


class Decodes:
    """A scheduler with as many running requests as may run, all of them past their prompts."""

    def __init__(self, num_waiting: int, max_steps: int, *heard: Observer) -> None:
        lengths = decode_lengths()
        # The step of the prompts gives a token too, and nobody comes to the end.
        max_tokens = max_steps + 2
        longest = max(lengths) + max_tokens
        manager = KVCacheManager(NUM_RUNNING * -(-longest // BLOCK_SIZE) * 2, BLOCK_SIZE, longest)
        config = SchedulerConfig(
            max_num_batched_tokens=sum(lengths),
            max_num_seqs=NUM_RUNNING,
            max_waiting_requests=NUM_RUNNING + num_waiting,
        )
        self.scheduler = Scheduler(
            config, manager, max_model_len=longest, eos_token_ids=frozenset(), observers=heard
        )
        rng = np.random.default_rng(_SEED)
        hasher = _hasher()
        params = SamplingParams(max_tokens=max_tokens)
        lengths += [DECODE_PROMPT_TOKENS] * num_waiting
        for i, length in enumerate(lengths):
            tokens = _tokens(rng, length)
            self.scheduler.add_request(Request(f"r{i}", tokens, params, block_hasher=hasher))
        self._sampled = ModelRunnerOutput({f"r{i}": [_TOKEN] for i in range(NUM_RUNNING)})
        self.step(sum(lengths[:NUM_RUNNING]))

    def step(self, num_tokens: int = NUM_RUNNING) -> None:
        """One `schedule` and the update from what a worker would have answered."""
        scheduled = self.scheduler.schedule()
        outputs = self.scheduler.update_from_output(scheduled, self._sampled)
        done = (scheduled.total_num_scheduled_tokens, len(outputs), self.scheduler.num_running)
        if done != (num_tokens, NUM_RUNNING, NUM_RUNNING):
            raise WrongWork(f"tokens, outputs and running requests were {done}")


def run_through(manager: KVCacheManager, request: Request) -> int:
    """One request from look-up to free, with what a step does in between; its cached tokens."""
    hits, num_cached = manager.get_computed_blocks(request)
    added = manager.allocate_slots(request, request.num_tokens - num_cached, num_cached, hits)
    if added is None:
        raise WrongWork("the pool had no room")
    manager.pool.take_evicted()
    manager.pool.commit_step()
    manager.free(request)
    return num_cached


def _prompt(name: str, tokens: Sequence[int] | TokenArray) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=1), block_hasher=_hasher())


def _hasher() -> BlockHasher:
    return make_block_hasher(ROOT, BLOCK_SIZE)


def _tokens(rng: np.random.Generator, count: int) -> TokenArray:
    return rng.integers(0, VOCABULARY, count, np.int32)


def _manager(num_blocks: int) -> KVCacheManager:
    return KVCacheManager(num_blocks + 1, BLOCK_SIZE, PROMPT_TOKENS + BLOCK_SIZE, watermark=0.0)


TITLES: Mapping[str, str] = {
    "hash": "name blocks: SHA-256, int32 ids (ours)",
    "hash_pickle_sha256": "  SHA-256 of pickled tuples",
    "hash_sha256_cbor": "  SHA-256 of CBOR (ours, for routers)",
    "sha256_alone": "  limit: SHA-256 of all bytes at once",
    "cycles_half_cached": f"{PROMPT_TOKENS:,} tokens in and out, half cached",
    "cycles_evicting": "  nothing cached, a full pool",
    "look_up_hit": f"look up {PROMPT_TOKENS:,} tokens, all cached",
    "look_up_miss": "  nothing cached",
    "steps": f"schedule and update, {NUM_RUNNING} decodes",
    "steps_with_waiting": f"  {NUM_WAITING:,} more waiting",
    "steps_traced": "  with a step trace",
    "device_steps_sync": f"whole engine, {NUM_RUNNING} decodes, a device of 10 ms",
    "device_steps_async": "  steps made beside the device",
}
# ratio → the case above the line, the case below it
RATIOS: Mapping[str, tuple[str, str]] = {
    "hash_vs_pickle_sha256": ("hash", "hash_pickle_sha256"),
    "hash_vs_sha256_cbor": ("hash", "hash_sha256_cbor"),
    "hash_over_sha256_alone": ("hash", "sha256_alone"),
    "steps_with_waiting_over_without": ("steps_with_waiting", "steps"),
    "steps_traced_over_untraced": ("steps_traced", "steps"),
}
# ratio → the case whose step is held against the device's time
STEP_OVER_DEVICE: Mapping[str, str] = {
    "sync_step_over_device": "device_steps_sync",
    "async_step_over_device": "device_steps_async",
}
LIMIT = "sha256_alone"
_PANELS = (
    ("tokens/s", "naming blocks"),
    ("cycles/s", "requests"),
    ("look-ups/s", "prefix look-ups"),
    ("steps/s", "steps"),
)


@dataclass(slots=True)
class Rounds:
    """What one case took, round by round."""

    wall_seconds: list[float] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)  # of the thread, on a processor


def fill_report(report: Report, cases: Sequence[Case], rounds: Sequence[Rounds]) -> None:
    """Turn seconds into figures, limits and ratios."""
    rates = {
        case.name: [case.count / seconds for seconds in taken.wall_seconds]
        for case, taken in zip(cases, rounds, strict=True)
    }
    report.figures["plan"] = {
        "block_size": BLOCK_SIZE,
        "token_dtype": str(_prompt("dtype", range(BLOCK_SIZE)).all_token_ids.dtype),
        "repeats": len(rounds[0].wall_seconds),
    }
    report.figures["rates"] = {
        case.name: _figures(case, taken) for case, taken in zip(cases, rounds, strict=True)
    }
    report.limits[f"{LIMIT}_tokens_per_second"] = median(rates[LIMIT])
    for name, (above, below) in RATIOS.items():
        report.ratios[name] = median(ratios(rates[above], rates[below]))
    for name, case in STEP_OVER_DEVICE.items():
        report.ratios[name] = median([1.0 / (rate * DEVICE_SECONDS) for rate in rates[case]])
    add_peers(report, rates)


def _figures(case: Case, taken: Rounds) -> dict[str, Any]:
    busy = sum(taken.busy_seconds) / sum(taken.wall_seconds)
    return {
        "unit": case.unit,
        "median": case.count / median(taken.wall_seconds),
        "lowest": case.count / max(taken.wall_seconds),
        "highest": case.count / min(taken.wall_seconds),
        # Below 1, others had the processor meanwhile, and the rate is lower for it.
        "processor_share": busy,
    }


def print_core(report: Report) -> None:
    """The tables a person reads."""
    rows = [
        [
            TITLES.get(name) or PEERS[name].title,
            f"{figures['median']:,.0f}",
            f"{figures['highest']:,.0f}",
            figures["unit"],
            f"{figures['processor_share']:.2f}",
        ]
        for name, figures in report.figures["rates"].items()
    ]
    repeats = report.figures["plan"]["repeats"]
    title = f"One thread, blocks of {BLOCK_SIZE} tokens, {repeats} rounds"
    print_table(title, ["what", "median", "highest", "unit", "CPU share"], rows)
    rows = [[name.replace("_", " "), f"{value:.2f}"] for name, value in report.ratios.items()]
    print_table("Ratios of this run", ["what", "ratio"], rows)
    print_peers(report)


def plot_core(report: Report, path: Path) -> Path:
    """Bars of the medians by unit."""
    rates = report.figures["rates"]
    figure, panels = new_figure(2, 2, 5.6)
    for axes, (unit, title) in zip(panels.flat, _PANELS, strict=True):
        names = [name for name in rates if rates[name]["unit"] == unit]
        medians = [rates[name]["median"] for name in names]
        labels = ["\n".join(textwrap.wrap(name.replace("_", " "), 11)) for name in names]
        draw_bars(axes, labels, {"": medians}, fmt="{:,.0f}")
        caption(axes, f"{title}, {unit}")
        if max(medians) > 10 * min(medians):
            axes.set_yscale("log")
        axes.margins(y=0.2)
    return save_figure(figure, report.environment, path)


HASHED_TOKENS = 2**18
MAX_REPEATS = 1000
# How much one timing of each does: some tens of milliseconds.
_CYCLES, _EVICTING, _LOOK_UPS, _STEPS, _DEVICE_STEPS, _FILLING_STEPS = 400, 200, 1000, 50, 20, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument("--repeats", type=int, help="timings of each figure (25, quick 5)")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="a Python with vLLM, to measure its core in turn"
    )


def run(arguments: argparse.Namespace) -> int:
    """Take all figures; 0, or 1 with the reason on the terminal. Raises ConfigError."""
    repeats = arguments.repeats
    if repeats is None:
        repeats = 5 if arguments.quick else 25
    readers.integer_within(1, MAX_REPEATS)("--repeats", repeats)
    python = None if arguments.peer_python is None else interpreter(arguments.peer_python)
    report = Report("core", "stratakv bench core")
    failures = (WrongWork, PeerFailed)
    work = partial(measure, report, repeats, python)
    return run_and_tell(report, arguments.out, work, print_core, plot_core, *failures)


def measure(report: Report, repeats: int, python: str | None = None) -> None:
    """Fill the report, with vLLM's core where a Python has it. Raises WrongWork where something did
    not do what it should, and PeerFailed."""
    with ExitStack() as stack:
        peer = None
        if python is not None:
            peer = stack.enter_context(VllmPeer(python, peer_plan(repeats)))
            report.figures["peer"] = peer.start()
        steps = (repeats + 1) * (_DEVICE_STEPS + _FILLING_STEPS)
        devices = device_cases(stack.enter_context(device_engines(steps)))
        cases = make_cases(repeats, stack.enter_context(step_trace())) + devices
        if peer is not None:
            cases = with_peers(cases, peer)
        # As the engine does before its first step: what is there is not looked at again.
        gc.collect()
        gc.freeze()
        try:
            rounds = take_rounds(cases, repeats)
        finally:
            gc.unfreeze()
    fill_report(report, cases, rounds)


def peer_plan(repeats: int) -> dict[str, Any]:
    """What the peer must know to do the same."""
    lengths = decode_lengths()
    return {
        "seed": _SEED, "vocabulary": VOCABULARY, "token": _TOKEN, "block_size": BLOCK_SIZE,
        "hash_tokens": HASHED_TOKENS, "prompt_tokens": PROMPT_TOKENS, "half": HALF,
        "requests": _REQUESTS, "pool_blocks": _POOL_REQUESTS * PROMPT_BLOCKS,
        "prompt_lengths": lengths, "max_tokens": (repeats + 1) * _STEPS + 2,
    }  # fmt: skip


def with_peers(cases: Sequence[Case], peer: VllmPeer) -> list[Case]:
    """Each of the peer's cases right after ours."""
    theirs = {
        ours: Case(name, case.unit, case.count, partial(peer.take, name, case.count))
        for case in cases
        for name, (ours, *_) in PEERS.items()
        if ours == case.name
    }
    return [each for case in cases for each in (case, theirs.get(case.name)) if each is not None]


def make_cases(repeats: int, trace: Observer) -> list[Case]:
    """What is measured, ready to be called once to warm up and `repeats` times after it."""
    steps = (repeats + 1) * _STEPS
    return [
        *hash_cases(HASHED_TOKENS),
        cycle_case(_CYCLES),
        evicting_case(_EVICTING),
        *look_up_cases(_LOOK_UPS),
        step_case("steps", _STEPS, 0, steps),
        step_case("steps_with_waiting", _STEPS, NUM_WAITING, steps),
        step_case("steps_traced", _STEPS, 0, steps, trace),
    ]


def take_rounds(cases: Sequence[Case], repeats: int) -> list[Rounds]:
    """Wall and processor seconds of each case in each round; the cases take turns."""
    rounds = [Rounds() for _ in cases]
    for case in cases:
        case.work()
    for _ in range(repeats):
        for case, taken in zip(cases, rounds, strict=True):
            if case.prepare is not None:
                case.prepare()
            wall, busy = time.perf_counter(), time.thread_time()
            took = case.work()
            here = Seconds(time.perf_counter() - wall, time.thread_time() - busy)
            elsewhere = took if isinstance(took, Seconds) else here
            taken.busy_seconds.append(elsewhere.busy)
            taken.wall_seconds.append(elsewhere.wall)
    return rounds
