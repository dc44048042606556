# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench trace [PATH ...]`: request traces replayed against eviction and admission.

A PATH is a trace (JSON Lines with hash_ids, plain or gzip) or a folder of them; without one, two
traces are made up, of chats and of coding agents. Every eviction policy meets every trace in one
tier of 1 to 50 % of its distinct blocks, and admission filters in two tiers. No byte is moved. LRU,
and what the best possible policy (Belady's) would hit, are measured beside them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence

from rich.console import Console

from ...tiers.admission import FILTERS
from ...tiers.policies.choice import POLICIES
from ...tiers.settings import readers
from ...tiers.settings.values import ConfigError
from ..harness.command import progress, run_and_tell
from ..harness.report import Report
from .cells import (
    HEADS_FIRST,
    LRU,
    OPT,
    Answer,
    AnyCell,
    Cell,
    CellFailed,
    PairCell,
    Source,
    run_cells,
)
from .contenders import ADMIT_ALL, choose_filter, choose_policy
from .formats import TraceError, trace_files, trace_name
from .report import fill_report, plot_traces, print_traces
from .synthetic import AGENTS, CHAT
from .trace import Trace
from .two_tiers import Arrangement

CAPACITIES_PERCENT = (1, 2, 5, 10, 20, 50)
PAIRS_PERCENT = ((1, 5), (2, 10), (5, 20))
# Requests of the made-up traces: as many as the public ones have, and a small form.
_REQUESTS = {CHAT.name: (12_000, 1_500), AGENTS.name: (7_000, 600)}
MAX_SEED = 2**32 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="*",
        help="traces, or folders of them (default: made-up ones)",
    )  # fmt: skip
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="which one the ratios are about: a name, or module:attribute (the product's own)",
    )
    parser.add_argument(
        "--admission", metavar="NAME", help="which filter the ratios are about (the product's own)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the made-up traces (1)")


def run(arguments: argparse.Namespace) -> int:
    """Replay everything; 0, or 1 with the reason on the terminal. Raises ConfigError."""
    policy = choose_policy(arguments.policy)
    admission = choose_filter(arguments.admission)
    if not 0 <= arguments.seed <= MAX_SEED:
        raise ConfigError(f"--seed takes a whole number from 0 to {MAX_SEED}, not {arguments.seed}")
    report = Report("trace", "stratakv bench trace")

    def take() -> None:
        try:
            sources = choose_sources(arguments)
            traces = load(sources)
            measure(report, sources, traces, policy, admission)
        except TraceError as error:
            raise ConfigError(str(error)) from error

    return run_and_tell(report, arguments.out, take, print_traces, plot_traces, CellFailed)


def choose_sources(arguments: argparse.Namespace) -> list[Source]:
    """The traces named, or those to make up. Raises TraceError, ConfigError."""
    if arguments.paths:
        if arguments.quick:
            raise ConfigError("--quick replays made-up traces; leave out PATH, or --quick")
        files = trace_files([readers.path("PATH", path) for path in arguments.paths])
        names = unique_names([trace_name(file) for file in files])
        return [Source(name, path=file) for name, file in zip(names, files, strict=True)]
    return [
        Source(name, requests=quick if arguments.quick else full, seed=arguments.seed)
        for name, (full, quick) in _REQUESTS.items()
    ]


def unique_names(names: Sequence[str]) -> list[str]:
    """Names that can be keys of the report: letters, digits and underscores, each once."""
    plain = [re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "trace" for name in names]
    unique: list[str] = []
    for name in plain:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def load(sources: Sequence[Source]) -> dict[str, Trace]:
    """All traces by name. Raises TraceError."""
    traces = {source.name: source.load() for source in sources}
    for name, trace in traces.items():
        if not trace.num_accesses:
            raise TraceError(f"trace {name} has no prompt with a block; there is nothing to cache")
    return traces


def measure(
    report: Report,
    sources: Sequence[Source],
    traces: Mapping[str, Trace],
    policy: str,
    admission: str,
) -> None:
    """Run every cell. Raises CellFailed."""
    report.figures["plan"] = {
        "capacities_percent": list(CAPACITIES_PERCENT),
        "pairs_percent": [list(pair) for pair in PAIRS_PERCENT],
        "policy": policy,
        "admission": admission,
        "made_up": sources[0].path is None,
        "seed": sources[0].seed if sources[0].path is None else None,
    }
    cells = make_cells(list(traces), policy, admission)
    answers: dict[AnyCell, Answer] = {}
    with progress(Console(stderr=True)) as bar:
        steps = bar.add_task("replaying", total=len(cells))
        for answer in run_cells(cells, sources, traces):
            answers[answer.cell] = answer
            bar.update(steps, advance=1, description=f"replaying {answer.cell.trace}")
    fill_report(report, traces, [answers[cell] for cell in cells])


def make_cells(names: Sequence[str], policy: str, admission: str) -> list[AnyCell]:
    """Everything to replay, trace by trace."""
    cells: list[AnyCell] = []
    for name in names:
        cells.append(Cell(name, LRU, 100))  # an infinite cache: nothing is ever evicted
        for row in (*dict.fromkeys((*POLICIES, policy)), HEADS_FIRST, OPT):
            cells += [Cell(name, row, percent) for percent in CAPACITIES_PERCENT]
        for upper, lower in PAIRS_PERCENT:
            cells += [PairCell(name, upper, lower, each) for each in Arrangement]
            back = Arrangement.WRITE_BACK
            if policy != LRU:
                cells.append(PairCell(name, upper, lower, back, lower=policy))
            cells += [
                PairCell(name, upper, lower, back, admission=each)
                for each in dict.fromkeys((*FILTERS, admission))
                if each != ADMIT_ALL
            ]
    return cells
