# SPDX-License-Identifier: Apache-2.0
"""The common parts of the sections without a server: engines, prompts and pairs.

A pair is a run of an engine with tiers and a run of the same engine without tiers, with equal
prompts. The two engines must give the same tokens. Engines with different cached tokens compute
different batches, which round differently. So the engines' tokens may differ if two tokens are
almost equally likely; such a tie is counted. Any other difference stops the benchmark.

The benchmark steps engines in its own process, one engine at a time. The cost of a run with tiers
includes the tiers' threads, also their work after the last token, until the engine's next run. An
engine without tiers has no such threads."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ...engine.collector import settle_collector
from ...engine.config.engine_options import engine_config
from ...engine.core.engine_core import EngineCore
from ...engine.models.spec.spec_parser import load_model_spec
from ...engine.request.core_messages import AddRequest, TokenOutput
from ...engine.request.sampling_params import SamplingParams
from ...tiers import assemble
from ...tiers.base import StoreTier
from ..harness.comparison import quartiles
from ..harness.report import median
from .scale import SUFFIX_TOKENS, CostScale

Prompts = Sequence[Sequence[int]]
WrapStore = Callable[[StoreTier], StoreTier]

# The deadline of a run, which is far longer than any run.
RUN_SECONDS = 300.0
# After a run, completions of copies and disk I/O are processed until there is no completion for
# _QUIET_SECONDS, but for at most _SETTLE_SECONDS.
_QUIET_SECONDS = 0.01
_SETTLE_SECONDS = 0.5
_REST_SECONDS = 60.0


class RunFailed(RuntimeError):
    """An engine did not answer, or gave a wrong answer."""


@dataclass(slots=True)
class Step:
    """A step that computed tokens."""

    tokens: int
    wall_seconds: float
    thread_seconds: float  # processor seconds of the thread that steps the engine
    stored_blocks: int  # blocks that were copied from the pool to the slab


@dataclass(slots=True)
class Run:
    """The answers to some prompts, in the order of the prompts, and the costs."""

    token_ids: list[list[int]]
    cached_tokens: Counter[str] = field(default_factory=Counter)  # by tier, over all prompts
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)  # if the run records steps


class _Threads:
    """The processor time of all threads of this process except the thread that steps engines."""

    def __init__(self) -> None:
        self._charged = self._now()

    def take(self) -> float:
        """Return the processor seconds of the threads since the last call."""
        before, self._charged = self._charged, self._now()
        return self._charged - before

    def _now(self) -> float:
        return time.process_time() - time.thread_time()


class MeasuredEngine:
    """An engine core whose runs are measured. `wrap_store` wraps each store below the slab."""

    def __init__(
        self, model: Path, options: dict[str, Any], wrap_store: WrapStore | None = None
    ) -> None:
        real = assemble.open_stores

        def open_stores(*args: Any, **given: Any) -> list[StoreTier]:
            stores = real(*args, **given)
            return [wrap_store(store) for store in stores] if wrap_store else stores

        with patch.object(assemble, "open_stores", open_stores):
            self.core = EngineCore(engine_config(model, {"dtype": "float32"} | options))
        settle_collector()  # as in an engine's process
        self.has_tiers = "kv_offload" in options
        self._threads = _Threads()
        self._wake = threading.Event()
        self.core.set_wakeup(self._wake.set)
        self._num_requests = 0

    def run(
        self,
        prompts: Prompts,
        params: SamplingParams,
        *,
        one_by_one: bool = False,
        watch_steps: bool = False,
    ) -> Run:
        """Answer all prompts, at the same time or one after the other. Raises RunFailed."""
        run = Run([[] for _ in prompts])
        groups = [[index] for index in range(len(prompts))] if one_by_one else [range(len(prompts))]
        busy, began = time.thread_time(), time.perf_counter()
        for group in groups:
            self._answer({index: prompts[index] for index in group}, params, run, watch_steps)
        run.wall_seconds = time.perf_counter() - began
        if self.has_tiers:
            self._settle()
        run.cpu_seconds = time.thread_time() - busy
        if self.has_tiers:
            run.cpu_seconds += self._threads.take()
        return run

    def likeliest(self, context: Sequence[int], count: int) -> dict[int, float]:
        """Return the `count` likeliest next tokens, with their log-probabilities."""
        packed = np.asarray(context, "<i4").tobytes()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=count)
        request = AddRequest("likeliest", packed, params, skip_reading_prefix_cache=True)
        self._take(self.core.add(request), {}, Run([]))
        found: dict[int, float] = {}
        while self.core.has_work():
            for output in self.core.step():
                for each in output.logprobs or ():
                    # The first entry, the chosen token, is repeated at its rank.
                    found = dict(zip(each.token_ids[1:], each.logprobs[1:], strict=True))
        self.forget("pool")  # so that the next request finds nothing cached
        return found

    def rest(self) -> None:
        """Wait until no store reads or writes blocks. Raises RunFailed."""
        deadline = time.monotonic() + _REST_SECONDS
        while True:
            self._settle()
            traffic = self.stats()["traffic"].values()
            if not any(each["active_promotions"] or each["active_cascades"] for each in traffic):
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"a tier was still at work after {_REST_SECONDS:g} s")

    def forget(self, scope: str) -> None:
        """Reset the prefix cache of the pool ("pool"), or of pool and tiers ("all")."""
        self.core.call("reset_prefix_cache", scope)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.core.call("stats", "")["connector"]
        return found

    def close(self) -> None:
        """Shut down without writing blocks back, because no later request loads the blocks."""
        self.core.shutdown(0.0)

    def _answer(
        self, prompts: dict[int, Sequence[int]], params: SamplingParams, run: Run, watch_steps: bool
    ) -> None:
        core, deadline = self.core, time.monotonic() + RUN_SECONDS
        names = {}
        for index, prompt in prompts.items():
            self._num_requests += 1
            names[str(self._num_requests)] = index
            packed = np.asarray(prompt, "<i4").tobytes()
            self._take(core.add(AddRequest(str(self._num_requests), packed, params)), names, run)
        while names:
            if time.monotonic() > deadline:
                raise RunFailed(f"{len(names)} requests had no answer after {RUN_SECONDS:g} s")
            if not core.has_work():
                self._wake.wait(core.idle_seconds())
                self._wake.clear()
            elif watch_steps:
                self._take(self._watch_step(run.steps), names, run)
            else:
                self._take(core.step(), names, run)

    def _watch_step(self, steps: list[Step]) -> list[TokenOutput]:
        counts = self.core.scheduler.counts
        tokens = counts["scheduled_tokens"]
        stored = self._num_stored()
        busy, began = time.thread_time(), time.perf_counter()
        outputs = self.core.step()
        wall, busy = time.perf_counter() - began, time.thread_time() - busy
        tokens = counts["scheduled_tokens"] - tokens
        if tokens:
            steps.append(Step(tokens, wall, busy, self._num_stored() - stored))
        return outputs

    def _num_stored(self) -> int:
        return int(self.stats()["stored_blocks"]) if self.has_tiers else 0

    def _take(self, outputs: list[TokenOutput], names: dict[str, int], run: Run) -> None:
        for output in outputs:
            if output.error is not None:
                raise RunFailed(f"a request failed: {output.error}")
            run.token_ids[names[output.request_id]] += output.new_token_ids
            run.cached_tokens.update(output.cached_tokens_by_tier or {})
            if output.finish_reason is not None:
                del names[output.request_id]

    def _settle(self) -> None:
        """Process ended copies and disk I/O, so that none are left for the next run."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            while self.core.has_work() and time.monotonic() < deadline:
                self.core.step()
            if not self._wake.wait(_QUIET_SECONDS):
                return
            self._wake.clear()


