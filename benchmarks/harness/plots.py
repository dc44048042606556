# SPDX-License-Identifier: Apache-2.0
"""Functions that draw, label and save pictures of benchmark figures.

The foot of each picture names the machine, the date and the version of the measurement. Only this
module imports matplotlib, and only to draw a picture. Tables and JSON need no matplotlib, and
`draw_and_tell` reports a missing matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.config.optional_packages import install_extra
from .gate import Gate

WIDTH_INCHES, DPI = 8.0, 200  # twice the pixels of a page that shows pictures with a width of 800
PALETTE = 128  # number of colours of a PNG, including shades of text
MET, MISSED, PLAIN, GATE = "#2b6cb0", "#c53030", "#8a8f98", "#b7791f"
NO_MATPLOTLIB = (
    "no picture: that takes matplotlib, which is not installed; run in a clone of StrataKV: "
    f"{install_extra('bench')}"
)
REFERENCE = "#555555"  # the colour of lines that mark limits and references
COLOURS = ("#2b6cb0", "#2f7d4f", "#b7791f", "#97266d", "#8a8f98", "#63a4d8", "#7fbf98")


def new_figure(rows: int, columns: int, height: float, **options: Any) -> Any:
    """Return a figure and its array of `rows` by `columns` panels. All figures have the same width,
    and so the same size of text. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (WIDTH_INCHES, height)
    return pyplot.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **options
    )


def draw_bars(
    axes: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    colours: Sequence[Any] = COLOURS,
    fmt: str | None = None,
    size: float = 8,
) -> None:
    """Draw a group of bars for each name, with one bar per series; a value of None has no bar. An
    entry of `colours` is the colour of a series, or a list with a colour for each bar."""
    width = 0.84 / len(series)
    for number, (label, values) in enumerate(series.items()):
        there = [place for place, value in enumerate(values) if value is not None]
        places = [place - 0.42 + width * (number + 0.5) for place in there]
        heights, colour = [values[place] for place in there], colours[number % len(colours)]
        if not isinstance(colour, str):
            colour = [colour[place] for place in there]
        bars = axes.bar(places, heights, 0.94 * width, color=colour, label=label or None)
        if fmt is not None:
            label_bars(axes, bars, fmt, size)
    axes.set_xticks(range(len(names)), names, fontsize=size)
    axes.margins(x=0.02, y=0.14)


