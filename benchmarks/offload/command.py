# SPDX-License-Identifier: Apache-2.0
"""The command `stratakv bench offload`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ...engine.config import machine_probes as probes
from ...engine.config.engine_config import CacheConfig
from ...engine.config.engine_options import EMBEDDED_MODEL
from ...engine.models.spec.spec_parser import load_model_spec
from ...engine.text.tokenizer import Tokenizer
from ...tiers.settings.values import ConfigError, check_device
from ..harness.comparison import WrongWork
from ..harness.load_client import StreamedAnswer
from ..harness.peer import PeerFailed
from ..harness.plots import draw_and_tell
from ..harness.report import Report, measure_and_write, median, progress
from ..harness.served import ServedModel, ServerFailed, cache_server
from ..harness.workloads import documents, question
from .report import (
    PHASES,
    WARM_PHASES,
    Phase,
    Plan,
    fill_report,
    plot_costs,
    plot_phases,
    print_costs,
    print_phases,
)
from .scale import (
    COSTS,
    FULL_COSTS,
    NO_HIT,
    QUICK_COSTS,
    check_context,
    chosen_sections,
    num_pairs,
)
from .scale import PHASES as PHASES_SECTION
from .sections import measure_in_child

SERVER_TO_SPARE = 1.5
# The least share of a document that a warm phase loads from its tier, without a partial block.
_EXPECTED_HIT = 0.95

Ask = Callable[[str, int, str], StreamedAnswer]


class BenchmarkFailed(RuntimeError):
    """A phase gave other tokens than the cold phase, or its blocks did not come from its tier."""


def ask_cold(
    server: ServedModel, ask: Ask, count: int, phase: Phase
) -> dict[tuple[str, int], list[int]]:
    """Send the questions of all warm phases with empty caches; return each question's tokens."""
    server.warm_up()
    expected = {}
    for document in range(count):
        for name in WARM_PHASES:
            server.reset("all")
            answer = ask("cold", document, name)
            phase.answers.append(answer)
            expected[name, document] = answer.token_ids
    server.reset("all")
    return expected


def ask_pool(server: ServedModel, ask: Ask, count: int, phase: Phase) -> None:
    """Send a question about each document directly after another question about the document."""
    for document in range(count):
        ask("pool: first question", document, "prime")
        phase.answers.append(ask("pool", document, "pool"))


def ask_tier(server: ServedModel, ask: Ask, count: int, tier: str, phase: Phase) -> None:
    """Send questions about the documents in turn; each document evicts the others from the pool."""
    paid = server.metric("stratakv:load_seconds_paid_total")
    for document in range(count):
        phase.answers.append(ask(tier, document, tier))
    phase.seconds_loading = server.metric("stratakv:load_seconds_paid_total") - paid


def check_phases(
    plan: Plan, phases: dict[str, Phase], expected: dict[tuple[str, int], list[int]]
) -> None:
    """Raise BenchmarkFailed unless tokens are equal and each phase's blocks came from its tier."""
    for answer in phases["cold"].answers:
        if answer.cached_tokens:
            raise BenchmarkFailed(f"a cold request found {answer.cached_tokens} cached tokens")
    for name in WARM_PHASES:
        for document, answer in enumerate(phases[name].answers):
            if answer.token_ids != expected[name, document]:
                raise BenchmarkFailed(
                    f"phase {name}, document {document + 1}: tokens {answer.token_ids} differ from "
                    f"the cold ones {expected[name, document]}"
                )
            found = answer.cached_by_tier.get(name, 0)
            if found < _EXPECTED_HIT * plan.prefix_tokens:
                raise BenchmarkFailed(
                    f"phase {name}, document {document + 1}: {found} of {plan.prefix_tokens} "
                    f"tokens came from there, the others from {answer.cached_by_tier}"
                )


