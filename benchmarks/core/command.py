# SPDX-License-Identifier: Apache-2.0
"""Runs `stratakv bench core`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ..harness.peer import PeerFailed
from ..harness.plots import MET, caption, label_bars, new_figure, save_figure
from ..harness.report import Report, median, print_table, ratios, run_and_tell
from .cases import (
    BLOCK_SIZE,
    FULL_AND_WINDOW,
    HALF,
    NUM_RUNNING,
    NUM_WAITING,
    POOL_REQUESTS,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    REQUESTS,
    SEED,
    TOKEN,
    TWO_GROUPS,
    VOCABULARY,
    Case,
    WrongWork,
    cycle_case,
    decode_lengths,
    evicting_case,
    hash_cases,
    look_up_cases,
    prompt,
    step_case,
)
from .device import DEVICE_SECONDS, DeviceSteps, device_engines
from .traced_steps import (
    LEAST_ROUNDS,
    TURNS,
    add_trace_ratios,
    print_trace,
    take_trace_rounds,
    traced_steps,
)
from .vllm_cases import PEERS, Seconds, VllmPeer, add_peers, interpreter, print_peers


def device_cases(engines: Mapping[str, DeviceSteps]) -> list[Case]:
    """Whole engine steps, a case for each engine."""

    def stepping(engine: DeviceSteps, count: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                if (tokens := engine.step()) != NUM_RUNNING:
                    raise WrongWork(f"{tokens} tokens came out, not {NUM_RUNNING}")

        return work

    # The device is idle while other cases run, so `prepare` fills its queue again.
    return [
        Case(f"device_steps_{name}", "steps/s", _DEVICE_STEPS,
             stepping(engine, _DEVICE_STEPS), stepping(engine, _FILLING_STEPS))
        for name, engine in engines.items()
    ]  # fmt: skip


TITLES: Mapping[str, str] = {
    "hash": "hash blocks: SHA-256, int32 ids (ours)",
    "hash_pickle_sha256": "  SHA-256 of pickled tuples",
    "hash_sha256_cbor": "  SHA-256 of CBOR (ours, for routers)",
    "sha256_alone": "  limit: SHA-256 of all bytes at once",
    "cycles_half_cached": f"{PROMPT_TOKENS:,} tokens in and out, half cached",
    "cycles_two_groups": "  two cache groups: as many bytes, twice the pages",
    "cycles_two_groups_half": f"  two cache groups, {HALF:,} tokens: as many pages",
    "cycles_evicting": "  nothing cached, a full pool",
    "look_up_hit": f"look up {PROMPT_TOKENS:,} tokens, all cached",
    "look_up_miss": "  nothing cached",
    "steps": f"schedule and update, {NUM_RUNNING} decodes",
    "steps_two_groups": "  two cache groups, all full attention",
    "steps_full_and_window": "  two cache groups, one a window of 512",
    "steps_with_waiting": f"  {NUM_WAITING:,} more waiting",
    "device_steps_sync": f"whole engine, {NUM_RUNNING} decodes, a device of 10 ms",
    "device_steps_async": "  steps made beside the device",
}
# ratio → its numerator's case, its denominator's case
RATIOS: Mapping[str, tuple[str, str]] = {
    "hash_vs_pickle_sha256": ("hash", "hash_pickle_sha256"),
    "hash_vs_sha256_cbor": ("hash", "hash_sha256_cbor"),
    "hash_over_sha256_alone": ("hash", "sha256_alone"),
    "steps_with_waiting_over_without": ("steps_with_waiting", "steps"),
}
# comparison → the case with two groups, the case with one; both in processor seconds
TWO_OVER_ONE: Mapping[str, tuple[str, str]] = {
    "steps": ("steps_two_groups", "steps"),
    "steps_full_and_window": ("steps_full_and_window", "steps"),
    "cycles_equal_bytes": ("cycles_two_groups", "cycles_half_cached"),
    "cycles_equal_blocks": ("cycles_two_groups_half", "cycles_half_cached"),
}
TWO_GROUPS_OVER_ONE = "two_groups_over_one"  # the largest of these ratios
# ratio → the case whose step is compared with the device's time
STEP_OVER_DEVICE: Mapping[str, str] = {
    "sync_step_over_device": "device_steps_sync",
    "async_step_over_device": "device_steps_async",
}
LIMIT = "sha256_alone"
_PANELS = (
    ("tokens/s", "hashing blocks"),
    ("cycles/s", "requests"),
    ("look-ups/s", "prefix look-ups"),
    ("steps/s", "steps"),
)


@dataclass(slots=True)
class Rounds:
    """Seconds of one case in each round."""

    wall_seconds: list[float] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)  # processor seconds of the thread


def fill_report(report: Report, cases: Sequence[Case], rounds: Sequence[Rounds]) -> None:
    """Compute figures, limits and ratios from the seconds."""
    rates = {
        case.name: [case.count / seconds for seconds in taken.wall_seconds]
        for case, taken in zip(cases, rounds, strict=True)
    }
    report.figures["plan"] = {
        "block_size": BLOCK_SIZE,
        "token_dtype": str(prompt("dtype", range(BLOCK_SIZE)).all_token_ids.dtype),
        "repeats": len(rounds[0].wall_seconds),
    }
    report.figures["rates"] = {
        case.name: _figures(case, taken) for case, taken in zip(cases, rounds, strict=True)
    }
    report.limits[f"{LIMIT}_tokens_per_second"] = median(rates[LIMIT])
    for name, (above, below) in RATIOS.items():
        report.ratios[name] = median(ratios(rates[above], rates[below]))
    busy = {
        case.name: [case.count / seconds for seconds in taken.busy_seconds]
        for case, taken in zip(cases, rounds, strict=True)
    }
    over_one = {
        name: median(ratios(busy[one], busy[two])) for name, (two, one) in TWO_OVER_ONE.items()
    }
    report.ratios |= {f"{TWO_GROUPS_OVER_ONE}_{name}": value for name, value in over_one.items()}
    report.ratios[TWO_GROUPS_OVER_ONE] = max(over_one.values())
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
        # Below 1 other programs used the processor meanwhile, which lowers the rate.
        "processor_share": busy,
    }


def print_core(report: Report) -> None:
    """Print the tables of rates, ratios, the trace and the peer."""
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
    print_trace(report)
    print_peers(report)


def plot_core(report: Report, path: Path) -> Path:
    """Draw bars of the medians, in a panel for each unit."""
    rates = report.figures["rates"]
    figure, panels = new_figure(2, 2, 5.6)
    for axes, (unit, title) in zip(panels.flat, _PANELS, strict=True):
        names = [name for name in rates if rates[name]["unit"] == unit]
        medians = [rates[name]["median"] for name in names]
        bars = axes.barh([name.replace("_", " ") for name in names], medians, 0.7, color=MET)
        label_bars(axes, bars, "{:,.0f}")
        caption(axes, f"{title}, {unit}")
        if max(medians) > 10 * min(medians):
            axes.set_xscale("log")
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.3)
    return save_figure(figure, report.environment, path)


HASHED_TOKENS = 2**18
MAX_REPEATS = 1000
# Units in one timing of each case: they take some tens of milliseconds.
_CYCLES, _EVICTING, _LOOK_UPS, _STEPS, _DEVICE_STEPS, _FILLING_STEPS = 400, 200, 1000, 50, 20, 2
_TRACED_STEPS = 100  # of a turn: long enough that its records are made and written meanwhile


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error. Raises ConfigError."""
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
    """Measure all cases and fill the report; with `python` also vLLM's core. Raises WrongWork if a
    piece of work gave a wrong result, and PeerFailed."""
    with ExitStack() as stack:
        peer = None
        if python is not None:
            peer = stack.enter_context(VllmPeer(python, peer_plan(repeats)))
            report.figures["peer"] = peer.start()
        steps = (repeats + 1) * (_DEVICE_STEPS + _FILLING_STEPS)
        devices = device_cases(stack.enter_context(device_engines(steps)))
        cases = make_cases(repeats) + devices
        trace_rounds = max(repeats, LEAST_ROUNDS)
        traced = stack.enter_context(traced_steps((trace_rounds + 1) * TURNS * _TRACED_STEPS))
        if peer is not None:
            cases = with_peers(cases, peer)
        # The engine does this before its first step: the collector then skips all older objects.
        gc.collect()
        gc.freeze()
        try:
            rounds = take_rounds(cases, repeats)
            taken = take_trace_rounds(traced, trace_rounds, _TRACED_STEPS)
        finally:
            gc.unfreeze()
    fill_report(report, cases, rounds)
    add_trace_ratios(report, taken)


