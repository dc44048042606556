# SPDX-License-Identifier: Apache-2.0
"""The plots of the whole-engine sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...harness.plots import save_figure
from ..copies.plots import COLOURS, panels_of
from ..results import Row


def plot_steps(rows: Sequence[Row], environment: Mapping[str, Any], path: Path) -> Path | None:
    """Left: seconds of a step by batch. Right: what it reads in a second."""
    if not rows:
        return None
    figure, (times, rates) = panels_of(2)
    batches = list(dict.fromkeys((row["requests"], row["context"]) for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for number, (way, colour) in enumerate(zip(ways, COLOURS, strict=False)):
        of_way = {(row["requests"], row["context"]): row for row in rows if row["way"] == way}
        there = [batch for batch in batches if batch in of_way]
        places = [batches.index(batch) + 0.8 * (number + 0.5) / len(ways) - 0.4 for batch in there]
        width = 0.8 / len(ways)
        milliseconds = [1e3 * of_way[batch]["seconds"] for batch in there]
        times.bar(places, milliseconds, width, label=way, color=colour)
        rates.bar(places, [of_way[b]["gb_per_second"] for b in there], width, color=colour)
    for axes, title in ((times, "A decode step, ms"), (rates, "Weights and KV read, GB/s")):
        axes.set_title(title, fontsize=10)
        labels = [f"{requests} x\n{context:,}" for requests, context in batches]
        axes.set_xticks(range(len(batches)), labels, fontsize=8)
    times.legend(fontsize=8, frameon=False)
    return save_figure(figure, environment, path)


def plot_phases(rows: Sequence[Row], environment: Mapping[str, Any], path: Path) -> Path | None:
    """Seconds to the first token over the length that is cached, a line for each phase."""
    if not rows:
        return None
    figure, (times, gains) = panels_of(2)
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    for phase, colour in zip(phases, COLOURS, strict=False):
        of_phase = sorted((row for row in rows if row["phase"] == phase), key=_tokens)
        lengths = [row["tokens"] for row in of_phase]
        times.plot(lengths, [row["seconds"] for row in of_phase], marker="o", markersize=4,
                   label=phase, color=colour)  # fmt: skip
        if phase != "cold":
            gains.plot(lengths, [row["cold_over_this"] for row in of_phase], marker="o",
                       markersize=4, label=phase, color=colour)  # fmt: skip
    for axes, title in (
        (times, "Seconds to the first token (log)"), (gains, "Times as fast as computing (log)"),
    ):  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens cached, or computed where cold")
        axes.legend(fontsize=8, frameon=False)
    return save_figure(figure, environment, path)


def _tokens(row: Row) -> int:
    tokens: int = row["tokens"]
    return tokens