def draw_times(
    axes: Any,
    names: Sequence[str],
    millis: Sequence[float],
    base: float,
    colours: Sequence[str],
    highs: Sequence[float] = (),
) -> None:
    """Draw a bar for each name, the first name at the top. A bar's label has the milliseconds and
    the factor `base` over the bar's time. Whiskers end at `highs`."""
    places, ends = range(len(names)), highs or millis
    axes.barh(places, millis, color=colours, height=0.62)
    if highs:
        above = [high - middle for high, middle in zip(highs, millis, strict=True)]
        axes.errorbar(
            millis, places, xerr=[[0.0] * len(names), above], fmt="none", ecolor="#333333",
            capsize=3,
        )  # fmt: skip
    for place, (value, end) in enumerate(zip(millis, ends, strict=True)):
        label = f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
        if value < base:
            label = f"{base / value:.0f} times sooner: {label}"
        axes.annotate(
            label, (end, place), (7, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(places, names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.22 * max(ends))


def draw_gated(axes: Any, ratios: Mapping[str, float], gates: Mapping[str, Gate | None]) -> None:
    """Draw a bar for each ratio, the first ratio at the top, with the value, a colour for met or
    missed, and a mark at the gate. `add_gate_legend` draws the legend."""
    names, places = list(ratios), range(len(ratios))
    met = [(gate := gates.get(name)) is None or gate.is_met(ratios[name]) for name in names]
    colours = [MET if each else MISSED for each in met]
    labels = [name.replace("_", " ") for name in names]
    label_bars(axes, axes.barh(places, list(ratios.values()), 0.7, color=colours), "%.2f")
    for place, name in enumerate(names):
        if (gate := gates.get(name)) is not None:
            limit = gate.least if gate.least is not None else gate.most
            axes.vlines(limit, place - 0.42, place + 0.42, color=GATE, linewidth=2)
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)


def add_gate_legend(figure: Any) -> None:
    """Add a legend for the colours and marks of `draw_gated` above all panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(color=MET, label="met"),
        Patch(color=MISSED, label="missed"),
        Line2D([], [], color=GATE, linewidth=2, label="promised"),
    ]
    add_legend(figure, figure.axes[0], len(handles), handles)


def label_bars(axes: Any, bars: Any, fmt: str, size: float = 8) -> None:
    """Write each bar's value at the end of the bar, on a white background."""
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.bar_label(bars, fmt=fmt, fontsize=size, padding=2, bbox=white)


def mark_gates(axes: Any, gates: Mapping[float, float | None], width: float, colour: str) -> None:
    """Draw a short line at the gate of each bar, by the bar's place; None means no gate."""
    there = {place: gate for place, gate in gates.items() if gate is not None}
    starts, ends = [place - width / 2 for place in there], [place + width / 2 for place in there]
    axes.hlines(list(there.values()), starts, ends, color=colour, linewidth=2)


def draw_lines(
    axes: Any,
    series: Mapping[str, Sequence[tuple[float, float]]],
    colours: Sequence[str] = COLOURS,
    **options: Any,
) -> None:
    """Draw a line with marks, from left to right, for each series with points."""
    for number, (label, points) in enumerate(series.items()):
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            colour = colours[number % len(colours)]
            axes.plot(xs, ys, label=label, **{"marker": ".", "color": colour} | options)


def caption(axes: Any, title: str, x: str = "", y: str = "", *, legend: bool = False) -> None:
    """Add a panel's title, the names of its axes, and a legend if `legend` is true."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def add_legend(figure: Any, axes: Any, columns: int, handles: Sequence[Any] = ()) -> None:
    """Add a legend above all panels, with the entries of `axes` and further handles."""
    drawn, _ = axes.get_legend_handles_labels()
    figure.legend(handles=[*drawn, *handles], loc="outside upper center", ncols=columns, fontsize=8,
                  frameon=False)  # fmt: skip


def save_figure(figure: Any, environment: Mapping[str, Any], path: Path) -> Path:
    """Write the picture as PNG, or as SVG if `path` ends in .svg. The foot of the picture names the
    machine from the report's `environment`."""
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(footer(environment), fontsize=7.5, color="#555555", x=0.995, ha="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        # Equal figures give equal bytes, because the SVG has no date and no random ids.
        with pyplot.rc_context({"svg.hashsalt": "stratakv"}):
            figure.savefig(path, metadata={"Date": None})
    else:
        figure.savefig(path, dpi=DPI)
        _reduce_colours(path)
    pyplot.close(figure)
    return path


def _reduce_colours(path: Path) -> None:
    """Write the PNG again with a palette, which reduces the file to a third of its size."""
    from PIL import Image  # matplotlib depends on PIL

    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


def footer(environment: Mapping[str, Any]) -> str:
    """Return machine, date and version in one line, as far as the report has them."""
    parts = [environment.get("device"), environment.get("cpu")]
    if "cores" in environment:
        parts.append(f"{environment['cores']} cores")
    parts.append(environment.get("date"))
    version, commit = environment.get("version"), environment.get("commit")
    parts.append(" ".join(filter(None, ("StrataKV", version, commit and f"({commit})"))))
    return " · ".join(filter(None, parts))


def draw_and_tell(draw: Callable[[], Path | None]) -> None:
    """Draw a picture and print its path, or the reason why no picture was drawn. Pictures are drawn
    last, so that a failure loses no figures."""
    try:
        path = draw()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print(NO_MATPLOTLIB)
        return
    except OSError as error:
        print(f"no picture: {error}")
        return
    if path is not None:
        print(f"written: {path}")
