# SPDX-License-Identifier: Apache-2.0
"""Captured once in a CUDA graph, replayed over other lengths, tables and slots: right every time.

A device only. What changes between replays is in the captured buffers, as in an engine's step; the
plain twin then runs over the same buffers. Attention is compared within its rounding, bytes are
compared as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stratakv.kernels.copy.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from stratakv.kernels.kernel_choice import PLAIN, TRITON
from stratakv.kernels.pool_checks import FP8
from stratakv.kernels.write.write_kv import write_kv

from .large_batches import LargeBatch, assert_near, make_large_batch, nan_pool, truth

pytestmark = pytest.mark.gpu

SCALES = pytest.mark.parametrize("scales", ["", "head", "token"])


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run`, first outside, where its kernels are compiled, and then into a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def change(batch: LargeBatch, chunks: list[tuple[int, int]], order: list[int]) -> None:
    """Other chunks, and another request's blocks for each, in the buffers that there are."""
    batch.chunks = chunks
    starts = [0]
    for new, _ in chunks:
        starts.append(starts[-1] + new)
    lengths = [new + before for new, before in chunks]
    batch.seq_lens.copy_(torch.tensor(lengths))
    batch.query_starts.copy_(torch.tensor(starts))
    batch.block_tables.copy_(batch.block_tables[order].clone())
    batch.q.copy_(torch.randn(batch.q.shape))


@SCALES
@pytest.mark.parametrize("window", [None, 200])
def test_decode(scales: str, window: int | None, device: torch.device) -> None:
    batch = make_large_batch(device, [(1, 1999)] * 4, scales=scales, window=window)
    out = torch.empty_like(batch.q)
    graph = capture(lambda: batch.decode(TRITON, out=out))
    for lengths in ([2000, 2000, 2000, 2000], [1, 17, 1999, 640], [1, 1, 1, 1], [0, 64, 0, 65]):
        change(batch, [(1, length - 1) for length in lengths], [1, 2, 3, 0])
        out.fill_(float("nan"))
        graph.replay()
        assert_near(out, truth(batch))
        assert_near(out, batch.decode(PLAIN).double())


@SCALES
@pytest.mark.parametrize("window", [None, 200])
def test_prefill(scales: str, window: int | None, device: torch.device) -> None:
    batch = make_large_batch(device, [(200, 800)] * 3, scales=scales, window=window)
    out = torch.empty_like(batch.q)
    graph = capture(lambda: batch.prefill(TRITON, out=out, max_query_len=600))
    for chunks in (
        [(200, 800)] * 3,
        [(600, 0), (0, 1000), (0, 0)],
        [(1, 999), (1, 0), (300, 100)],
        [(64, 65), (63, 1), (17, 900)],
    ):
        change(batch, chunks, [1, 2, 0])
        out.fill_(float("nan"))
        graph.replay()
        rows = sum(new for new, _ in chunks)
        assert_near(out[:rows], truth(batch)[:rows])
        assert bool(out[rows:].isnan().all()), "rows of nobody were written"
        plain = batch.prefill(PLAIN, max_query_len=600)
        assert_near(out[:rows], plain[:rows].double())


@SCALES
def test_write(scales: str, device: torch.device) -> None:
    dtype = FP8 if scales else torch.bfloat16
    kv = nan_pool((8, 2, 16, 2, 128), dtype, device)
    sizes = (2, 2) if scales == "head" else kv.shape[:4]
    kv_scales = torch.full(sizes, 0.01, device=device) if scales else None
    k, v = torch.empty(2, 40, 2, 128, dtype=torch.bfloat16, device=device)
    slots = torch.full((40,), -1, device=device)
    graph = capture(lambda: write_kv(k, v, kv, slots, kv_scales=kv_scales, kernel=TRITON))
    for used in (40, 3, 0, 17):
        k.copy_(torch.randn(k.shape))
        v.copy_(torch.randn(v.shape))
        slots.copy_(torch.randperm(8 * 16)[:40])
        slots[used:] = -1
        wanted = kv.clone(), None if kv_scales is None else kv_scales.clone()
        write_kv(k, v, wanted[0], slots, kv_scales=wanted[1], kernel=PLAIN)
        graph.replay()
        assert torch.equal(kv.view(torch.uint8), wanted[0].view(torch.uint8))
        assert kv_scales is None or torch.equal(kv_scales, wanted[1])


@pytest.mark.parametrize("where", ["device", "page-locked"])
def test_copies(where: str, device: torch.device) -> None:
    """Out of the pool, back into it, and within it, in one graph."""
    pool = torch.randn(32, 5000, device=device)
    buffer = torch.zeros(4, 5000, device=device if where == "device" else "cpu")
    buffer = buffer if where == "device" else buffer.pin_memory()
    out_of, into, sources, targets = torch.full((4, 4), -1, device=device)

    def move(memory: torch.Tensor, rows: torch.Tensor, kernel: str) -> None:
        gather_blocks(memory, out_of, rows, kernel=kernel)
        scatter_blocks(rows, memory, into, kernel=kernel)
        copy_blocks(memory, sources, targets, kernel=kernel)

    graph = capture(lambda: move(pool, buffer, TRITON))
    for used in (4, 1, 0, 3):
        chosen = torch.randperm(32)[:16].view(4, 4)
        chosen[:, used:] = -1
        for ids, values in zip((out_of, into, sources, targets), chosen, strict=True):
            ids.copy_(values)
        expected, rows = pool.clone(), buffer.clone()
        move(expected, rows, PLAIN)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(pool, expected) and torch.equal(buffer, rows)
