# SPDX-License-Identifier: Apache-2.0
"""The figures, ratios, tables and pictures of `stratakv bench serve`.

Names and definitions are those of vLLM's serving benchmark, so that results can be compared:

    TTFT  time to first token
    TPOT  time per output token after the first token: one value per request
    ITL   inter-token latency: one value per event after the first event; an event may have more
          than one token if the client or the server was late
    E2EL  end-to-end latency: time to the last byte"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.load_client import LoadRun, StreamedAnswer
from ..harness.plots import COLOURS, PLAIN, caption, draw_bars, label_bars, new_figure, save_figure
from ..harness.report import Report, median, percentile, print_table, ratios

TIERS = ("pool", "cpu", "ssd")
# The peer with which the rate over HTTP is compared → the name of the ratio.
_RATIOS = {
    "engine": "http_vs_engine",
    "transformers_serial": "tokens_vs_transformers_serial",
    "transformers_padded": "tokens_vs_transformers_padded",
}

# Name in the JSON → the label in vLLM's benchmark.
_COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
    "request_throughput": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
}
_LATENCIES = ("ttft", "tpot", "itl", "e2el")


def load_figures(run: LoadRun) -> dict[str, Any]:
    """Return the figures of one workload. A run without any answer has no latencies."""
    answers = run.answers
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    output_tokens = sum(answer.output_tokens for answer in answers)
    figures: dict[str, Any] = {
        "completed": len(answers),
        "failed": len(run.errors),
        "duration": run.seconds,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(answers) / run.seconds,
        "output_throughput": output_tokens / run.seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / run.seconds,
    }
    if answers:
        figures |= _latencies(answers)
        figures |= _cached_shares(answers, prompt_tokens)
    figures["errors"] = dict(Counter(run.errors).most_common(10))
    return figures


def fill_comparison(
    report: Report, rates: Mapping[str, list[float]], same_text: Mapping[str, float]
) -> None:
    """Add the medians of the rounds' rates, the share of outputs over HTTP that equal a peer's
    text, and the rate over HTTP divided by each peer's rate. A ratio is the median of the ratios
    within a round, because other work of the machine changes from round to round."""
    report.figures["comparison"] = {
        name: {"output_throughput": median(rates[name]), "rounds": rates[name]}
        | ({"same_text": same_text[name]} if name in same_text else {})
        for name in rates
    }
    report.limits["engine_output_throughput"] = median(rates["engine"])
    for name, ratio in _RATIOS.items():
        if name in rates:
            report.ratios[ratio] = median(ratios(rates["http"], rates[name]))


def print_workloads(title: str, workloads: Mapping[str, Mapping[str, Any]]) -> None:
    """Print throughput and latencies, a column for each workload, then shares of cached tokens."""
    rows = [
        [shown, *(_number(figures.get(name)) for figures in workloads.values())]
        for name, shown in _COUNTS.items()
    ]
    rows += [
        [
            f"{statistic.capitalize()} {kind.upper()} (ms)",
            *(_number(figures.get(f"{statistic}_{kind}_ms")) for figures in workloads.values()),
        ]
        for kind in _LATENCIES
        for statistic in ("mean", "median", "p99")
    ]
    print_table(title, ["", *workloads], rows)
    shares = [
        [
            name,
            _percent(figures.get("hit_rate")),
            _percent(figures["usual_hit_rate"]),
            *(_percent(figures.get("cached_share_by_tier", {}).get(tier)) for tier in TIERS),
        ]
        for name, figures in workloads.items()
    ]
    columns = ["workload", "hit rate", "usual", *(f"from {tier}" for tier in TIERS)]
    print_table("Prompt tokens that were found and not computed", columns, shares)


def print_comparison(title: str, report: Report) -> None:
    """Print output tokens per second for the same prompts on each side."""
    rows = []
    for name, figures in report.figures["comparison"].items():
        ratio = report.ratios.get(_RATIOS.get(name, ""))
        rows.append(
            [
                _PEER_NAMES[name],
                f"{figures['output_throughput']:.0f}",
                "" if ratio is None else f"{ratio:.2f}x",
                _percent(figures.get("same_text")),
            ]
        )
    print_table(title, ["", "output tokens/s", "http / this", "same text as http"], rows)


_PEER_NAMES = {
    "http": "StrataKV over HTTP",
    "engine": "its engine alone, without HTTP",
    "transformers_serial": "transformers, one request at a time",
    "transformers_padded": "transformers, one padded batch",
}


def _latencies(answers: Sequence[StreamedAnswer]) -> dict[str, float]:
    seconds = {
        "ttft": [answer.first_token_seconds for answer in answers],
        "tpot": [
            (answer.event_seconds[-1] - answer.first_token_seconds) / (answer.output_tokens - 1)
            for answer in answers
            if answer.output_tokens > 1
        ],
        "itl": [gap for answer in answers for gap in answer.gaps_seconds],
        "e2el": [answer.total_seconds for answer in answers],
    }
    figures = {}
    for kind, values in seconds.items():
        if values:
            figures[f"mean_{kind}_ms"] = 1e3 * statistics.fmean(values)
            figures[f"median_{kind}_ms"] = 1e3 * median(values)
            figures[f"std_{kind}_ms"] = 1e3 * statistics.pstdev(values)
            figures[f"p99_{kind}_ms"] = 1e3 * percentile(values, 99)
    return figures


def _cached_shares(answers: Sequence[StreamedAnswer], prompt_tokens: int) -> dict[str, Any]:
    found = {
        tier: sum(answer.cached_by_tier.get(tier, 0) for answer in answers) / prompt_tokens
        for tier in TIERS
    }
    return {"hit_rate": sum(found.values()), "cached_share_by_tier": found}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


_LABELS = {
    "transformers_serial": "transformers,\none at a time",
    "transformers_padded": "transformers,\npadded batch",
    "http": "StrataKV\nover HTTP",
    "engine": "StrataKV's\nengine alone",
}


def plot_serve(report: Report, path: Path) -> Path:
    """Draw, at the left, output tokens per second by side; at the right, real and usual hit
    rates."""
    figures = report.figures
    panels = [name for name in ("comparison", "workloads") if name in figures]
    figure, axes = new_figure(1, len(panels), 4.0)
    for name, panel in zip(panels, axes[0], strict=True):
        (_plot_comparison if name == "comparison" else _plot_hit_rates)(panel, figures[name])
    return save_figure(figure, report.environment, path)


def _plot_comparison(axes: Any, comparison: Mapping[str, Any]) -> None:
    names = [name for name in _LABELS if name in comparison]
    rates = [comparison[name]["output_throughput"] for name in names]
    colours = [PLAIN if name.startswith("transformers") else COLOURS[1] for name in names]
    draw_bars(axes, [_LABELS[name] for name in names], {"": rates}, [colours], "{:,.0f}", 7.5)
    caption(axes, "The same unique prompts", y="output tokens a second")


def _plot_hit_rates(axes: Any, workloads: Mapping[str, Any]) -> None:
    places = range(len(workloads))
    measured = [100 * figures.get("hit_rate", 0.0) for figures in workloads.values()]
    usual = [100 * figures["usual_hit_rate"] for figures in workloads.values()]
    bars = axes.barh([y - 0.2 for y in places], measured, 0.38, color=COLOURS[1], label="measured")
    axes.barh([y + 0.2 for y in places], usual, 0.38, color=PLAIN, label="usual")
    label_bars(axes, bars, "%.0f %%")
    axes.set_yticks(list(places), list(workloads), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    caption(axes, "Prompt tokens found in a cache, %")
    axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.5, -0.08))
