# SPDX-License-Identifier: Apache-2.0
"""The command `stratakv bench serve`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from ...engine.config.engine_options import EMBEDDED_MODEL
from ...engine.models.spec.spec_parser import load_model_spec
from ...engine.text.tokenizer import Tokenizer
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ..harness.load_client import LoadRun, Target, run_closed, run_open
from ..harness.peer import Peer, PeerFailed
from ..harness.report import Report, run_and_tell, tell_failure
from ..harness.served import HOST, ServedModel, ServerFailed
from ..harness.workloads import (
    CONTEXT_TOKENS,
    LONGEST_ANSWER_TOKENS,
    WORKLOADS,
    Decoder,
    Encoder,
    PromptSession,
    Session,
    make_sessions,
)
from . import limits, peer_engines
from .report import fill_comparison, load_figures, plot_serve, print_comparison, print_workloads


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run: model, workloads, total requests and concurrent requests."""

    model: Path
    workloads: tuple[str, ...]
    requests: int
    concurrency: int
    request_rate: float | None  # requests per second; None for a closed loop
    output_tokens: int
    rounds: int
    threads: int
    seed: int


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of a run. Raises ConfigError for invalid numbers."""
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
        # One core is left for HTTP and the clients.
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


# The size of the workloads' server's pool, in tokens: all documents without questions.
POOL_TOKENS = 12 * 1024
CPU_TIER, SSD_TIER = "256MiB", "1GiB"
BLOCK_TOKENS = 16
PEER_SECONDS = 300.0
NO_TRANSFORMERS = (
    "transformers is not installed, so nothing is held against it; "
    "run in a clone of StrataKV: pip install '.[test]'"
)
# Name of a side of the comparison → the argument `mode` of its peer.
MODES = {"engine": "all", "transformers_padded": "padded", "transformers_serial": "serial"}


class BenchmarkFailed(RuntimeError):
    """Requests failed in a measurement that needs all requests."""


@dataclass(frozen=True, slots=True)
class Coding:
    """The model's tokenizer: text to tokens, and tokens to text."""

    encode: Encoder
    decode: Decoder

    @classmethod
    def of(cls, model: Path) -> Coding:
        tokenizer = Tokenizer.load(model)
        return cls(partial(tokenizer.encode, add_special_tokens=False), tokenizer.decode)


def run(arguments: argparse.Namespace) -> int:
    """Run all measurements; return 0, or 1 after printing an error. Raises ConfigError."""
    if arguments.lora and not arguments.limits:
        raise ConfigError("--lora is of no use without --limits; add that or leave it out")
    if arguments.limits:
        return limits.run_limits(arguments)
    if arguments.peer_python is not None:
        return peer_engines.run_peer(arguments)
    plan = make_plan(arguments)
    # No markup, because messages may contain '.[test]' and the output of servers.
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    report = Report("serve", "stratakv bench serve")
    report.figures["plan"] = asdict(plan) | {"model": plan.model.name}

    def measure() -> None:
        coding = Coding.of(plan.model)
        with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as scratch:
            measure_workloads(plan, coding, Path(scratch), report, console)
            if plan.rounds:
                measure_comparison(plan, coding, Path(scratch), report, console)

    failures = (BenchmarkFailed, ServerFailed, PeerFailed, ValueError)
    if run_and_tell(report, arguments.out, measure, partial(show, plan), plot_serve, *failures):
        return 1
    failed = sum(figures["failed"] for figures in report.figures["workloads"].values())
    if failed:
        words = f"{failed} requests failed; see errors in {arguments.out / 'serve.json'}"
        tell_failure("serve", words)
    return int(failed > 0)