BLOCK_SIZE = 16
_SEED = 7
# A section uses, in turn, _MORE_KNOWN more prefixes than fit into the slab. FILLERS other prompts
# evict the last prefixes from the pool.
_MORE_KNOWN = 4
FILLERS = 3
_MIN_SSD_BYTES = 64 * 2**20

# The largest difference of log-probabilities in a tie; float32 rounding is a hundred times smaller.
TIE = 1e-3

Figures = dict[str, Any]
Ask = Callable[[MeasuredEngine, Prompts], Run]


class OtherTokens(RuntimeError):
    """An engine with tiers gave other tokens than the engine without tiers."""


@dataclass(slots=True)
class Pairs:
    """The runs of all pairs. A ratio is that of `window` consecutive pairs together."""

    with_tiers: list[Run] = field(default_factory=list)
    without: list[Run] = field(default_factory=list)
    ties: int = 0
    window: int = 1

    def ratios(self, cost: str) -> list[float]:
        """Return the costs without tiers divided by the costs with tiers, one ratio for each
        window. `cost` is the name of a field of `Run`."""
        sides = [[getattr(run, cost) for run in runs] for runs in (self.without, self.with_tiers)]
        return [
            sum(sides[0][i : i + self.window]) / sum(sides[1][i : i + self.window])
            for i in range(len(self.without) - self.window + 1)
        ]

    @property
    def cpu_ratio(self) -> float:
        """The median ratio of processor seconds, also per token, because the tokens are equal."""
        return median(self.ratios("cpu_seconds"))

    @property
    def wall_ratio(self) -> float:
        return median(self.ratios("wall_seconds"))

    def figures(self, tokens: int) -> dict[str, Any]:
        """Return the JSON entries; `tokens` is the prompt and output tokens of one run."""
        found: Counter[str] = Counter()
        for run in self.with_tiers:
            found.update(run.cached_tokens)
        sides = {"with_tiers": self.with_tiers, "without": self.without}
        return {
            "pairs": len(self.without),
            "window": self.window,
            "ties": self.ties,
            "tokens": tokens,
            "cached_tokens": found,
            "cpu_ratio": self.cpu_ratio,
            "cpu_quartiles": quartiles(self.ratios("cpu_seconds")),
            "wall_ratio": self.wall_ratio,
            "wall_quartiles": quartiles(self.ratios("wall_seconds")),
            **{
                f"cpu_seconds_per_token_{side}": median([run.cpu_seconds for run in runs]) / tokens
                for side, runs in sides.items()
            },
            **{
                f"wall_seconds_{side}": median([run.wall_seconds for run in runs])
                for side, runs in sides.items()
            },
        }


