# SPDX-License-Identifier: Apache-2.0
"""Pictures of benchmark figures, as PNG files: how each is begun, labelled and saved.

Every one says at its foot on which machine, when and by which version it was measured. matplotlib
is imported only here and only when a picture is drawn: tables and JSON do without it, and
`draw_and_tell` says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...engine.extras import install_extra

MET, MISSED, PLAIN, GATE = "#2b6cb0", "#c53030", "#8a8f98", "#b7791f"
NO_MATPLOTLIB = (
    "no picture: that takes matplotlib, which is not installed; run in a clone of StrataKV: "
    f"{install_extra('bench')}"
)
_COLOURS = {
    "cold": "#8a8f98",
    "pool": "#2f7d4f",
    "cpu": "#2b6cb0",
    "ssd": "#b7791f",
    "remote": "#6b46c1",
}


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    """A figure and its panels, an array of `rows` by `columns`; `size` is in inches. Raises
    ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **options
    )


def save_figure(figure: Any, environment: Mapping[str, Any], path: Path) -> Path:
    """Write the PNG, with what the report's `environment` says of the machine at its foot."""
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(footer(environment), fontsize=6.5, color="#666666", x=0.995, ha="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def footer(environment: Mapping[str, Any]) -> str:
    """Machine, date and version in one line; what an older report does not say is left out."""
    parts = [environment.get("device"), environment.get("cpu")]
    if "cores" in environment:
        parts.append(f"{environment['cores']} cores")
    parts.append(environment.get("date"))
    version, commit = environment.get("version"), environment.get("commit")
    parts.append(" ".join(filter(None, ("StrataKV", version, commit and f"({commit})"))))
    return " · ".join(filter(None, parts))


def draw_and_tell(draw: Callable[[], Path | None]) -> None:
    """Draw a picture and say where it is, or why there is none. The figures are safe by then."""
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


def plot_phases(
    phases: Mapping[str, Mapping[str, Any]], environment: Mapping[str, Any], path: Path
) -> Path:
    """Bars of the median time to first token by phase; whiskers from it up to the 99th percentile,
    and none below, where nothing was measured."""
    figure, panels = new_figure(1, 1, (6.4, 3.8))
    axes = panels[0][0]
    names = list(phases)
    medians = [1e3 * phases[name]["ttft_p50_seconds"] for name in names]
    highs = [1e3 * phases[name]["ttft_p99_seconds"] for name in names]
    above = [high - median for high, median in zip(highs, medians, strict=True)]
    colours = [_COLOURS.get(name, "#555555") for name in names]
    axes.bar(names, medians, color=colours, width=0.6)
    axes.errorbar(
        names, medians, yerr=[[0.0] * len(names), above], fmt="none", ecolor="#333333", capsize=3
    )
    for place, (median, high) in enumerate(zip(medians, highs, strict=True)):
        label = f"{median:.3g} ms\np99 {high:.3g}"
        axes.annotate(
            label, (place, high), (0, 4), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_yscale("log")
    axes.set_ylim(top=2.5 * max(highs))
    axes.set_ylabel("time to first token, ms (log)")
    axes.set_title(
        "Where the document's KV cache was found: median, whisker to the 99th percentile",
        fontsize=9,
    )
    return save_figure(figure, environment, path)
