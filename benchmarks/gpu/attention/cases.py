# SPDX-License-Identifier: Apache-2.0
"""Random batches for attention over the paged pool, for the sections of decode, prefill and peers.

If every request of a case has one new token, the case is a decode. As in the engine's pool, a block
contains several layers, one after the other. Each launch reads another layer, and all layers
together do not fit into the level-2 cache. Block ids are in random order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....kernels.attention.paged_decode import paged_decode, split_planner
from ....kernels.attention.paged_decode_plain import paged_decode_plain
from ....kernels.attention.paged_prefill import paged_prefill
from ....kernels.attention.paged_prefill_plain import paged_prefill_plain
from ....kernels.attention.split_plan import PlanArray, SplitPlan
from ....kernels.kernel_choice import TRITON
from ..section import Launch, Place, Row, Timing, check_close, time_launches

COLD_BYTES = 256 * 2**20  # least bytes of all layers: about four times the level-2 cache of an H200
MAX_LAYERS = 64
FP8 = torch.float8_e4m3fn
FP8_SPREAD = 64.0  # standard deviation of stored float8 values; scales are about its inverse
FILLED_AT_ONCE = 2**27  # random float32 elements that are converted to float8 at a time
# The largest difference of 16-bit results and references, in units of a row's root mean square.
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to measure. The defaults are the shape of the targets: 32 heads over 8 KV heads."""

    name: str
    chunks: tuple[tuple[int, int], ...]  # (new tokens, tokens before the new tokens) per request
    group: int = 4
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    scales: str = ""  # "head" or "token" for a float8 pool
    window: int | None = None
    softcap: float | None = None
    table_tokens: int = 0  # width of the block table in tokens, if it is wider than needed

    @property
    def is_decode(self) -> bool:
        return all(new == 1 for new, _ in self.chunks)

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def lengths(self) -> list[int]:
        return [new + before for new, before in self.chunks]

    @property
    def pool_dtype(self) -> torch.dtype:
        return FP8 if self.scales else self.dtype

    @property
    def token_bytes(self) -> int:
        """The bytes of K and V of one token in one layer, without scales."""
        return 2 * self.kv_heads * self.head_dim * self.pool_dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """The bytes of K and V, read once, which are nearly all the memory traffic of a decode."""
        reach = [
            before + new if self.window is None else min(before, self.window - 1) + new
            for new, before in self.chunks
        ]
        return sum(reach) * self.token_bytes

    @property
    def keys_seen(self) -> int:
        """The number of keys that each new token attends to, summed over the new tokens."""
        return sum(
            min(before + i + 1, self.window or before + i + 1)
            for new, before in self.chunks
            for i in range(new)
        )

    @property
    def flops(self) -> int:
        """The operations of the two matrix products, without masked keys; a multiplication and an
        addition are two operations."""
        return 4 * self.heads * self.head_dim * self.keys_seen

    def describe(self) -> Row:
        """Return the entries of a result row that describe the case."""
        return {
            "case": self.name,
            "requests": len(self.chunks),
            "new_tokens": [new for new, _ in self.chunks][:8],
            "longest": max(self.lengths),
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "pool": f"fp8, {self.scales} scales" if self.scales else "as q",
            "window": self.window,
            "softcap": self.softcap,
        }


def decode_case(name: str, requests: int, context: int, **options: object) -> Case:
    """Return a decode of `requests` requests with `context` tokens each, the new token included."""
    return Case(name=name, chunks=((1, context - 1),) * requests, **options)  # type: ignore[arg-type]


@dataclass(slots=True)
class Batch:
    """The tensors of a case. `layers[i]` has `scales[i]`; the remaining tensors are for all
    layers."""

    case: Case
    q: Tensor  # [tokens, heads, head_dim]
    layers: list[Tensor]  # each [num_blocks, 2, block_size, kv heads, head_dim]
    scales: list[Tensor | None]
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    plan: SplitPlan | None = None  # for a decode, as in the engine

    def run(self, kernel: str, layer: int = 0, out: Tensor | None = None) -> Tensor:
        """Return the attention of all new tokens over one layer, in `out` or in a new tensor."""
        tensors, options = self._arguments(layer)
        options |= {"kernel": kernel, "out": out}
        if self.case.is_decode:
            return paged_decode(*tensors, **options, plan=self.plan)
        longest = max(new for new, _ in self.case.chunks)
        return paged_prefill(*tensors, self.query_starts, max_query_len=longest, **options)

    def plan_splits(self) -> None:
        """Plan the splits of a decode from the lengths, like the engine in each step."""
        planner = split_planner(self.q, self.layers[0], self.scales[0], TRITON)
        if self.case.is_decode and planner is not None:
            lengths = np.array(self.case.lengths)
            words = PlanArray(planner, len(lengths))
            array = np.zeros(planner.num_words(len(lengths)), np.int32)
            words.lay_down(array, planner.tiles(lengths, self.case.window))
            self.plan = words.view_plan(torch.from_numpy(array).to(self.q.device), len(lengths))

    def launches(self, kernel: str) -> list[Launch]:
        return [partial(self.run, kernel, layer) for layer in range(len(self.layers))]

    def reference(self) -> Tensor:
        """Return the expected result of `run` for the first layer, computed in plain PyTorch."""
        out = torch.empty_like(self.q)
        tensors, options = self._arguments(0)
        if self.case.is_decode:
            return paged_decode_plain(*tensors, **options, out=out)
        return paged_prefill_plain(*tensors, self.query_starts, **options, out=out)

    def _arguments(self, layer: int) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any]:
        case = self.case
        return (self.q, self.layers[layer], self.block_tables, self.seq_lens), {
            "scale": case.scale,
            "window": case.window,
            "softcap": case.softcap,
            "kv_scales": self.scales[layer],
        }