# With fewer documents, the pool, larger than one request, would keep a part of each.
MIN_DOCUMENTS = 3
# The tiers' size, as a multiple of all documents and questions.
ROOM_TO_SPARE = 2.0
MIN_TIER_BYTES = 64 * 2**20
# With so many blocks, the partial block that a hit lacks is less than `check_phases` tolerates.
MIN_PREFIX_BLOCKS = 20


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen sections; return 0, or 1 after printing an error. Raises ConfigError."""
    sections = sections_for(arguments)
    plan = make_plan(arguments)
    scale = QUICK_COSTS if arguments.quick else FULL_COSTS
    check_context(plan.model, [name for name in sections if name in COSTS], scale)
    console = Console(stderr=True)
    report = Report("offload", "stratakv bench offload")
    report.figures["sections"] = sections

    def take() -> None:
        if PHASES_SECTION in sections:
            measure(report, plan, console)
        measure_costs(report, sections, plan.model, arguments.quick, console)

    failures = (BenchmarkFailed, PeerFailed, ServerFailed, WrongWork, ValueError)
    path = measure_and_write(report, arguments.out, take, *failures)
    if path is None:
        return 1
    show(report, path)
    return 0


def sections_for(arguments: argparse.Namespace) -> list[str]:
    """Return the named sections, or those of the run's form and device. Raises ConfigError."""
    if check_device("--device", arguments.device) == "cpu":
        return list(chosen_sections(arguments.sections, arguments.quick))
    named = chosen_sections(arguments.sections or PHASES_SECTION, arguments.quick)
    costs = [name for name in named if name in COSTS]
    if costs:
        raise ConfigError(
            f"--sections {','.join(costs)} count processor seconds of a CPU that computes; leave "
            f"--device {arguments.device} out, or ask for {PHASES_SECTION}"
        )
    return list(named)


