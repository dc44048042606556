# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of earlier benchmark runs again, from the JSON of the runs.

`python -m stratakv.benchmarks.redraw FILE.json ...` writes FILE.png, or with `--svg` FILE.svg."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .agents.command import plot_agents
from .cluster.command import plot_cluster
from .core.command import plot_core
from .gpu.command import SECTIONS
from .gpu.section import Results
from .harness.report import Report
from .offload.report import plot_costs, plot_phases
from .sampling.command import plot_sampling
from .serve.limits import plot_limits
from .serve.peer_engines import plot_peer
from .serve.report import plot_serve
from .service.command import plot_service
from .speculation.command import plot_speculation
from .tiers.command import plot_tiers
from .trace.command import plot_traces
from .transfer.command import plot_transfer
from .vllm.command import plot_vllm

_DRAW = {
    "transfer": plot_transfer, "service": plot_service, "offload": plot_costs, "trace": plot_traces,
    "core": plot_core, "serve": plot_serve, "tiers": plot_tiers, "cluster": plot_cluster,
    "vllm": plot_vllm, "agents": plot_agents, "sampling": plot_sampling,
    "serve_peer": plot_peer, "serve_limits": plot_limits, "speculation": plot_speculation,
}  # fmt: skip


def draw(report: Report, path: Path) -> list[Path]:
    """Draw a run's figures: one picture at `path`, or for a GPU run one per section in its
    folder."""
    if report.name == "gpu":
        results = Results(report, path.parent)
        return [each for every in SECTIONS if (each := every.plot(results, path.parent))]
    plot = plot_phases if "phases" in report.figures else _DRAW[report.name]
    return [plot(report, path)]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", metavar="FILE.json", nargs="+", type=Path)
    parser.add_argument("--existing", action="store_true", help="only pictures that are there")
    parser.add_argument("--svg", action="store_true", help="pictures that any size suits")
    arguments = parser.parse_args(words)
    for file in arguments.files:
        picture = file.with_suffix(".svg" if arguments.svg else ".png")
        if picture.exists() or not arguments.existing:
            print(*draw(Report.read(file), picture), sep="\n")


if __name__ == "__main__":
    main()