def peer_plan(repeats: int) -> dict[str, Any]:
    """The sizes of our cases, by which the peer does the same work."""
    lengths = decode_lengths()
    return {
        "seed": SEED, "vocabulary": VOCABULARY, "token": TOKEN, "block_size": BLOCK_SIZE,
        "hash_tokens": HASHED_TOKENS, "prompt_tokens": PROMPT_TOKENS, "half": HALF,
        "requests": REQUESTS, "pool_blocks": POOL_REQUESTS * PROMPT_BLOCKS,
        "prompt_lengths": lengths, "max_tokens": (repeats + 1) * _STEPS + 2,
    }  # fmt: skip


def with_peers(cases: Sequence[Case], peer: VllmPeer) -> list[Case]:
    """All cases, with each of the peer's cases right after ours."""
    theirs = {
        ours: Case(name, case.unit, case.count, partial(peer.take, name, case.count))
        for case in cases
        for name, (ours, *_) in PEERS.items()
        if ours == case.name
    }
    return [each for case in cases for each in (case, theirs.get(case.name)) if each is not None]


def make_cases(repeats: int) -> list[Case]:
    """The cases to measure. A case may be called once to warm up and `repeats` times after that."""
    steps = (repeats + 1) * _STEPS
    return [
        *hash_cases(HASHED_TOKENS),
        cycle_case(_CYCLES),
        cycle_case(_CYCLES, "cycles_two_groups", TWO_GROUPS),
        cycle_case(_CYCLES, "cycles_two_groups_half", TWO_GROUPS, HALF),
        evicting_case(_EVICTING),
        *look_up_cases(_LOOK_UPS),
        step_case("steps", _STEPS, 0, steps),
        step_case("steps_two_groups", _STEPS, 0, steps, attention=TWO_GROUPS),
        step_case("steps_full_and_window", _STEPS, 0, steps, attention=FULL_AND_WINDOW),
        step_case("steps_with_waiting", _STEPS, NUM_WAITING, steps),
    ]


def take_rounds(cases: Sequence[Case], repeats: int) -> list[Rounds]:
    """Wall-clock and processor seconds of each case in each round. The cases run in turn."""
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
