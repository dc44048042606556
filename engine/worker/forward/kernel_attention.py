# SPDX-License-Identifier: Apache-2.0
"""Attention of a model by the kernels of `kernels/`: they write new K and V to the KV pool, then
compute attention over the pool. If the `rotate_write` kernel can run, it also rotates queries and
keys in the launch that writes K and V.

    rows of q, k, v   0 … num_decodes    one row for each request: paged decode
                      short chunks       several rows for each request: paged prefill
                      long chunks        paged prefill, or a library over gathered K and V

The kernels of a model are chosen once, when the attention is made. A plan's arguments are checked
in the first layer only, since the tensors have the same shapes in all layers. The attention code
does not read the values of tensors on the device. So attention never waits for the device, and a
CUDA graph can capture a step whose plan is over permanent buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.attention.gathered_prefill import GatheredPrefill
from ....kernels.attention.paged_decode import (
    choose_decode_kernel,
    paged_decode,
    run_decode,
    split_planner,
)
from ....kernels.attention.paged_prefill import choose_prefill_kernel, paged_prefill, run_prefill
from ....kernels.attention.split_plan import SplitPlan
from ....kernels.kernel_choice import AUTO, TRITON
from ....kernels.layer.rotate_write import (
    Rotary,
    choose_rotate_write,
    rotate_write,
    run_rotate_write,
)
from ....kernels.write.write_kv import choose_write_kernel, run_write, write_kv
from ....tiers.block import BlockLayout
from ...models.decoder import QkvAttention


@dataclass(frozen=True, slots=True)
class Decodes:
    """The requests of a step that have one new token each."""

    block_tables: Tensor  # int32 [requests, max_blocks]
    seq_lens: Tensor  # int32 [requests], including the new token; 0: padding, the result is zeros
    splits: SplitPlan | None = None  # None: split by the width of the table


class ChunkSize(NamedTuple):
    """The size of a chunk, in host memory."""

    rows: int  # new tokens
    length: int  # all tokens, including the new tokens


@dataclass(frozen=True, slots=True)
class Chunks:
    """The requests of a step that have several new tokens each."""

    block_tables: Tensor  # int32 [requests, max_blocks]
    seq_lens: Tensor  # int32 [requests], including the new tokens
    query_starts: Tensor  # int32 [requests + 1], from 0: rows after the decodes
    max_query_len: int
    sizes: Sequence[ChunkSize] = ()  # one for each request; empty in a recorded step


class LongChunk(NamedTuple):
    """A chunk whose attention a library (`GatheredPrefill`) computes."""

    rows: slice  # among the rows of the chunks
    table: Tensor  # int32 [max_blocks]
    length: int


class SplitChunks(NamedTuple):
    """The chunks of a plan: the first are for the prefill kernel, the last for a library."""

    by_kernel: Chunks | None
    num_rows: int  # rows of `by_kernel`
    by_library: Sequence[LongChunk]


@dataclass(slots=True)
class KernelPlan:
    """The attention plan of a step, for all layers of a cache group that have the same window."""

    slots: Tensor  # int64 [tokens]; -1: not written
    decodes: Decodes | None
    chunks: Chunks | None
    window: int | None = None  # positions that a token sees, including its own; None: all
    is_checked: bool = False  # whether the kernels have accepted these arguments
    split: SplitChunks | None = None  # made from `chunks` in the first layer


class Kernels(NamedTuple):
    """The names of the kernels of a model's attention; see `kernels/kernel_choice.py`."""

    write: str
    decode: str
    prefill: str
    rotate_write: str

    @property
    def can_record_decodes(self) -> bool:
        """Whether a CUDA graph can capture a step of decodes, that is, whether the step never waits
        for the device. Plain kernels copy lengths and slots to the host, which CUDA does not allow
        during a capture."""
        return self.write == self.decode == TRITON

    @property
    def can_record_chunks(self) -> bool:
        """Whether a CUDA graph can capture a step of chunks, that is, whether the step never waits
        for the device."""
        return self.write == self.prefill == TRITON


def choose_kernels(
    q: Tensor,
    kv: Tensor,
    scale: float,
    *,
    kv_scales: Tensor | None = None,
    kernel: str = AUTO,
    strict: bool = False,
) -> Kernels:
    """Choose the kernels for queries like `q` `[any, heads, head_dim]` and the pool `kv` of one
    layer. Raises KernelRefused like `choose_kernel`."""
    return Kernels(
        choose_write_kernel(q, kv, kernel=kernel, strict=strict),
        choose_decode_kernel(q, kv, scale, kernel=kernel, strict=strict),
        choose_prefill_kernel(q, kv, scale, kernel=kernel, strict=strict),
        choose_rotate_write(q, kv, kv_scales, kernel=kernel, strict=strict),
    )


def split_chunks(chunks: Chunks, gathered: GatheredPrefill | None, num_rows: int) -> SplitChunks:
    """Divide the chunks: as many of the last chunks as `gathered` can compute are for the library,
    the chunks before them for the kernel. The kernel's chunks have the first of the `num_rows`
    rows, and their `query_starts` begin at 0."""
    long: list[LongChunk] = []
    end, index = num_rows, len(chunks.sizes)
    while gathered is not None and index and gathered.takes(*chunks.sizes[index - 1]):
        index -= 1
        rows, length = chunks.sizes[index]
        long.append(LongChunk(slice(end - rows, end), chunks.block_tables[index], length))
        end -= rows
    if not long:
        return SplitChunks(chunks, num_rows, ())
    if not index:
        return SplitChunks(None, 0, long)
    sizes = chunks.sizes[:index]
    short = Chunks(
        chunks.block_tables[:index],
        chunks.seq_lens[:index],
        chunks.query_starts[: index + 1],
        max(size.rows for size in sizes),
        sizes,
    )
    return SplitChunks(short, end, long)


