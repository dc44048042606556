# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench NAME`: runs the benchmark NAME of this project.

Every benchmark has the flags --quick and --out DIR, and writes DIR/NAME.json."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from .args import Parser

DESCRIPTION = "Run a benchmark; it prints a table and writes JSON and a plot."

# Name → module with run(args) -> exit code; a benchmark with options has add_arguments(parser) too.
# Every benchmark's `args` have `quick` and `out`. If NAME is a package whose benchmark needs torch,
# `run` is in the package's module `command`, so that --help works without torch.
BENCHMARKS = {
    "offload": "...benchmarks.offload",
    "serve": "...benchmarks.serve",
    "core": "...benchmarks.core",
    "tiers": "...benchmarks.tiers",
    "gpu": "...benchmarks.gpu",
    "trace": "...benchmarks.trace.command",
    "transfer": "...benchmarks.transfer",
    "service": "...benchmarks.service.command",
    "cluster": "...benchmarks.cluster.command",
    "sampling": "...benchmarks.sampling",
    "speculation": "...benchmarks.speculation",
    "agents": "...benchmarks.agents.command",
    "vllm": "...benchmarks.vllm.command",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's name to the parser. `run` parses the arguments after the name."""
    parser.add_argument("name", metavar="NAME", nargs="?", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, help="options of the benchmark"
    )


def run(args: argparse.Namespace) -> int:
    known = ", ".join(BENCHMARKS)
    if args.name is None:
        raise ConfigError(f"stratakv bench takes the name of a benchmark: {known}")
    if args.name not in BENCHMARKS:
        near = did_you_mean(args.name, BENCHMARKS) or f"; there are: {known}"
        raise ConfigError(f"there is no benchmark {format_value(args.name)}{near}")
    benchmark: Any = importlib.import_module(BENCHMARKS[args.name], __package__)
    parser = Parser(prog=f"stratakv bench {args.name}", description=benchmark.__doc__)
    parser.add_argument("--quick", action="store_true", help="a small form, for a demonstration")
    parser.add_argument(
        "--out", metavar="DIR", default=Path("build/bench") / args.name,
        help="where the results go (default: build/bench/NAME)",
    )  # fmt: skip
    if hasattr(benchmark, "add_arguments"):
        benchmark.add_arguments(parser)
    options = parser.parse_all(args.rest)
    options.out = readers.path("--out", options.out)
    _make_directory(options.out)
    if not hasattr(benchmark, "run"):
        benchmark = importlib.import_module(".command", benchmark.__name__)
    code: int = benchmark.run(options)
    return code


def _make_directory(path: Path) -> None:
    """Make the directory for the results before the benchmark runs. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {path} cannot be made a directory ({error.strerror}); choose another one"
        ) from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"--out {path} may not be written by this user; choose another one")