def make_batch(place: Place, case: Case, layers: int | None = None) -> Batch:
    """Return the tensors of a case, equal in every call on a device. For a `layers` of None, there
    are so many layers that the level-2 cache has no data of a launch."""
    generator = torch.Generator(device=place.device)
    generator.manual_seed(zlib.crc32(case.name.encode()))
    widths = [-(-length // case.block_size) for length in case.lengths]
    num_blocks = sum(widths)
    layers = layers or num_layers(place, case.read_bytes)
    pool = _random_pool(place, case, (num_blocks, layers), generator)
    starts = [0, *accumulate(new for new, _ in case.chunks)]
    integers = partial(torch.tensor, dtype=torch.int32, device=place.device)
    batch = Batch(
        case=case,
        q=torch.randn(
            (starts[-1], case.heads, case.head_dim),
            generator=generator,
            device=place.device,
            dtype=case.dtype,
        ),
        layers=[pool[:, layer] for layer in range(layers)],
        scales=_random_scales(place, case, num_blocks, layers, generator),
        block_tables=_scattered_tables(
            place, widths, case.table_tokens // case.block_size, generator
        ),
        seq_lens=integers(case.lengths),
        query_starts=integers(starts),
    )
    if place.kernel == TRITON:
        batch.plan_splits()
    return batch


def num_layers(place: Place, layer_bytes: int, most: int = MAX_LAYERS) -> int:
    """Return how many layers, at most `most`, exceed the level-2 cache; 2 in a rehearsal."""
    if place.is_rehearsal:
        return 2
    return max(1, min(most, -(-COLD_BYTES // layer_bytes)))


def check_attention(what: str, got: Tensor, expected: Tensor) -> None:
    """Compare rows, each in units of the row's root mean square, because attention over long
    contexts has small values. Raises WrongResult."""
    right = expected.float()
    size = right.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
    if got.shape == expected.shape:
        got, right = got.float() / size, right / size
    check_close(what, got, right, absolute=TOLERANCE)


def time_checked(place: Place, batch: Batch, expected: Tensor, *, rounds: int = 7) -> Timing:
    """Compare the result with `expected`, then time a launch in seconds. Raises WrongResult."""
    check_attention(batch.case.name, batch.run(place.kernel), expected)
    return time_launches(place, batch.launches(place.kernel), rounds=rounds)


def _random_pool(
    place: Place, case: Case, blocks_and_layers: tuple[int, int], generator: torch.Generator
) -> Tensor:
    shape = (*blocks_and_layers, 2, case.block_size, case.kv_heads, case.head_dim)
    pool = torch.empty(shape, dtype=case.pool_dtype, device=place.device)
    if not case.scales:
        return pool.normal_(generator=generator)
    largest = torch.finfo(FP8).max
    rows = max(1, FILLED_AT_ONCE // pool[0].numel())
    for part in torch.split(pool, rows):
        wide = torch.randn(part.shape, generator=generator, device=place.device)
        part.copy_((wide * FP8_SPREAD).clamp(-largest, largest))
    return pool


def _random_scales(
    place: Place, case: Case, num_blocks: int, layers: int, generator: torch.Generator
) -> list[Tensor | None]:
    """Return random scales, each within a fifth of 1 / FP8_SPREAD."""
    if not case.scales:
        return [None] * layers
    shape: tuple[int, ...] = (layers, 2, case.kv_heads)
    if case.scales == "token":
        shape = (num_blocks, layers, 2, case.block_size, case.kv_heads)
    drawn = torch.rand(shape, generator=generator, device=place.device)
    drawn = (0.8 + 0.4 * drawn) / FP8_SPREAD
    of_layers = drawn.unbind(1 if case.scales == "token" else 0)
    return list(of_layers)


def _scattered_tables(
    place: Place, widths: Sequence[int], least: int, generator: torch.Generator
) -> Tensor:
    ids = torch.randperm(sum(widths), generator=generator, device=place.device, dtype=torch.int32)
    tables = ids.new_zeros(len(widths), max(least, *widths))
    for row, own in zip(tables, torch.split(ids, list(widths)), strict=True):
        row[: len(own)] = own
    return tables