def take_pairs(
    engine: MeasuredEngine,
    plain: MeasuredEngine,
    prompts_of: Callable[[int], Prompts],
    ask: Ask,
    *,
    pairs: int,
    warm_up: int,
    told: Callable[[], None],
    window: int = 1,
    more: int = 0,
    needs_more: Callable[[Pairs], bool] = lambda _: False,
) -> Pairs:
    """Run pairs; the engine that runs first alternates. `more` pairs follow if `needs_more` returns
    true. Raises OtherTokens and RunFailed."""
    taken = Pairs(window=window)
    number, total = -1, warm_up + pairs
    while (number := number + 1) < total:
        prompts = prompts_of(number)
        if number % 2:
            run, without = ask(engine, prompts), ask(plain, prompts)
        else:
            without, run = ask(plain, prompts), ask(engine, prompts)
        taken.ties += count_ties(plain, prompts, run.token_ids, without.token_ids)
        if number >= warm_up:
            taken.with_tiers.append(run)
            taken.without.append(without)
            if len(taken.without) == pairs and needs_more(taken):
                total += more
        told()
    return taken


def count_ties(
    plain: MeasuredEngine, prompts: Prompts, got: list[list[int]], expected: list[list[int]]
) -> int:
    """Return how many answers differ by a tie. Raises OtherTokens for other differences."""
    ties = 0
    for prompt, tokens, others in zip(prompts, got, expected, strict=True):
        if tokens == others:
            continue
        same = next(
            (i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None
        )
        if same is None or not _is_tie(
            plain, [*prompt, *others[:same]], tokens[same], others[same]
        ):
            raise OtherTokens(
                f"to a prompt of {len(prompt)} tokens an engine with tiers answered {tokens}, "
                f"without them {others}"
            )
        ties += 1
    return ties


def _is_tie(plain: MeasuredEngine, context: Sequence[int], token: int, other: int) -> bool:
    """Whether `token` and `other` are the likeliest after `context`, almost equally likely."""
    likeliest = plain.likeliest(context, 2)
    return likeliest.keys() == {token, other} and abs(likeliest[token] - likeliest[other]) < TIE


class Bench:
    """The engines, prompts and pairs of a section. `told` is called after each pair."""

    def __init__(
        self, model: Path, scratch: Path, scale: CostScale, told: Callable[[str], None]
    ) -> None:
        spec = load_model_spec(model)
        self.scale = scale
        self.scratch = scratch
        self.layout = spec.layout(BLOCK_SIZE, "float32")
        self._model = model
        self._told = told
        self._vocabulary = spec.vocab_size
        self._rng = np.random.default_rng(_SEED)
        self._numbers = itertools.count()

    def of_model(self, model: Path) -> Bench:
        """Return a bench for another model, with the same folder and scale."""
        return Bench(model, self.scratch, self.scale, self._told)

    def tokens(self, count: int) -> list[int]:
        """Return new random token ids, which no engine has had in a prompt."""
        drawn: list[int] = self._rng.integers(1, self._vocabulary, count, np.int32).tolist()
        return drawn

    def pairs(
        self,
        what: str,
        engine: MeasuredEngine,
        plain: MeasuredEngine,
        prompts_of: Callable[[int], Prompts],
        ask: Callable[[MeasuredEngine, Prompts], Run],
        window: int = 1,
        needs_more: Callable[[Pairs], bool] = lambda _: False,
    ) -> Pairs:
        """Run as many pairs as give one window for each pair of the scale; `more_pairs` follow if
        `needs_more` returns true."""
        scale = self.scale
        return take_pairs(
            engine, plain, prompts_of, ask, window=window,
            pairs=scale.pairs + window - 1, warm_up=scale.warm_up, told=lambda: self._told(what),
            more=scale.more_pairs, needs_more=needs_more,
        )  # fmt: skip

    def slab_for(self, request_blocks: int) -> tuple[int, int]:
        """Return the slab's size in blocks, and a number of prefixes of `request_blocks` blocks
        that does not fit into the slab."""
        slab = max(2 * request_blocks, self.scale.slab_blocks)
        return slab, slab // request_blocks + _MORE_KNOWN

    def ssd_room(self, blocks: int) -> int:
        """Return the size, in blocks, of an SSD tier for `blocks`; a tier has a minimum size."""
        return max(blocks, _MIN_SSD_BYTES // self.layout.slot_bytes)

    @contextmanager
    def plain(self, options: Figures) -> Iterator[MeasuredEngine]:
        """Yield an engine without tiers, with one compute thread; the engine is closed on exit."""
        with closing(MeasuredEngine(self._model, {"num_threads": 1, **options})) as engine:
            yield engine

    @contextmanager
    def tiered(
        self,
        options: Figures,
        cpu_blocks: int,
        ssd_blocks: int = 0,
        wrap_store: WrapStore | None = None,
        **more: Any,
    ) -> Iterator[MeasuredEngine]:
        """Yield the engine of `plain` with tiers of these sizes and the options `more`."""
        slot_bytes = self.layout.slot_bytes
        disk = self.scratch / f"ssd{next(self._numbers)}"
        tiers: Figures = {"kv_offload": "cpu", "kv_offload_cpu_bytes": cpu_blocks * slot_bytes}
        if ssd_blocks:
            tiers["kv_offload"] = "cpu,ssd"
            tiers["kv_offload_ssd_path"] = disk
            tiers["kv_offload_ssd_bytes"] = self.ssd_room(ssd_blocks) * slot_bytes
        engine = MeasuredEngine(
            self._model, {"num_threads": 1, **options, **tiers, **more}, wrap_store
        )
        try:
            yield engine
            engine.rest()
            engine.forget("all")
        finally:
            engine.close()
            shutil.rmtree(disk, ignore_errors=True)  # a store may have gigabytes


def blocks_of(tokens: int) -> int:
    """Return the number of blocks of `tokens` tokens, with a partly filled last block."""
    return -(-tokens // BLOCK_SIZE)


def greedy(output_tokens: int) -> SamplingParams:
    """Return parameters for a greedy answer of exactly `output_tokens` tokens."""
    return SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)


def prime(
    bench: Bench, engine: MeasuredEngine, prefix: int, count: int, *, questions: int = 1
) -> list[list[int]]:
    """Return prefixes that have been moved from the pool to the tiers, after `questions` questions
    about each prefix."""
    known = [bench.tokens(prefix) for _ in range(count)]
    for text in (*known, *[bench.tokens(prefix) for _ in range(FILLERS)]):
        for _ in range(questions):
            engine.run([text + bench.tokens(SUFFIX_TOKENS)], greedy(1))
        engine.rest()  # otherwise the slab would evict blocks before the disk has them
    return known