def measure_workloads(
    plan: Plan, coding: Coding, scratch: Path, report: Report, console: Console
) -> None:
    """Measure each workload, starting from empty caches."""
    figures = report.figures["workloads"] = {}
    console.print("starting the server of the workloads")
    arguments = [
        *common_arguments(plan),
        "--num-blocks", str(POOL_TOKENS // BLOCK_TOKENS), "--block-size", str(BLOCK_TOKENS),
        "--kv-offload", "cpu,ssd", "--kv-offload-cpu-bytes", CPU_TIER,
        "--kv-offload-ssd-path", str(scratch / "ssd"), "--kv-offload-ssd-bytes", SSD_TIER,
    ]  # fmt: skip
    with ServedModel(arguments, scratch / "workloads.log") as server:
        server.warm_up()
        for name in plan.workloads:
            console.print(f"workload {name}")
            sessions = make_sessions(name, coding.encode, coding.decode, plan.requests, plan.seed)
            server.reset("all")
            target = Target(HOST, server.port, plan.output_tokens)
            load = asyncio.run(_run(plan, target, sessions))
            figures[name] = load_figures(load)
            figures[name]["usual_hit_rate"] = WORKLOADS[name].usual_hit_rate


def measure_comparison(
    plan: Plan, coding: Coding, scratch: Path, report: Report, console: Console
) -> None:
    """Time the same prompts on every side, in turn: other work affects all sides equally."""
    prompts = unique_prompts(plan, coding)
    texts: dict[str, list[str]] = {}
    rates: dict[str, list[float]] = {}
    same_text = {}
    with ExitStack() as stack:
        console.print("starting the server and the peers of the comparison")
        peers = start_peers(plan, scratch, stack, console)
        log = scratch / "comparison.log"
        server = stack.enter_context(ServedModel(common_arguments(plan), log))
        server.warm_up()
        for peer in set(peers.values()):
            peer.wait_ready()
        for name, peer in peers.items():
            peer.run(MODES[name], prompts[:2], 2, PEER_SECONDS)
        for turn in range(plan.rounds):
            console.print(f"round {turn + 1} of {plan.rounds}")
            rate, texts["http"] = ask_http(server, prompts, plan.output_tokens)
            rates.setdefault("http", []).append(rate)
            for name, peer in peers.items():
                made = peer.run(MODES[name], prompts, plan.output_tokens, PEER_SECONDS)
                rates.setdefault(name, []).append(made.tokens_per_second)
                texts[name] = [coding.decode(ids) for ids in made.token_ids]
    for name in peers:
        same = sum(a == b for a, b in zip(texts["http"], texts[name], strict=True))
        same_text[name] = same / len(prompts)
    fill_comparison(report, rates, same_text)


def common_arguments(plan: Plan) -> list[str]:
    """Return the arguments that the two servers share."""
    threads, context = str(plan.threads), str(CONTEXT_TOKENS)
    # The number type is that of the peers, even if the checkpoint has another type.
    common = ["--num-threads", threads, "--max-model-len", context, "--dtype", "float32"]
    return [str(plan.model), *common]


def start_peers(plan: Plan, scratch: Path, stack: ExitStack, console: Console) -> dict[str, Peer]:
    """Start the peers; return the peers by the names of their sides in the comparison."""

    def start(module: str) -> Peer:
        log = scratch / f"{module}.log"
        return stack.enter_context(Peer(f"{__package__}.{module}", plan.model, plan.threads, log))

    peers = {"engine": start("engine_peer")}
    if importlib.util.find_spec("transformers") is None:
        console.print(NO_TRANSFORMERS, style="yellow")
        return peers
    transformers = start("transformers_peer")
    return peers | {"transformers_padded": transformers, "transformers_serial": transformers}


def unique_prompts(plan: Plan, coding: Coding) -> list[list[int]]:
    """Return a prompt for each user; the prompts have no shared parts."""
    sessions = make_sessions("unique", coding.encode, coding.decode, plan.concurrency, plan.seed)
    return [session.token_ids for session in sessions if isinstance(session, PromptSession)]


def ask_http(
    server: ServedModel, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[float, list[str]]:
    """Send all prompts at once; return output tokens per second, and the texts in order."""
    server.reset("all")
    sessions = [PromptSession(prompt) for prompt in prompts]
    target = Target(HOST, server.port, max_tokens)
    load = asyncio.run(run_closed(target, sessions, len(sessions)))
    if load.errors:
        raise BenchmarkFailed(f"{len(load.errors)} requests failed: {load.errors[0]}")
    rate = sum(answer.output_tokens for answer in load.answers) / load.seconds
    return rate, [answer.text for answer in load.answers]


def show(plan: Plan, report: Report) -> None:
    """Print the tables of the workloads and of the comparison."""
    how = (
        f"{plan.concurrency} users at once"
        if plan.request_rate is None
        else f"{plan.request_rate:g} requests a second"
    )
    threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''}"
    work = f"{plan.output_tokens} tokens of output, {threads}"
    print_workloads(f"Workloads over HTTP: {how}, {work}", report.figures["workloads"])
    if "comparison" in report.figures:
        title = f"{plan.concurrency} unique prompts at once, {work}, medians of {plan.rounds}"
        print_comparison(title, report)


async def _run(plan: Plan, target: Target, sessions: Sequence[Session]) -> LoadRun:
    if plan.request_rate is None:
        return await run_closed(target, sessions, plan.concurrency)
    return await run_open(target, sessions, plan.request_rate, plan.seed)
