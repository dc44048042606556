# SPDX-License-Identifier: Apache-2.0
"""How much `stratakv bench service` does, what it promises of each ratio, and its table and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.comparison import CONTEST_COLUMNS, Gate, contest_row
from ..harness.plots import (
    GATE,
    MISSED,
    caption,
    draw_bars,
    mark_gates,
    new_figure,
    save_figure,
)
from ..harness.report import Report, print_table
from ..tiers.scale import MIB

SIZES: Mapping[str, int] = {"256KiB": 256 * 1024, "2MiB": 2 * MIB}
LOOK_UP_KEYS = (1024, 4096)  # of one call


class Case(NamedTuple):
    """One row: `transport` moves blocks as `verb` says, `limit` the same without a service."""

    name: str
    transport: str
    verb: str
    limit: str
    least: float | None = None  # of the ratio with one client; more are reported only


CASES = (
    Case("shm_batch", "shm", "load", "copy", 0.7),
    Case("shm_store", "shm", "store", "copy"),
    Case("tier_load", "tier", "load", "copy"),
    Case("tier_store", "tier", "store", "copy"),
    Case("data_load", "data", "load", "raw", 0.8),
    Case("data_store", "data", "store", "raw", 0.7),
    Case("grpc_stream", "grpc", "load", "raw", 0.25),
    Case("grpc_stream_store", "grpc", "store", "raw"),
    Case("data_load_tls", "tls", "load", "raw_tls", 0.5),
    Case("redis_get", "redis", "load", "raw"),
    Case("redis_set", "redis", "store", "raw"),
    Case("mooncake_read", "mooncake", "load", "raw"),
    Case("mooncake_write", "mooncake", "store", "raw"),
)
LIMITS: Mapping[str, str] = {"copy": "memcpy", "raw": "TCP", "raw_tls": "TLS"}


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in bytes, of all clients together, and numbers of rounds."""

    footprint_bytes: int  # of each client, and again at the other end; at least this
    copied_bytes: int  # in one round of a memory copy
    sent_bytes: int  # in one round of anything else
    rounds: int  # even, so that either side is the first one as often
    clients: Sequence[int]
    look_ups: int  # calls


FULL = Scale(
    footprint_bytes=64 * MIB,
    copied_bytes=1024 * MIB,
    sent_bytes=384 * MIB,
    rounds=12,
    clients=(1, 4),
    look_ups=200,
)
QUICK = Scale(
    footprint_bytes=32 * MIB,
    copied_bytes=64 * MIB,
    sent_bytes=32 * MIB,
    rounds=2,
    clients=(1,),
    look_ups=20,
)


def row_name(case: str, size: str, clients: int) -> str:
    """The name of a ratio."""
    return f"{case}_{size}" + (f"_{clients}" if clients > 1 else "")


def look_up_name(keys: int) -> str:
    """The name of a rate of look-ups."""
    return f"lookup_{keys}_keys_per_second"


def _gates() -> dict[str, Gate]:
    gates = {look_up_name(LOOK_UP_KEYS[0]): Gate(least=500_000)}
    for case in CASES:
        if case.least is not None:
            gates |= {row_name(case.name, size, 1): Gate(least=case.least) for size in SIZES}
    return gates


GATES: Mapping[str, Gate] = _gates()


# With one client, and with more.
_OURS, _THEIRS = ("#2b6cb0", "#90bce4"), ("#6b7078", "#c3c7cd")
_OTHERS = ("redis", "mooncake")
_COSTS = ("cpu_seconds_per_gb", "limit_cpu_seconds_per_gb")
_COST_COLUMN = CONTEST_COLUMNS.index("A/A")


def print_service(report: Report) -> None:
    """What a person reads: figure, limit, ratio, gate; what it costs before the limit's spread."""
    rows = []
    for name in report.ratios:
        row = contest_row(report, name, GATES.get(name))
        taken = report.figures["contests"].get(name, {})
        costs = [taken[key] for key in _COSTS if key in taken]
        row.insert(_COST_COLUMN, " / ".join(f"{cost:.2f}" for cost in costs))
        rows.append(row)
    columns = list(CONTEST_COLUMNS)
    columns.insert(_COST_COLUMN, "cpu s/GB")
    title = (
        "The cache service against this machine's loopback and memory, measured in turn. cpu s/GB: "
        "of both ends, ours / limit. A/A: the limit against itself, quartiles"
    )
    print_table(title, columns, rows)
    for what, why in report.figures["skipped"].items():
        print(f"skipped: {what}: {why}")


def plot_service(report: Report, path: Path) -> Path:
    """For each size of block a panel: the cases, a bar for each number of clients, and gates."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, panels = new_figure(len(SIZES), 1, 3.1 * len(SIZES), sharex=True)
    ratios, counts = report.ratios, report.figures["plan"]["clients"]
    cases = [
        case
        for case in CASES
        if any(row_name(case.name, s, n) in ratios for s in SIZES for n in counts)
    ]
    words = [f"{count} client{'s' * (count > 1)}" for count in counts]
    shades = [min(number, 1) for number in range(len(counts))]
    colours = [[(_THEIRS if c.transport in _OTHERS else _OURS)[s] for c in cases] for s in shades]
    labels = [
        f"{case.name.replace('_', ' ', 1).replace('_', chr(10))}\nof {LIMITS[case.limit]}"
        for case in cases
    ]
    width = 0.84 / len(counts)
    for (axes,), size in zip(panels, SIZES, strict=True):
        series = {
            word: [ratios.get(row_name(case.name, size, count)) for case in cases]
            for word, count in zip(words, counts, strict=True)
        }
        draw_bars(axes, labels, series, colours, fmt="%.2f", size=6.5)
        for number, count in enumerate(counts):
            for place, name in enumerate(row_name(case.name, size, count) for case in cases):
                if name in GATES and name in ratios:
                    at = place - 0.42 + width * (number + 0.5)
                    colour = GATE if GATES[name].is_met(ratios[name]) else MISSED
                    mark_gates(axes, {at: GATES[name].least}, width, colour)
        axes.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
        caption(axes, f"Blocks of {size}", y="share of the limit")
    handles: list[Any] = [
        Patch(color=colour[shade], label=f"{whose}, {word}")
        for whose, colour in (("StrataKV", _OURS), ("another server", _THEIRS))
        for shade, word in zip(shades, words, strict=True)
    ]
    handles.append(Line2D([], [], color=GATE, lw=2, label="promised (red: missed)"))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return save_figure(figure, report.environment, path)