def show(report: Report, path: Path) -> None:
    """Print tables and draw pictures of the figures; `path` is the path of the JSON."""
    plots: list[Callable[[], Path]] = []
    if PHASES_SECTION in report.figures:
        print_phases(report)
        print("Every phase gave the tokens of the cold one, and was answered from its own tier.")
        plots.append(lambda: plot_phases(report, path.with_suffix(".png")))
    if any(name in report.figures for name in COSTS):
        print_costs(report)
        print("With tiers and without, equal prompts gave equal tokens.")
        plots.append(lambda: plot_costs(report, path.with_name("offload-costs.png")))
    print(f"written: {path}")
    for draw in plots:
        draw_and_tell(draw)


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan for the model. Raises ConfigError for invalid numbers."""
    model = arguments.model or EMBEDDED_MODEL
    spec = load_model_spec(model)
    CacheConfig(block_size=arguments.block_size)  # raises for an invalid size
    suffix, output = 32, arguments.output_tokens
    room = spec.max_context - suffix - output
    if output < 1:
        raise ConfigError(f"--output-tokens must be at least 1, not {output}")
    prefix = min(3600, room) if arguments.prefix_tokens is None else arguments.prefix_tokens
    if prefix < MIN_PREFIX_BLOCKS * arguments.block_size:
        raise ConfigError(
            f"--prefix-tokens {prefix} is too few: a block that is not full would count for much; "
            f"ask for at least {MIN_PREFIX_BLOCKS * arguments.block_size}"
        )
    if prefix > room:
        raise ConfigError(
            f"--prefix-tokens {prefix} does not fit: with {suffix} tokens of question and {output} "
            f"of output the model has room for {room}"
        )
    count = arguments.documents
    if count is None:
        count = 3 if arguments.quick else 5
    if count < MIN_DOCUMENTS:
        raise ConfigError(
            f"--documents {count} is too few: the pool would keep part of each; ask for at least "
            f"{MIN_DOCUMENTS}"
        )
    layout = spec.layout(arguments.block_size, "float32")
    blocks = count * -(-(prefix + suffix + output) // arguments.block_size)
    tier_bytes = int(ROOM_TO_SPARE * blocks * layout.slot_bytes)
    return Plan(
        model=model,
        num_documents=count,
        prefix_tokens=prefix,
        suffix_tokens=suffix,
        output_tokens=output,
        block_size=arguments.block_size,
        device=arguments.device,
        cpu_bytes=max(MIN_TIER_BYTES, tier_bytes),
        ssd_bytes=max(MIN_TIER_BYTES, 2 * tier_bytes),
    )


def measure(report: Report, plan: Plan, console: Console) -> None:
    """Run the server through all phases."""
    encode = partial(Tokenizer.load(plan.model).encode, add_special_tokens=False)
    try:
        texts = documents(encode, plan.num_documents, plan.prefix_tokens)
    except ValueError as error:
        raise ConfigError(f"--documents and --prefix-tokens: {error}") from error
    questions = {
        name: question(encode, index, plan.suffix_tokens)
        for index, name in enumerate((*WARM_PHASES, "prime"))
    }
    phases = {name: Phase() for name in PHASES}
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as scratch, progress(console) as bar:
        total = len(texts) * (2 * len(WARM_PHASES) + 2) + 4
        steps = bar.add_task("starting", total=total)
        server_log = Path(scratch) / "serve.log"
        ssd_path = Path(scratch) / "ssd"

        def serve() -> ServedModel:
            bar.update(steps, description="starting the server")
            return ServedModel(plan.serve_arguments(ssd_path), server_log)

        def asker(server: ServedModel) -> Ask:
            def ask(phase: str, document: int, name: str) -> StreamedAnswer:
                bar.update(steps, description=phase, advance=1)
                return server.ask(texts[document] + questions[name], plan.output_tokens)

            return ask

        report.limits = measure_limits(Path(scratch))
        with serve() as server:
            bar.advance(steps)
            expected = ask_cold(server, asker(server), len(texts), phases["cold"])
            ask_pool(server, asker(server), len(texts), phases["pool"])
            ask_tier(server, asker(server), len(texts), "cpu", phases["cpu"])
        with serve() as server:
            bar.advance(steps)
            server.warm_up()
            ask_tier(server, asker(server), len(texts), "ssd", phases["ssd"])
        bar.update(steps, description="starting a cache server")
        with cache_server(int(SERVER_TO_SPARE * plan.cpu_bytes)) as cache:
            # The flags wait for the tier, which on a busy machine attaches and answers late, so
            # that a late answer is no miss.
            late = ["--require-tiers", "--kv-offload-remote-lookup-seconds", "10"]
            words = plan.arguments(f"cpu,grpc://127.0.0.1:{cache.port}", *late)
            with ServedModel(words, server_log) as server:
                bar.advance(steps)
                ask = asker(server)
                for document in range(len(texts)):
                    ask("remote: first engine", document, "prime")
            # The first server has ended normally, so the cache server has all blocks.
            with ServedModel(words, server_log) as server:
                bar.advance(steps)
                server.warm_up()
                ask_tier(server, asker(server), len(texts), "remote", phases["remote"])
    check_phases(plan, phases, expected)
    fill_report(report, plan, load_model_spec(plan.model), phases)


def measure_costs(
    report: Report, sections: Sequence[str], model: Path, quick: bool, console: Console
) -> None:
    """Run the sections without a server in a child process, and `no_hit` in several processes."""
    chosen = [name for name in sections if name in COSTS]
    if not chosen:
        return
    scale = QUICK_COSTS if quick else FULL_COSTS
    parts = [chosen, *[[NO_HIT]] * (scale.processes - 1 if NO_HIT in chosen else 0)]
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as scratch, progress(console) as bar:
        steps = bar.add_task("pairs", total=num_pairs(chosen, scale))

        def told(what: str) -> None:
            bar.update(steps, description=what, advance=1)

        found = [measure_in_child(part, model, Path(scratch), quick, told) for part in parts]
    report.figures["costs"] = {
        "measured": "engine cores without HTTP in one process, one thread computes; processor "
        "seconds are those of all threads of the engine, its disk and copy threads among them",
        "pairs": "alternating; a ratio is the median of the ratios of pairs, or of windows of "
        "neighbouring pairs, and of no_hit the median of several processes, whose engines lie "
        "elsewhere in memory; wall time beside it",
        "scale": asdict(scale),
    }
    report.figures |= found[0]["figures"]
    for name in found[0]["ratios"]:
        each = [process["ratios"][name] for process in found if name in process["ratios"]]
        report.ratios[name] = median(each)
        report.figures["costs"].setdefault("processes", {})[name] = each


def measure_limits(directory: Path) -> dict[str, float]:
    """Return the machine's limits, in 10⁹ per second: operations of a float32 matrix product on all
    cores, bytes that one thread copies in memory, and bytes that one thread reads from a new file
    without the page cache."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        operations = probes.multiply_operations_per_second()
    finally:
        torch.set_num_threads(before)
    return {
        "matmul_gflops_per_second": operations / 1e9,
        "memory_copy_gb_per_second": probes.memory_copy_bytes_per_second() / 1e9,
        "disk_read_gb_per_second": probes.disk_read_bytes_per_second(directory) / 1e9,
    }
