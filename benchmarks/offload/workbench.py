# SPDX-License-Identifier: Apache-2.0
"""What the sections of `stratakv bench offload` share: engines, texts, prefixes in the tiers."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...engine.models.spec import load_model_spec
from ...engine.sampling_params import SamplingParams
from .engines import MeasuredEngine, Prompts, Run, WrapStore
from .pairs import Pairs, take_pairs
from .scale import SUFFIX_TOKENS, CostScale

BLOCK_SIZE = 16
_SEED = 7
# Prefixes that are asked for again, in turn, beyond those that the slab holds; and how many others
# push the last of them out of the pool.
_MORE_KNOWN = 4
FILLERS = 3
_MIN_SSD_BYTES = 64 * 2**20

Figures = dict[str, Any]


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
