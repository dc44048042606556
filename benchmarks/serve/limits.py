# SPDX-License-Identifier: Apache-2.0
"""`--limits` of `stratakv bench serve`: one request's work and the machine's limits, in turn.

    decode        bytes of weights per second; limit: reading a buffer of the same size
    attention     bytes of K and V per second at a context of 4,000; limit: reading as many bytes
    prefill       products per second; limit: the products of the model's matrices alone

The model has random weights in the shape of Qwen3-0.6B, in bfloat16. A buffer is read by two
methods, and matrices are multiplied by two methods (`limits_process.py`); the faster method is the
limit. With `--lora` the cost of adapters is measured too (`lora_limits.py`)."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ...tiers.settings.values import ConfigError
from ..harness import plots
from ..harness.comparison import Comparison, Outcome, quartiles, take_rounds
from ..harness.gate import Gate
from ..harness.peer import PeerFailed
from ..harness.report import Report, median, print_table, ratios, run_and_tell
from . import limits_process, peer_engines
from .limits_worker import Worker
from .lora_limits import LORA_FLAG, measure_adapters, plot_adapters, print_adapters

FLAG = "--limits"


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of work, its limits and its gate. The unit is 10⁹ per second."""

    work: str
    limit: str
    rival: str
    gate: Gate
    unit: str


CASES = {
    "limit_decode_1": Case("decode", "scan_weights", "sum_weights", Gate(least=0.6), "GB/s"),
    "limit_attention": Case("attention", "scan_kv", "sum_kv", Gate(least=0.6), "GB/s"),
    "alike": Case("alike", "apart", "sum_kv", Gate(least=1.5), "GB/s"),
    "limit_prefill": Case("prefill", "matrices", "matrices_torch", Gate(least=0.7), "G products/s"),
}
_UNUSED = ("model", "workload", "requests", "request_rate", "output_tokens", "peer_python")


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of a run."""

    threads: int
    rounds: int
    prompt_tokens: int
    decode_tokens: int
    context: int
    seed: int
    has_lora: bool


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of a run. Raises ConfigError for invalid numbers."""
    for name in _UNUSED:
        if getattr(arguments, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is of no use beside {FLAG}; leave it out")
    quick = arguments.quick
    cores = len(os.sched_getaffinity(0))
    plan = Plan(
        threads=cores if arguments.num_threads is None else arguments.num_threads,
        rounds=(3 if quick else 9) if arguments.rounds is None else arguments.rounds,
        prompt_tokens=64 if quick else 512,
        decode_tokens=4 if quick else 16,
        context=4000,
        seed=arguments.seed,
        has_lora=arguments.lora,
    )
    for flag, value, most in (
        ("--rounds", plan.rounds, 1000),
        ("--num-threads", plan.threads, 1024),
    ):
        if not 1 <= value <= most:
            raise ConfigError(f"{flag} takes 1 to {most} here, not {value}")
    return plan


def run_limits(arguments: argparse.Namespace) -> int:
    """Run `--limits`; return 0, or 1 after printing an error. Raises ConfigError."""
    plan = make_plan(arguments)
    words = f"{FLAG}{f' {LORA_FLAG}' * plan.has_lora}{' --quick' * arguments.quick}"
    report = Report("serve_limits", f"stratakv bench serve {words}")
    report.figures["plan"] = asdict(plan)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

    def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as scratch:
            measure_limits(report, plan, Path(scratch), console)

    return run_and_tell(report, arguments.out, measure, print_limits, plot_limits, PeerFailed)


def measure_limits(report: Report, plan: Plan, scratch: Path, console: Console) -> None:
    """Measure every case. Raises PeerFailed."""
    figures = report.figures
    figures["contests"], figures["spreads"] = {}, {}
    figures["load_average_before"] = os.getloadavg()
    console.print("making a model of random weights")
    peer_engines.make_model(scratch / "model", peer_engines.QWEN)
    given = {"model": str(scratch / "model")} | asdict(plan)
    with Worker(limits_process.__name__, given, scratch / "limits.log") as worker:
        figures["model"] = worker.wait_ready()
        for name, case in CASES.items():
            console.print(name)
            comparison = Comparison(
                name,
                case.unit,
                case.limit,
                worker.rate_of(case.work),
                worker.rate_of(case.limit),
                rivals={case.rival: worker.rate_of(case.rival)},
            )
            outcome = take_rounds(comparison, plan.rounds)
            outcome.add_to(report, **_by_processors(worker, case, outcome))
    if plan.has_lora:
        measure_adapters(report, given, plan.rounds, scratch, console)
    figures["load_average_after"] = os.getloadavg()


def _by_processors(worker: Worker, case: Case, outcome: Outcome) -> dict[str, Any]:
    """Return the ratio in processor seconds, which other work on the machine changes less."""
    rounds = len(outcome.ours)
    ours, limit = (worker.processor_rates(work, rounds) for work in (case.work, outcome.strictest))
    found = ratios(ours, limit)
    return {"processor_ratio": median(found), "processor_quartiles": quartiles(found)}


def print_limits(report: Report) -> None:
    """Print the table of all cases."""
    rows = [_row(report, name, case) for name, case in CASES.items()]
    threads = report.figures["plan"]["threads"]
    columns = ("what", "ours", "limit", "", "ratio", "quartiles", "of processors", "gate")
    print_table(f"One request against its limits, {threads} threads", columns, rows)
    print_adapters(report)


def _row(report: Report, name: str, case: Case) -> list[str]:
    found, ratio = report.figures["contests"][name], report.ratios[name]
    return [
        name,
        f"{found['median'] / 1e9:.2f} {case.unit}",
        f"{found['limit_median'] / 1e9:.2f}",
        found["limit"],
        f"{ratio:.2f}",
        _spread(report.figures["spreads"][name]),
        f"{found['processor_ratio']:.2f} ({_spread(found['processor_quartiles'])})",
        f"{case.gate.wanted} {case.gate.verdict(ratio)}",
    ]


def _spread(quarters: Sequence[float]) -> str:
    return f"{quarters[0]:.2f}..{quarters[1]:.2f}"


def plot_limits(report: Report, path: Path) -> Path:
    """Draw a bar for each case, in wall-clock and in processor seconds; at the right, bars of
    adapters, if measured."""
    has_lora = "adapters" in report.figures
    figure, [[axes, *others]] = plots.new_figure(1, 1 + has_lora, 3.4)
    cases = {name: case for name, case in CASES.items() if name in report.ratios}  # of the report
    names = [name.removeprefix("limit_") for name in cases]
    found = report.figures["contests"]
    bars = {
        "by the clock": [report.ratios[name] for name in cases],
        "of processor seconds": [found[name]["processor_ratio"] for name in cases],
    }
    plots.draw_bars(axes, names, bars, (plots.COLOURS[0], plots.PLAIN), "%.2f", 8)
    marks = {float(at): case.gate.least for at, case in enumerate(cases.values())}
    plots.mark_gates(axes, marks, 0.84, plots.GATE)
    threads = report.figures["plan"]["threads"]
    plots.caption(
        axes,
        f"One request, {threads} threads (lines: promised)",
        y="share of the limit",
        legend=True,
    )
    if has_lora:
        plot_adapters(report, others[0])
    return plots.save_figure(figure, report.environment, path)
