# SPDX-License-Identifier: Apache-2.0
"""What `stratakv bench serve` is asked to do, from its options."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from ...engine.models.spec import load_model_spec
from ...engine.options import EMBEDDED_MODEL
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ..harness.workloads import CONTEXT_TOKENS, LONGEST_ANSWER_TOKENS, WORKLOADS


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked, of what, by how many at once."""

    model: Path
    workloads: tuple[str, ...]
    requests: int
    concurrency: int
    request_rate: float | None  # requests a second; None: closed loop
    output_tokens: int
    rounds: int
    threads: int
    seed: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument("--model", type=Path, help="a model directory (the embedded model)")
    parser.add_argument(
        "--workload", action="append", metavar="NAME",
        help=f"only this one, repeatable: {', '.join(WORKLOADS)} (all of them)",
    )  # fmt: skip
    parser.add_argument("--requests", type=int, help="requests of each workload (96, quick 24)")
    parser.add_argument("--concurrency", type=int, default=16, help="users at once (16)")
    parser.add_argument(
        "--request-rate", type=float, metavar="R",
        help="begin R requests a second at random times, instead of keeping users busy",
    )  # fmt: skip
    parser.add_argument("--output-tokens", type=int, help="tokens of each answer (128, quick 32)")
    parser.add_argument(
        "--rounds", type=int, help="turns of the comparison, 0 for none (5, quick 3)"
    )
    parser.add_argument(
        "--num-threads", type=int, help="threads that compute, on every side (the cores less one)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrival times (0)")


def make_plan(arguments: argparse.Namespace) -> Plan:
    """The plan; raises ConfigError for numbers that cannot work."""
    quick = arguments.quick
    threads = arguments.num_threads
    plan = Plan(
        model=arguments.model or EMBEDDED_MODEL,
        workloads=tuple(dict.fromkeys(arguments.workload or WORKLOADS)),
        requests=_or(arguments.requests, 24 if quick else 96),
        concurrency=arguments.concurrency,
        request_rate=arguments.request_rate,
        output_tokens=_or(arguments.output_tokens, 32 if quick else 128),
        rounds=_or(arguments.rounds, 3 if quick else 5),
        # The other core is for HTTP and for the clients.
        threads=_or(threads, max(1, len(os.sched_getaffinity(0)) - 1)),
        seed=arguments.seed,
    )
    for name in plan.workloads:
        if name not in WORKLOADS:
            near = did_you_mean(name, WORKLOADS) or f"; there are: {', '.join(WORKLOADS)}"
            raise ConfigError(f"there is no workload {name!r}{near}")
    for flag, value, least, most in (
        ("--requests", plan.requests, 1, 100_000),
        ("--concurrency", plan.concurrency, 1, 1024),
        ("--output-tokens", plan.output_tokens, 1, LONGEST_ANSWER_TOKENS),
        ("--rounds", plan.rounds, 0, 1000),
        ("--num-threads", plan.threads, 1, 1024),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{flag} takes {least} to {most}, not {value}")
    if plan.request_rate is not None and not 0 < plan.request_rate <= 100_000:
        raise ConfigError(f"--request-rate takes more than 0 to 100000, not {plan.request_rate:g}")
    context = load_model_spec(plan.model).max_context
    if context < CONTEXT_TOKENS:
        raise ConfigError(
            f"the workloads take a context of {CONTEXT_TOKENS} tokens and {plan.model.name} has "
            f"{context}; choose another --model"
        )
    return plan


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