class KernelAttention:
    """Attention of one model over one KV pool, by kernels. `gathered` is the library that computes
    long chunks of layers without a window (None: the prefill kernel computes all chunks)."""

    def __init__(
        self,
        pool: Tensor,
        layout: BlockLayout,
        *,
        num_heads: int,
        dtype: torch.dtype,
        scale: float,
        softcap: float | None = None,
        kv_scales: Tensor | None = None,
        strict: bool = False,
        kernel: str = AUTO,
    ) -> None:
        """`pool` is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`. Queries have
        `num_heads` heads of type `dtype`. The attention scores are multiplied by `scale`, then
        bounded by `softcap` if it is given. `kv_scales` are the scales of a float8 pool. If a
        kernel cannot run, KernelRefused is raised under `strict`; otherwise the plain kernel in
        torch is used instead."""
        self.layers = [pool[:, layer] for layer in range(layout.num_layers)]
        self.scale, self.softcap = scale, softcap
        self.gathered: GatheredPrefill | None = None
        self._kv_scales = kv_scales
        kv = self.layers[0]
        # An example of the queries, with 0 rows.
        self.q = torch.empty((0, num_heads, layout.head_dim), dtype=dtype, device=pool.device)
        self.kernels = choose_kernels(
            self.q, kv, scale, kv_scales=kv_scales, kernel=kernel, strict=strict
        )
        self.split_planner = split_planner(self.q, kv, kv_scales, self.kernels.decode)

    @property
    def of_qkv(self) -> QkvAttention[KernelPlan] | None:
        """The function that also rotates queries and keys; None if its kernel cannot run."""
        return self._attend_qkv if self.kernels.rotate_write == TRITON else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: KernelPlan) -> Tensor:
        """Write `k` and `v` `[tokens, kv heads, head_dim]` to the pool, then compute attention for
        `q` `[tokens, heads, head_dim]`. Return `[tokens, heads * head_dim]`."""
        kv = self.layers[layer]
        if plan.is_checked:
            run_write(self.kernels.write, k, v, kv, plan.slots, self._kv_scales)
        else:
            write_kv(k, v, kv, plan.slots, kv_scales=self._kv_scales, kernel=self.kernels.write)
        return self._attend(q, kv, plan)

    def _attend_qkv(self, qkv: Tensor, rotary: Rotary, layer: int, plan: KernelPlan) -> Tensor:
        kv = self.layers[layer]
        if plan.is_checked:
            run_rotate_write(qkv, rotary, kv, plan.slots, self._kv_scales)
        else:
            rotate_write(qkv, rotary, kv, plan.slots, kv_scales=self._kv_scales)
        return self._attend(qkv[:, : -2 * kv.shape[3]], kv, plan)

    def _attend(self, q: Tensor, kv: Tensor, plan: KernelPlan) -> Tensor:
        """Compute attention. `q` must be rotated, and new K and V must be in the pool."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        first_chunk = 0 if plan.decodes is None else len(plan.decodes.seq_lens)
        if plan.decodes is not None:
            self._decode_by_kernel(q[:first_chunk], kv, plan.decodes, plan, out[:first_chunk])
        if plan.chunks is not None:
            self._prefill(q[first_chunk:], kv, plan.chunks, plan, out[first_chunk:])
        plan.is_checked = True
        return out.view(len(q), -1)

    def _decode_by_kernel(
        self, q: Tensor, kv: Tensor, decodes: Decodes, plan: KernelPlan, out: Tensor
    ) -> None:
        tables, lengths = decodes.block_tables, decodes.seq_lens
        if plan.is_checked:
            run_decode(
                self.kernels.decode, q, kv, tables, lengths, scale=self.scale,
                window=plan.window, softcap=self.softcap, kv_scales=self._kv_scales,
                num_splits=None, plan=decodes.splits, out=out,
            )  # fmt: skip
            return
        paged_decode(
            q, kv, tables, lengths, scale=self.scale, window=plan.window,
            softcap=self.softcap, kv_scales=self._kv_scales, plan=decodes.splits, out=out,
            kernel=self.kernels.decode,
        )  # fmt: skip

    def _prefill(
        self, q: Tensor, kv: Tensor, chunks: Chunks, plan: KernelPlan, out: Tensor
    ) -> None:
        if plan.split is None:
            gathered = self.gathered if plan.window is None else None
            plan.split = split_chunks(chunks, gathered, len(q))
        short, num_rows, long = plan.split
        if short is not None:
            self._prefill_by_kernel(q[:num_rows], kv, short, plan, out[:num_rows])
        for rows, table, length in long:
            assert self.gathered is not None
            self.gathered.run(q[rows], kv, table, length, self.scale, out[rows])

    def _prefill_by_kernel(
        self, q: Tensor, kv: Tensor, chunks: Chunks, plan: KernelPlan, out: Tensor
    ) -> None:
        tables, lengths, starts = chunks.block_tables, chunks.seq_lens, chunks.query_starts
        if plan.is_checked:
            run_prefill(
                self.kernels.prefill, q, kv, tables, lengths, starts,
                max_query_len=chunks.max_query_len, scale=self.scale, window=plan.window,
                softcap=self.softcap, kv_scales=self._kv_scales, out=out,
            )  # fmt: skip
            return
        paged_prefill(
            q, kv, tables, lengths, starts, max_query_len=chunks.max_query_len, scale=self.scale,
            window=plan.window, softcap=self.softcap, kv_scales=self._kv_scales, out=out,
            kernel=self.kernels.prefill,
        )  # fmt: skip
