# SPDX-License-Identifier: Apache-2.0
"""The figures, ratios, tables and pictures of `stratakv bench offload`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...engine.models.model_spec import ModelSpec
from ..harness.load_client import StreamedAnswer
from ..harness.plots import (
    COLOURS,
    GATE,
    MET,
    add_gate_legend,
    caption,
    draw_gated,
    draw_times,
    new_figure,
    save_figure,
)
from ..harness.report import Report, median, percentile, print_table
from .scale import CONVOY, GATES, HYBRID, WORST_CASE

PHASES = ("cold", "pool", "cpu", "ssd", "remote")
WARM_PHASES = PHASES[1:]
_COLOURS = {
    "cold": "#8a8f98",
    "pool": "#2f7d4f",
    "cpu": "#2b6cb0",
    "ssd": "#b7791f",
    "remote": "#6b46c1",
}
_PLACES = {
    "cold": "nowhere (computed)",
    "pool": "KV pool",
    "cpu": "CPU memory",
    "ssd": "SSD, after a restart",
    "remote": "cache server",
}
# phase → the limit with which the rate of its loads is compared
LOAD_LIMITS = {
    "cpu": "memory_copy_gb_per_second",
    "ssd": "disk_read_gb_per_second",
    "remote": "memory_copy_gb_per_second",  # the cache server is on the same host
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run: model, documents, questions and the sizes of the tiers."""

    model: Path
    num_documents: int
    prefix_tokens: int
    suffix_tokens: int
    output_tokens: int
    block_size: int
    cpu_bytes: int
    ssd_bytes: int
    device: str = "cpu"

    @property
    def pool_blocks(self) -> int:
        """The blocks of the pool: a whole request, a quarter of a document, and the null block."""
        longest = self.prefix_tokens + self.suffix_tokens + self.output_tokens
        return 1 + int(1.25 * -(-longest // self.block_size))

    def serve_arguments(self, ssd_path: Path) -> list[str]:
        """Return the command line of the server under test, with the cpu and ssd tiers."""
        ssd = ["--kv-offload-ssd-path", str(ssd_path), "--kv-offload-ssd-bytes"]
        return self.arguments("cpu,ssd", *ssd, str(self.ssd_bytes))

    def arguments(self, tiers: str, *others: str) -> list[str]:
        return [
            str(self.model), "--kv-offload", tiers, *others,
            "--num-blocks", str(self.pool_blocks),
            "--block-size", str(self.block_size),
            "--kv-offload-cpu-bytes", str(self.cpu_bytes),
            "--kv-offload-load", "always",  # so that blocks come from the phase's tier
            "--max-model-len", str(self.prefix_tokens + self.suffix_tokens + self.output_tokens),
            # The type is float32, because all phases must give the same tokens: with fewer computed
            # tokens, sums have another order, which matters in bfloat16.
            "--device", self.device, "--dtype", "float32",
        ]  # fmt: skip


@dataclass(slots=True)
class Phase:
    """The answers of one phase, and the seconds of loading."""

    answers: list[StreamedAnswer] = field(default_factory=list)
    seconds_loading: float = 0.0

    @property
    def first_token_seconds(self) -> list[float]:
        return [answer.first_token_seconds for answer in self.answers]

    def cached_by_tier(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for answer in self.answers:
            totals.update(answer.cached_by_tier)
        return totals


def fill_report(report: Report, plan: Plan, spec: ModelSpec, phases: dict[str, Phase]) -> None:
    """Compute figures and ratios from the answers; `report.limits` must have been set."""
    cold = median(phases["cold"].first_token_seconds)
    prompt_tokens = plan.prefix_tokens + plan.suffix_tokens
    names = {"model": plan.model.name, "pool_blocks": plan.pool_blocks}
    report.figures["plan"] = asdict(plan) | names
    report.figures["phases"] = {
        name: phase_figures(phase, cold / prompt_tokens) for name, phase in phases.items()
    }
    for name in WARM_PHASES:
        warm = median(phases[name].first_token_seconds)
        report.ratios[f"ttft_cold_over_{name}"] = cold / warm
    rate = prefill_flops(spec, prompt_tokens) / cold / 1e9
    report.figures["cold_gflops_per_second"] = rate
    report.ratios["cold_prefill_over_matmul"] = rate / report.limits["matmul_gflops_per_second"]
    token_bytes = spec.layout(plan.block_size, "float32").token_bytes
    for tier, limit in LOAD_LIMITS.items():
        loaded = phases[tier].cached_by_tier().get(tier, 0) * token_bytes
        rate = loaded / phases[tier].seconds_loading / 1e9
        report.figures[f"{tier}_load_gb_per_second"] = rate
        name = f"{tier}_load_over_{limit.removesuffix('_gb_per_second')}"
        report.ratios[name] = rate / report.limits[limit]


def prefill_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Return the operations of a causal forward pass over `num_tokens` tokens and a row of
    logits."""
    qkv = spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    out = spec.num_heads * spec.head_dim * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    products = 2.0 * spec.num_layers * (qkv + out + mlp) * num_tokens
    # The products for scores and weighted values, for half of all pairs of tokens.
    attention = 2.0 * spec.num_layers * spec.num_heads * spec.head_dim * num_tokens**2
    return products + attention + 2.0 * spec.hidden_size * spec.vocab_size


def phase_figures(phase: Phase, cold_seconds_per_token: float) -> dict[str, object]:
    """Return a row of the table; saved seconds are cached tokens times the cold seconds per
    token."""
    first = phase.first_token_seconds
    cached = sum(answer.cached_tokens for answer in phase.answers)
    generated = sum(len(answer.token_ids) for answer in phase.answers)
    return {
        "requests": len(phase.answers),
        "ttft_p50_seconds": median(first),
        "ttft_p99_seconds": percentile(first, 99),
        "tokens_per_second": generated / sum(answer.total_seconds for answer in phase.answers),
        "cached_tokens_by_tier": phase.cached_by_tier(),
        "prefill_seconds_saved": cached * cold_seconds_per_token,
        "load_seconds_paid": phase.seconds_loading,
    }


def print_phases(report: Report) -> None:
    """Print a table of the phases, and a table of the rates with the machine's limits."""
    rows = []
    for name, figures in report.figures["phases"].items():
        tiers = figures["cached_tokens_by_tier"]
        rows.append(
            [
                name,
                str(figures["requests"]),
                f"{1e3 * figures['ttft_p50_seconds']:.1f}",
                f"{1e3 * figures['ttft_p99_seconds']:.1f}",
                f"{report.ratios.get(f'ttft_cold_over_{name}', 1.0):.1f}x",
                f"{figures['tokens_per_second']:.0f}",
                " ".join(f"{tier} {tokens}" for tier, tokens in tiers.items() if tokens) or "-",
                f"{figures['prefill_seconds_saved']:.2f}",
                f"{figures['load_seconds_paid']:.3f}",
            ]
        )
    plan = report.figures["plan"]
    title = (
        f"{plan['num_documents']} documents of {plan['prefix_tokens']} tokens, a pool of "
        f"{plan['pool_blocks']} blocks of {plan['block_size']}, one request at a time"
    )
    columns = ["phase", "requests", "TTFT p50 ms", "p99 ms", "cold / this", "tokens/s",
               "cached tokens", "prefill s saved", "load s paid"]  # fmt: skip
    print_table(title, columns, rows)
    print_limits(report)


def print_limits(report: Report) -> None:
    """Print each rate, the limit measured in this run, and their ratio."""
    figures, limits, ratios = report.figures, report.limits, report.ratios
    rows = [
        ("cold prefill, GFLOP/s", "cold_gflops_per_second", "matmul_gflops_per_second",
         "cold_prefill_over_matmul"),
        ("slab to pool, GB/s", "cpu_load_gb_per_second", "memory_copy_gb_per_second",
         "cpu_load_over_memory_copy"),
        ("SSD to pool, GB/s", "ssd_load_gb_per_second", "disk_read_gb_per_second",
         "ssd_load_over_disk_read"),
        ("cache server to pool, GB/s", "remote_load_gb_per_second", "memory_copy_gb_per_second",
         "remote_load_over_memory_copy"),
    ]  # fmt: skip
    print_table(
        "Against this machine's limits, measured in this run",
        ["what", "reached", "limit", "ratio"],
        [
            [name, f"{figures[figure]:.2f}", f"{limits[limit]:.2f}", f"{ratios[ratio]:.2f}"]
            for name, figure, limit, ratio in rows
        ],
    )


def print_costs(report: Report) -> None:
    """Print the ratios with their gates, and a table of each section with cells."""
    rows = []
    for name, gate in GATES.items():
        if name in report.ratios:
            ratio, each = report.ratios[name], report.figures["costs"]["processes"][name]
            several = " ".join(f"{of_one:.3f}" for of_one in each) if len(each) > 1 else ""
            label = name.replace("_", " ") + (" (wall)" if name.startswith("ttft") else "")
            rows.append([label, f"{ratio:.3f}", several, gate.wanted, gate.verdict(ratio)])
    columns = ["with tiers, against without", "ratio", "of each process", "gate", ""]
    print_table("Medians over alternating pairs, processor seconds unless named", columns, rows)
    for section, what, column in (
        (WORST_CASE, "Worst case: one request at a time", "cell"),
        (CONVOY, "Convoy: requests at once behind one prefix", "prefix from"),
        (HYBRID, "Hybrid: the first token behind one prefix and its states", "from"),
    ):
        if cells := report.figures.get(section, {}):
            print_table(
                f"{what}, without tiers over with",
                [column, "cpu (quartiles)", "wall", "ms/token with", "without", "cached tokens"],
                [_row(name, cell) for name, cell in cells.items() if "cpu_ratio" in cell],
            )


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    cached = figures["cached_tokens"]
    return [
        name,
        "{:.3f} ({:.3f} to {:.3f})".format(figures["cpu_ratio"], *figures["cpu_quartiles"]),
        f"{figures['wall_ratio']:.3f}",
        f"{1e3 * figures['cpu_seconds_per_token_with_tiers']:.4f}",
        f"{1e3 * figures['cpu_seconds_per_token_without']:.4f}",
        " ".join(f"{tier} {tokens}" for tier, tokens in cached.items() if tokens) or "-",
    ]


def plot_phases(report: Report, path: Path) -> Path:
    """Draw bars of the median time to the first token by phase, with the cold phase's time over the
    phase's time, and a whisker to the 99th percentile."""
    phases = report.figures["phases"]
    figure, panels = new_figure(1, 1, 3.2)
    axes = panels[0][0]
    medians = [1e3 * phase["ttft_p50_seconds"] for phase in phases.values()]
    highs = [1e3 * phase["ttft_p99_seconds"] for phase in phases.values()]
    names = [_PLACES.get(name, name) for name in phases]
    colours = [_COLOURS.get(name, "#555555") for name in phases]
    draw_times(axes, names, medians, 1e3 * phases["cold"]["ttft_p50_seconds"], colours, highs)
    plan = report.figures["plan"]
    caption(
        axes,
        f"Time to first token of a prompt of {plan['prefix_tokens']:,} tokens, by where its KV "
        "cache lies",
        "ms: median, whisker to the 99th percentile",
    )
    return save_figure(figure, report.environment, path)


def plot_costs(report: Report, path: Path) -> Path:
    """Draw bars of the ratios with gates, and the cells of the worst case, if measured."""
    names = [name for name in GATES if name in report.ratios]
    cells = report.figures.get(WORST_CASE, {})
    heights = [0.8 + 0.3 * len(names)] + [0.8 + 0.2 * len(cells)] * bool(cells)
    figure, panels = new_figure(len(heights), 1, 0.3 + sum(heights), height_ratios=heights)
    axes = panels[0][0]
    draw_gated(axes, {name: report.ratios[name] for name in names}, GATES)
    caption(axes, "With tiers, against without")
    add_gate_legend(figure)
    if cells:
        _plot_cells(panels[1][0], cells)
    return save_figure(figure, report.environment, path)


def _plot_cells(axes: Any, cells: dict[str, dict[str, Any]]) -> None:
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    for key, mark, colour, label in (
        ("cpu_ratio", "o", MET, "processor seconds"),
        ("wall_ratio", "x", COLOURS[1], "wall"),
    ):
        ratios = [cell[key] for cell in cells.values()]
        axes.plot(ratios, list(cells), mark, color=colour, label=label)
    axes.axvline(GATES["worst_case"].least or 0.0, color=GATE)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([1.0, 1.5, 2.0, 3.0])
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.margins(x=0.12)
    caption(axes, "Worst case, cell by cell: without tiers over with (log)", legend=True)
