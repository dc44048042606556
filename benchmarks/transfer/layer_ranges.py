# SPDX-License-Identifier: Apache-2.0
"""The case of computing the first layers while the last layers are loaded.

Whole:   slots are copied to the pool, then the suffix of the prompt is computed
Ranges:  lower layers of all blocks are copied first, then upper layers; each layer waits only
         for its own range, so that computing and copying overlap

The two methods copy with one thread, like the device's load stream, and compute the embedded model
with attention over the pool. Their logits must be equal. The overlap can save at most the shorter
of the times of copying and computing; the report has this bound too. The engine does not load layer
ranges; `docs/tiers.md` has the reason."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...connector.device.cpu import pool_pages
from ...engine.config.engine_options import EMBEDDED_MODEL
from ...engine.models.attention import AttentionPlan, PagedAttention
from ...engine.models.decoder import Decoder
from ...engine.models.spec.spec_parser import load_model_spec
from ...engine.worker.block_table import BlockTable
from ...engine.worker.forward.attention_metadata import AttentionPlanner
from ...engine.worker.kv_pool import KvPool
from ..harness.comparison import WrongWork
from ..harness.report import median, percentile, ratios
from .copy_case import WAIT_SECONDS

BLOCK_TOKENS = 64  # with it, a layer of a block has 64 KiB, the least size for a copy
RANGES = (2, 6)  # numbers of ranges of a block; the model has 6 layers
CACHED = {"1k": 1024, "3k": 3072, "8k": 8192}  # tokens
SUFFIXES = (32, 512)
# With LONG_SUFFIX tokens the gain is too small to measure, so cells have a third of the rounds.
LONG_SUFFIX, LONG_ROUNDS_SHARE = 512, 3
# Number of ranges (1 for whole blocks) → (seconds to the first token, processor seconds) per round.
Taken = dict[int, list[tuple[float, float]]]


def cell_name(cached: str, suffix: int, ranges: int) -> str:
    """Return the name of a ratio; above 1, ranges are faster than whole blocks."""
    return f"layer_ranges_{cached}_{suffix}_in_{ranges}"


def take_layer_ranges(cached: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the figures of every cell. Raises WrongWork if the methods' logits differ."""
    place = _Place(max(CACHED[name] for name in cached) + max(SUFFIXES))
    figures: dict[str, dict[str, Any]] = {}
    for name in cached:
        for suffix in SUFFIXES:
            prompt = _Prompt(place, CACHED[name], suffix)
            share = LONG_ROUNDS_SHARE if suffix >= LONG_SUFFIX else 1
            count = -(-rounds // share)
            alone = [(prompt.copy_seconds(), prompt.compute_seconds()) for _ in range(count)]
            copying = median([copy for copy, _ in alone])
            computing = median([compute for _, compute in alone])
            for ranges in RANGES:
                taken: Taken = {}
                for number in range(count):
                    _take_pair(prompt, ranges, taken, whole_first=bool(number % 2))
                whole, whole_cpu = zip(*taken[1], strict=True)
                in_ranges, ranges_cpu = zip(*taken[ranges], strict=True)
                gains = ratios(whole, in_ranges)
                figures[cell_name(name, suffix, ranges)] = {
                    "copy_seconds": copying,
                    "compute_seconds": computing,
                    "most_to_win": (copying + computing) / max(copying, computing),
                    "whole_seconds": median(whole),
                    "ranges_seconds": median(in_ranges),
                    "ratio": median(gains),
                    "ratio_quartiles": [percentile(gains, at) for at in (25.0, 75.0)],
                    "cpu_ratio": median(ratios(whole_cpu, ranges_cpu)),
                }
    return figures


def _take_pair(prompt: _Prompt, ranges: int, taken: Taken, *, whole_first: bool) -> None:
    logits = []
    for count in (1, ranges) if whole_first else (ranges, 1):
        busy, began = time.process_time(), time.perf_counter()
        logits.append(prompt.load_and_compute(count))
        seconds = time.perf_counter() - began
        taken.setdefault(count, []).append((seconds, time.process_time() - busy))
        prompt.forget()
    if not torch.equal(*logits):
        raise WrongWork("a prompt loaded by layers gave other logits than one loaded whole")


class _Place:
    """The embedded model with a longer context, a pool, and plain memory in place of a slab."""

    def __init__(self, num_tokens: int) -> None:
        self.spec = dataclasses.replace(load_model_spec(EMBEDDED_MODEL), max_positions=num_tokens)
        self.model = Decoder.load(EMBEDDED_MODEL, self.spec, num_tokens, torch.float32)
        layout = self.spec.layout(BLOCK_TOKENS, "float32")
        self.num_blocks = -(-num_tokens // BLOCK_TOKENS) + 1
        pool = KvPool(layout, self.num_blocks)
        self.pool = pool_pages(pool.tensor, layout.page_bytes)
        self.slab = np.empty_like(self.pool)
        noise = np.random.default_rng(1).standard_normal(layout.page_bytes // 4, np.float32)
        self.slab[:] = noise.view(np.uint8)
        self.planner = AttentionPlanner(layout, torch.float32, num_tokens)
        room, scale = self.planner.max_group_blocks, self.spec.attention_scale
        self.attention = PagedAttention(pool.tensor, layout, self.spec.num_heads, room, scale)


class _Prompt:
    """A prompt with `cached` tokens in the slab, and `suffix` further tokens to compute."""

    def __init__(self, place: _Place, cached: int, suffix: int) -> None:
        self._place = place
        self._cached, self._suffix = cached, suffix
        rng = np.random.default_rng(cached)
        blocks = 1 + rng.permutation(place.num_blocks - 1)[: -(-(cached + suffix) // BLOCK_TOKENS)]
        slots = rng.permutation(place.num_blocks)[: cached // BLOCK_TOKENS]
        self._moves = list(zip(slots.tolist(), blocks.tolist(), strict=False))
        self._table = BlockTable(1, place.num_blocks, BLOCK_TOKENS)
        self._table.array[0, : len(blocks)] = blocks

    def load_and_compute(self, num_ranges: int) -> torch.Tensor:
        """Load the cached tokens in `num_ranges` ranges, and compute; return the last logits."""
        here = [threading.Event() for _ in range(num_ranges)]
        thread = threading.Thread(target=self._copy, args=(here,))
        thread.start()
        layers = self._place.spec.num_layers // num_ranges
        if num_ranges == 1:
            _wait(here[0])
        logits = self._compute(_Waiting(self._place.attention, here, layers))
        thread.join()
        return logits

    def forget(self) -> None:
        """Fill the prompt's blocks in the pool with zeros, so that a layer that is read too early
        gives wrong logits."""
        for _, block in self._moves:
            self._place.pool[block] = 0

    def copy_seconds(self) -> float:
        began = time.perf_counter()
        self._copy([threading.Event()])
        return time.perf_counter() - began

    def compute_seconds(self) -> float:
        began = time.perf_counter()
        self._compute(_Waiting(self._place.attention, [], 0))
        return time.perf_counter() - began

    def _copy(self, here: Sequence[threading.Event]) -> None:
        """Copy range by range, lower layers of all blocks first, and set each range's event."""
        source, target = self._place.slab, self._place.pool
        size = source.shape[1] // len(here)
        for index, event in enumerate(here):
            part = slice(index * size, (index + 1) * size)
            for slot, block in self._moves:
                target[block, part] = source[slot, part]
            event.set()

    @torch.inference_mode()
    def _compute(self, attention: _Waiting) -> torch.Tensor:
        place, count = self._place, self._suffix
        positions = np.arange(self._cached, self._cached + count)
        row, computed = np.zeros(1, np.int64), np.array([self._cached])
        slots = self._table.slot_mapping(np.zeros(count, np.int64), positions)
        plan = place.planner.plan_attention(self._table, row, computed, np.array([count]), slots)
        hidden = place.model.forward(
            torch.arange(count),
            torch.from_numpy(positions),
            attention,
            plan,
            torch.tensor([count - 1]),
        )
        return place.model.logits(hidden)


class _Waiting:
    """Attention that waits for the range of its layer, if there are ranges."""

    def __init__(self, inner: PagedAttention, here: Sequence[threading.Event], layers: int) -> None:
        self._inner = inner
        self._here = here
        self._layers = layers  # layers of one range

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: AttentionPlan
    ) -> torch.Tensor:
        if self._here and layer % self._layers == 0:
            _wait(self._here[layer // self._layers])
        return self._inner(q, k, v, layer, plan)


def _wait(event: threading.Event) -> None:
    if not event.wait(WAIT_SECONDS):
        raise WrongWork(f"a range of layers did not come within {WAIT_SECONDS:g} s")
