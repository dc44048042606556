# SPDX-License-Identifier: Apache-2.0
"""What the sections of `stratakv bench offload` share: engines, texts, tiers with prefixes, pairs.

A pair is a run of an engine with tiers and one of the same engine without, in turn and with equal
prompts. Both must give the same tokens. Engines compute in other batches when they find other
things cached, so rounding differs, and where the two likeliest tokens are as good as equal either
may come: such a tie is counted, anything else stops the benchmark.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.models.spec import load_model_spec
from ...engine.sampling_params import SamplingParams
from ..harness.report import median
from .engines import MeasuredEngine, Prompts, Run, WrapStore
from .scale import SUFFIX_TOKENS, CostScale

BLOCK_SIZE = 16
_SEED = 7
# Prefixes that are asked for again, in turn, beyond those that the slab holds; and how many others
# push the last of them out of the pool.
_MORE_KNOWN = 4
FILLERS = 3
_MIN_SSD_BYTES = 64 * 2**20

Figures = dict[str, Any]


# Between log-probabilities; in float32 the last bits of this model's are a hundred times smaller.
TIE = 1e-3

Ask = Callable[[MeasuredEngine, Prompts], Run]


class OtherTokens(RuntimeError):
    """With tiers an engine said something else than without."""


@dataclass(slots=True)
class Pairs:
    """The runs of all pairs. `window`: so many neighbours together hold what is to be compared."""

    with_tiers: list[Run] = field(default_factory=list)
    without: list[Run] = field(default_factory=list)
    ties: int = 0
    window: int = 1

    def ratio(self, cost: Callable[[Run], float]) -> float:
        """The median over all windows of what it costs without tiers over what it costs with."""
        sides = [[cost(run) for run in runs] for runs in (self.without, self.with_tiers)]
        windows = range(len(self.without) - self.window + 1)
        return median(
            [
                sum(sides[0][i : i + self.window]) / sum(sides[1][i : i + self.window])
                for i in windows
            ]
        )

    @property
    def cpu_ratio(self) -> float:
        """Of processor seconds. Both sides did the same tokens, so it is the one for each token."""
        return self.ratio(lambda run: run.cpu_seconds)

    @property
    def wall_ratio(self) -> float:
        return self.ratio(lambda run: run.wall_seconds)

    def figures(self, tokens: int) -> dict[str, Any]:
        """What the JSON holds of them; `tokens` are those of one run, prompts and outputs."""
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
            "wall_ratio": self.wall_ratio,
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
    """Who comes first changes from pair to pair. Where those taken leave something open, `more` of
    them are. Raises OtherTokens and RunFailed."""
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
    """How many answers differ by a tie. Raises OtherTokens where one differs otherwise."""
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
    """Whether these two are the likeliest tokens after `context`, one as likely as the other."""
    likeliest = plain.likeliest(context, 2)
    return likeliest.keys() == {token, other} and abs(likeliest[token] - likeliest[other]) < TIE


class Bench:
    """Where a section works. `told` is called after each pair."""

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

    def tokens(self, count: int) -> list[int]:
        """A text nobody has asked about."""
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
        """As many as the scale wants, or as give so many windows, and more where those taken leave
        something open."""
        scale = self.scale
        return take_pairs(
            engine, plain, prompts_of, ask, window=window,
            pairs=scale.pairs + window - 1, warm_up=scale.warm_up, told=lambda: self._told(what),
            more=scale.more_pairs, needs_more=needs_more,
        )  # fmt: skip

    def slab_for(self, request_blocks: int) -> tuple[int, int]:
        """Blocks of a slab, and how many prefixes of that length are more than it holds."""
        slab = max(2 * request_blocks, self.scale.slab_blocks)
        return slab, slab // request_blocks + _MORE_KNOWN

    def ssd_room(self, blocks: int) -> int:
        """Blocks of an SSD that is to have so many: one below a certain size is not to be had."""
        return max(blocks, _MIN_SSD_BYTES // self.layout.slot_bytes)

    @contextmanager
    def plain(self, options: Figures) -> Iterator[MeasuredEngine]:
        """An engine without tiers."""
        engine = MeasuredEngine(self._model, {"num_threads": 1, **options})
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def tiered(
        self,
        options: Figures,
        cpu_blocks: int,
        ssd_blocks: int = 0,
        wrap_store: WrapStore | None = None,
        **more: Any,
    ) -> Iterator[MeasuredEngine]:
        """The same engine with tiers of so many blocks; `more` are options of its own."""
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
            shutil.rmtree(disk, ignore_errors=True)  # it may be gigabytes, and others follow


def blocks_of(tokens: int) -> int:
    """That hold so many."""
    return -(-tokens // BLOCK_SIZE)


def greedy(output_tokens: int) -> SamplingParams:
    """Always as many tokens as asked for."""
    return SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)


def prime(bench: Bench, engine: MeasuredEngine, prefix: int, count: int) -> list[list[int]]:
    """Prefixes that have left the pool for the tiers."""
    known = [bench.tokens(prefix) for _ in range(count)]
    for text in (*known, *[bench.tokens(prefix) for _ in range(FILLERS)]):
        engine.run([text + bench.tokens(SUFFIX_TOKENS)], greedy(1))
        engine.rest()  # a slab that is refilled before the disk has followed loses blocks
    return known
