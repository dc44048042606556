# SPDX-License-Identifier: Apache-2.0
"""The sections of `stratakv bench offload` without a server: costs without hits, and gains.

    no_hit      unique prompts at the same time, with full pool and tiers: with the default
                admission filter, after the SSD has been written once with blocks that are never
                read, and with all blocks admitted to the SSD
    worst_case  one request after the other, some with prefixes on the SSD, at normal and at a
                hundredth of the speed, by prefix length and share of hits. A pair has only hits or
                no hits; a ratio is of as many consecutive pairs as give the share
    convoy      requests at the same time with a common long prefix in the tiers
    streaming   the time of steps while blocks are copied from the pool before their eviction
    hybrid      the time to the first token of a model with recurrent states (`hybrid.py`)

Every section compares, in pairs, an engine with tiers and the same engine without tiers. A section
runs in a child process with the settings of an engine core; no_hit runs in several processes, one
after the other. The parent sends one order, and reads a line after each pair and the final
figures."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...tiers.admission import DEFAULT_FILTER
from ...tiers.base import Stored, StoreTier
from ...tiers.block import BlockLayout, pack_key
from ...tiers.contract import make_buffers
from ...tiers.ssd.store import SsdStore
from ...tiers.testing.fault_plan import FaultPlan, Rule
from ...tiers.testing.faulty_store import FaultyStore
from ..harness.peer import Child, answerer
from ..harness.report import median
from .hybrid import hybrid
from .scale import (
    CONVOY,
    FULL_COSTS,
    HYBRID,
    MIXES,
    NEAR_WORST_CASE,
    NO_HIT,
    NORMAL,
    QUICK_COSTS,
    SLOW,
    SPEEDS,
    STREAMING,
    STREAMING_OUTPUT,
    SUFFIX_TOKENS,
    TIMES_SLOWER,
    WORST_CASE,
    WORST_CASE_OUTPUT,
    pairs_of,
)
from .workbench import (
    FILLERS,
    Bench,
    Figures,
    MeasuredEngine,
    Pairs,
    Prompts,
    Run,
    RunFailed,
    blocks_of,
    greedy,
    prime,
)

logger = logging.getLogger(__name__)
_READS = 5
_SECONDS = 60.0
_LEAST_BYTES = 64 * 2**20


def read_seconds(folder: Path, layout: BlockLayout, count: int) -> float:
    """Return the median seconds of reading `count` blocks in one batch. Raises RunFailed."""
    store = SsdStore(folder, layout, max(_LEAST_BYTES, 2 * count * layout.slot_bytes))
    keys = [pack_key(number.to_bytes(32, "little")) for number in range(count)]
    buffers = make_buffers(count, layout)
    taken = []
    try:
        outcomes = store.store(keys, buffers).result(_SECONDS)
        if outcomes.count(Stored.KEPT) != count:
            raise RunFailed("the SSD store did not keep the blocks of the probe")
        for _ in range(_READS):
            began = time.perf_counter()
            proofs = store.load(keys, buffers).result(_SECONDS)
            taken.append(time.perf_counter() - began)
            if None in proofs:
                raise RunFailed("the SSD store did not give back the blocks of the probe")
    finally:
        store.close(_SECONDS)
    return median(taken)


def expect_nothing_cached(pairs: Pairs, what: str) -> None:
    """Raise RunFailed if the engine without tiers found any cached token."""
    for run in pairs.without:
        if found := sum(run.cached_tokens.values()):
            raise RunFailed(f"{what}: the engine without tiers found {found} tokens cached")


def no_hit(bench: Bench) -> tuple[Figures, dict[str, float]]:
    """Measure prompts whose blocks all leave the pool and are never loaded."""
    pairs, figures = _no_hit(bench, DEFAULT_FILTER)
    pairs_of_all, figures["writing_all"] = _no_hit(bench, "all")
    return figures, {
        "no_hit_throughput": pairs.cpu_ratio,
        "no_hit_throughput_wall": pairs.wall_ratio,
        "no_hit_throughput_writing_all": pairs_of_all.cpu_ratio,
    }


def _no_hit(bench: Bench, admission: str) -> tuple[Pairs, Figures]:
    """Return pairs and figures with one admission filter, after the SSD has been written once."""
    scale = bench.scale
    request_tokens = scale.prompt_tokens + scale.output_tokens
    round_blocks = scale.requests * blocks_of(request_tokens)
    pool = 6 * blocks_of(request_tokens)
    ssd = 8 * pool
    options = {"num_blocks": pool + 1, "max_model_len": request_tokens}
    params = greedy(scale.output_tokens)
    slab = bench.slab_for(pool)[0]
    with (
        bench.plain(options) as plain,
        bench.tiered(options, slab, ssd, kv_offload_ssd_admission=admission) as engine,
    ):

        def prompts() -> Prompts:
            return [bench.tokens(scale.prompt_tokens) for _ in range(scale.requests)]

        for _ in range(2 + (pool + slab + bench.ssd_room(ssd)) // round_blocks):
            engine.run(prompts(), params)
            engine.rest()  # otherwise the slab would evict blocks before the disk has them
        before = engine.stats()["stored_blocks"]
        pairs = bench.pairs(
            "no hits", engine, plain,
            lambda _: prompts(),
            lambda engine, prompts: engine.run(prompts, params),
        )  # fmt: skip
        stored = engine.stats()["stored_blocks"] - before
        written = engine.stats()["traffic"]["ssd"]
    expect_nothing_cached(pairs, "no hits")
    asked = (scale.pairs + scale.warm_up) * round_blocks
    if stored < max(1, (asked - pool) / 2):
        raise RunFailed(f"no hits: of {asked} blocks in a pool of {pool} only {stored} left it")
    figures = pairs.figures(scale.requests * request_tokens)
    figures |= {
        "requests": scale.requests,
        "pool_blocks": pool,
        "stored_blocks": stored,
        "admission": admission,
        "unadmitted_blocks": written["unadmitted_blocks"],
    }
    return pairs, figures


def worst_case(bench: Bench) -> tuple[Figures, dict[str, float]]:
    """Measure every mix of hits, prefix length and SSD speed."""
    cells: Figures = {}
    for prefix in bench.scale.prefixes:
        seconds = (TIMES_SLOWER - 1) * read_seconds(
            bench.scratch / f"probe{prefix}", bench.layout, blocks_of(prefix)
        )
        for speed in SPEEDS:
            cells |= _cells(bench, prefix, speed, seconds)
    ratios = {
        "worst_case": min(cell["cpu_ratio"] for cell in cells.values()),
        "worst_case_wall": min(cell["wall_ratio"] for cell in cells.values()),
    }
    return cells, ratios


def _cells(bench: Bench, prefix: int, speed: str, delay_seconds: float) -> Figures:
    """Measure all mixes of one prefix length and one speed."""
    scale = bench.scale
    request_tokens = prefix + SUFFIX_TOKENS + WORST_CASE_OUTPUT
    request = blocks_of(request_tokens)
    options = {"num_blocks": 1 + request + request // 4, "max_model_len": request_tokens}
    slab, num_known = bench.slab_for(request)
    asked = scale.prefixes[prefix] * sum(
        scale.warm_up + pairs_of(mix, scale) + scale.more_pairs for mix in scale.mixes
    )
    ssd = (num_known + FILLERS + asked) * request
    stores: list[FaultyStore] = []

    def wrap(store: StoreTier) -> StoreTier:
        stores.append(FaultyStore(store, FaultPlan()))
        return stores[-1]

    slow = FaultPlan((Rule("load", "delay", delay_seconds), Rule("store", "delay", delay_seconds)))
    cells: Figures = {}
    with (
        bench.plain(options) as plain,
        bench.tiered(options, slab, ssd, wrap if speed == SLOW else None) as engine,
    ):
        known = itertools.cycle(prime(bench, engine, prefix, num_known))
        for store in stores:
            store.plan = slow
        for mix in scale.mixes:
            name = f"{mix}% hits, prefix {prefix}, {speed} tier"
            cells[name] = _cell(bench, name, engine, plain, mix, prefix, known)
            cells[name]["delay_seconds"] = delay_seconds if speed == SLOW else 0.0
    return cells


def _cell(
    bench: Bench,
    name: str,
    engine: MeasuredEngine,
    plain: MeasuredEngine,
    mix: int,
    prefix: int,
    known: Iterator[list[int]],
) -> Figures:
    hits, window = MIXES[mix]
    requests = bench.scale.prefixes[prefix]
    params = greedy(WORST_CASE_OUTPUT)

    def prompts_of(number: int) -> Prompts:
        # Evenly distributed hits: a pair has hits if the running sum of shares passes an integer.
        is_hit = (number + 1) * hits // window > number * hits // window
        heads = [next(known) if is_hit else bench.tokens(prefix) for _ in range(requests)]
        return [head + bench.tokens(SUFFIX_TOKENS) for head in heads]

    before = _num_found(engine)
    pairs = bench.pairs(
        name, engine, plain, prompts_of,
        lambda engine, prompts: engine.run(prompts, params, one_by_one=True), window,
        lambda taken: taken.cpu_ratio < NEAR_WORST_CASE,
    )  # fmt: skip
    expect_nothing_cached(pairs, name)
    found = _num_found(engine) - before
    if hits and NORMAL in name and not found:
        raise RunFailed(f"{name}: the tiers were never found to have a block")
    figures = pairs.figures(requests * (prefix + SUFFIX_TOKENS + WORST_CASE_OUTPUT))
    return figures | {"mix": mix, "prefix_tokens": prefix, "found_blocks": found}


def _num_found(engine: MeasuredEngine) -> int:
    return sum(engine.stats()["lookup_hits"].values())


def convoy(bench: Bench) -> tuple[Figures, dict[str, float]]:
    """Compare one load of a prefix for several prompts, from each tier, with one computation."""
    figures = {tier: _convoy_from(bench, tier) for tier in ("cpu", "ssd")}
    ratios = {f"convoy_from_{tier}": figures[tier]["wall_ratio"] for tier in figures}
    return figures, {"convoy": min(ratios.values()), **ratios}


def _convoy_from(bench: Bench, tier: str) -> Figures:
    scale = bench.scale
    prefix, count = scale.convoy_prefix, scale.convoy_requests
    request_tokens = prefix + SUFFIX_TOKENS + scale.convoy_output
    request = blocks_of(request_tokens)
    alone = blocks_of(SUFFIX_TOKENS + scale.convoy_output) + 1
    options = {"num_blocks": 1 + 2 * (request + count * alone), "max_model_len": request_tokens}
    slab, num_known = bench.slab_for(request)
    room = (num_known + FILLERS) * request
    sizes = (room, 0) if tier == "cpu" else (slab, 2 * room)
    params = greedy(scale.convoy_output)

    def ask(engine: MeasuredEngine, prompts: Prompts) -> Run:
        engine.forget("pool")
        return engine.run(prompts, params)

    with bench.plain(options) as plain, bench.tiered(options, *sizes) as engine:
        next_known = itertools.cycle(prime(bench, engine, prefix, num_known))

        def prompts_of(_: int) -> Prompts:
            head = next(next_known)
            return [head + bench.tokens(SUFFIX_TOKENS) for _ in range(count)]

        pairs = bench.pairs(f"convoy from {tier}", engine, plain, prompts_of, ask)
    figures = pairs.figures(count * request_tokens)
    return figures | {"requests": count, "prefix_tokens": prefix}


def streaming(bench: Bench) -> tuple[Figures, dict[str, float]]:
    """Compare full steps while blocks leave the pool with the same steps without tiers."""
    scale = bench.scale
    request_tokens = scale.long_prompt_tokens + STREAMING_OUTPUT
    pool = 3 * blocks_of(request_tokens)
    options = {
        "num_blocks": 1 + pool,
        "max_model_len": request_tokens,
        "max_num_batched_tokens": scale.step_tokens,
        "max_num_seqs": scale.long_prompts,
    }
    params = greedy(STREAMING_OUTPUT)
    with (
        bench.plain(options) as plain,
        bench.tiered(options, bench.slab_for(pool)[0], ssd_blocks=8 * pool) as engine,
    ):
        pairs = bench.pairs(
            "streaming", engine, plain,
            lambda _: [bench.tokens(scale.long_prompt_tokens) for _ in range(scale.long_prompts)],
            lambda engine, prompts: engine.run(prompts, params, watch_steps=True),
        )  # fmt: skip
    expect_nothing_cached(pairs, "streaming")
    compared = [
        full_steps(run, without, scale.step_tokens)
        for run, without in zip(pairs.with_tiers, pairs.without, strict=True)
    ]
    figures: Figures = {
        "pairs": len(compared),
        "ties": pairs.ties,
        "step_tokens": scale.step_tokens,
        "steps": sum(each["steps"] for each in compared),
        "stored_blocks": sum(each["stored_blocks"] for each in compared),
    }
    for name in ("wall_with", "wall_without", "cpu_with", "cpu_without"):
        figures[f"{name}_seconds"] = median([each[name] for each in compared])
    return figures, {
        f"step_{name}_while_streaming": median(
            [each[f"{clock}_with"] / each[f"{clock}_without"] for each in compared]
        )
        for name, clock in (("time", "wall"), ("cpu", "cpu"))
    }


def full_steps(run: Run, without: Run, tokens: int) -> dict[str, float]:
    """Return medians over the steps of `tokens` tokens in which blocks left the pool, and over the
    same steps of the engine without tiers. Raises RunFailed if the engines' steps differ, or if no
    block left the pool."""
    if [step.tokens for step in run.steps] != [step.tokens for step in without.steps]:
        raise RunFailed("streaming: the engines did not compute the same steps")
    chosen = [
        (step, other)
        for step, other in zip(run.steps, without.steps, strict=True)
        if step.tokens == tokens and step.stored_blocks
    ]
    if not chosen:
        raise RunFailed("streaming: nothing left the pool in any full step")
    return {
        "steps": len(chosen),
        "stored_blocks": sum(step.stored_blocks for step, _ in chosen),
        "wall_with": median([step.wall_seconds for step, _ in chosen]),
        "wall_without": median([other.wall_seconds for _, other in chosen]),
        "cpu_with": median([step.thread_seconds for step, _ in chosen]),
        "cpu_without": median([other.thread_seconds for _, other in chosen]),
    }


MEASURE: Mapping[str, Callable[[Bench], tuple[Figures, dict[str, float]]]] = {
    NO_HIT: no_hit,
    WORST_CASE: worst_case,
    CONVOY: convoy,
    STREAMING: streaming,
    HYBRID: hybrid,
}


def measure_in_child(
    sections: Sequence[str], model: Path, scratch: Path, quick: bool, told: Callable[[str], None]
) -> dict[str, Any]:
    """Run the sections in a child process. `told` is called after every pair, with the pair's
    section. Returns `{"figures": {section: ...}, "ratios": {name: value}}`. Raises PeerFailed."""
    order = {"sections": list(sections), "model": str(model), "scratch": str(scratch)}
    with Child(["-m", __name__], scratch / "child.log", "the measuring process") as child:
        child.send(order | {"quick": quick})
        while "done" in (answer := child.read()):
            told(answer["done"])
    return answer


def measure_here(
    sections: Sequence[str], model: Path, scratch: Path, quick: bool, told: Callable[[str], None]
) -> dict[str, Any]:
    """Run the sections in this process, like `measure_in_child`. Raises RunFailed and
    OtherTokens."""
    figures, ratios = {}, {}
    for name in sections:
        bench = Bench(model, scratch, QUICK_COSTS if quick else FULL_COSTS, told)
        figures[name], found = MEASURE[name](bench)
        ratios.update(found)
    return {"figures": figures, "ratios": ratios}


def main() -> int:
    """Run the child process: read the order, measure, and write the results."""
    tell = answerer()
    # The log level hides the warning that engines close without writing blocks back.
    logging.basicConfig(level=logging.ERROR)
    order = json.loads(sys.stdin.readline())
    given = order["sections"], Path(order["model"]), Path(order["scratch"]), order["quick"]
    try:
        tell(measure_here(*given, lambda what: tell({"done": what})))
    except Exception as error:
        logger.exception("a section failed")
        tell({"error": str(error) or type(error).__name__})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
