# SPDX-License-Identifier: Apache-2.0
"""`--limits --lora` of `stratakv bench serve`: the cost of adapters, as ratios of times.

    lora_base_rows    decode steps of 64 requests without an adapter, in an engine whose slots all
                      have adapters, over the same steps in an engine without adapters
    lora_mixed_64     decode steps of 64 requests with four adapters of rank 16 for all seven
                      matrices, over the same engine's steps of 64 requests without an adapter
    lora_mixed_64_wide   like lora_mixed_64, with adapters of rank 64
    lora_prefill      a prompt with an adapter of rank 16, over a prompt without an adapter

`lora_process.py` does the work. A ratio is the time per row with adapters over the time per row
without adapters; 1 means that adapters take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..harness import plots
from ..harness.comparison import Comparison, Outcome, quartiles, take_rounds
from ..harness.gate import Gate
from ..harness.report import Report, median, print_table, ratios
from . import lora_process
from .limits_worker import Worker

LORA_FLAG = "--lora"


@dataclass(frozen=True, slots=True)
class LoraCase:
    """A kind of work with adapters, the same work without adapters, and the gate of the ratio."""

    work: str
    base: str
    gate: Gate | None
    unit: str


LORA_CASES = {
    "lora_base_rows": LoraCase("base_rows", "rows_without", Gate(most=1.02), "rows/s"),
    "lora_mixed_64": LoraCase("adapter_rows", "base_rows", Gate(most=1.25), "rows/s"),
    "lora_mixed_64_wide": LoraCase("wide_rows", "base_rows", None, "rows/s"),
    "lora_prefill": LoraCase("adapter_prompt", "base_prompt", None, "tokens/s"),
}


def measure_adapters(
    report: Report, plan: dict[str, Any], rounds: int, scratch: Path, console: Console
) -> None:
    """Measure every case with the model of `plan`. Raises PeerFailed."""
    console.print("making adapters of random matrices")
    given = plan | {"adapters": str(scratch / "adapters")}
    with Worker(lora_process.__name__, given, scratch / "lora.log") as worker:
        report.figures["adapters"] = worker.wait_ready()
        for name, case in LORA_CASES.items():
            console.print(name)
            comparison = Comparison(
                name, case.unit, case.base, worker.rate_of(case.work), worker.rate_of(case.base)
            )
            outcome = take_rounds(comparison, rounds)
            outcome.add_to(report, _time_ratio, **_by_processors(worker, case, outcome))


def _time_ratio(rate_ratio: float) -> float:
    return 1 / rate_ratio


def _by_processors(worker: Worker, case: LoraCase, outcome: Outcome) -> dict[str, Any]:
    """Return the ratio in processor seconds, which other work on the machine changes less."""
    rounds = len(outcome.ours)
    ours, base = (worker.processor_rates(work, rounds) for work in (case.work, case.base))
    found = ratios(base, ours)
    return {"processor_ratio": median(found), "processor_quartiles": quartiles(found)}


def print_adapters(report: Report) -> None:
    """Print the table of all cases, if measured."""
    if "adapters" not in report.figures:
        return
    rows = [_row(report, name, case) for name, case in LORA_CASES.items()]
    threads = report.figures["plan"]["threads"]
    columns = ("what", "with", "without", "times", "quartiles", "of processors", "A/A", "gate")
    print_table(f"Adapters: time with over time without, {threads} threads", columns, rows)


def _row(report: Report, name: str, case: LoraCase) -> list[str]:
    found, spreads = report.figures["contests"][name], report.figures["spreads"]
    ratio = report.ratios[name]
    return [
        name,
        f"{found['median']:.1f} {case.unit}",
        f"{found['limit_median']:.1f}",
        f"{ratio:.3f}",
        _spread(spreads[name]),
        f"{found['processor_ratio']:.3f} ({_spread(found['processor_quartiles'])})",
        _spread(spreads[f"{name}_aa"]),
        "" if case.gate is None else f"{case.gate.wanted} {case.gate.verdict(ratio)}",
    ]


def _spread(quarters: Sequence[float]) -> str:
    return f"{quarters[0]:.3f}..{quarters[1]:.3f}"


def plot_adapters(report: Report, axes: Any) -> None:
    """Draw a bar for each case, in wall-clock and in processor seconds."""
    names = [name for name in LORA_CASES if name in report.ratios]
    found = report.figures["contests"]
    bars = {
        "by the clock": [report.ratios[name] for name in names],
        "of processor seconds": [found[name]["processor_ratio"] for name in names],
    }
    shown = [name.removeprefix("lora_").replace("_64", "\n64").replace("_", "\n") for name in names]
    plots.draw_bars(axes, shown, bars, (plots.COLOURS[0], plots.PLAIN), "%.2f", 7)
    gates = [LORA_CASES[name].gate for name in names]
    marks = {float(at): None if gate is None else gate.most for at, gate in enumerate(gates)}
    plots.mark_gates(axes, marks, 0.84, plots.GATE)
    plots.caption(axes, "Adapters (lines: promised)", y="time with over time without")
