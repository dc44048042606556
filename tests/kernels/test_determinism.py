# SPDX-License-Identifier: Apache-2.0
"""The same call gives the same bits, and a request's bits do not depend on who is beside it.

What holds: for decode with a fixed number of splits, whatever the batch and however wide the table
is; for prefill, among calls with the same `max_query_len`. Where the splits are left to the kernel,
they follow from the size of the batch and the width of the table, and only the same call gives the
same bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stratakv.kernels.kernel_choice import TRITON

from .conftest import ON_GPU
from .large_batches import LargeBatch, make_large_batch

pytestmark = pytest.mark.slow

# Of the device what it is bought for; of the interpreter what it can do in a moment.
# There every row of the tests beside others is computed three times, which shows more than twice.
LENGTHS = [4000, 1, 2049, 513, 17] if ON_GPU else [130, 1, 70, 65, 17]
CHUNKS = [(900, 3000), (1, 500), (64, 0), (300, 20)] if ON_GPU else [(40, 50), (1, 30), (9, 0)]
HEAD_DIM = 128 if ON_GPU else 16
KV_HEADS = 2 if ON_GPU else 1
POOLS = pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float16, ""),
        (torch.bfloat16, ""),
        (torch.bfloat16, "head"),
        (torch.bfloat16, "token"),
    ],
    ids=["fp16", "bf16", "fp8-head", "fp8-token"],
)
REPEATS = 5 if ON_GPU else 1


def _decode_batch(device: torch.device, dtype: torch.dtype, scales: str) -> LargeBatch:
    chunks = [(1, length - 1) for length in LENGTHS]
    return _make_batch(device, chunks, dtype, scales)


def _make_batch(
    device: torch.device, chunks: list[tuple[int, int]], dtype: torch.dtype, scales: str
) -> LargeBatch:
    return make_large_batch(
        device, chunks, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, scales=scales
    )


def _part(batch: LargeBatch, requests: list[int], more_columns: int = 0) -> LargeBatch:
    """Some of the requests, in this order, in tables with columns that nobody uses."""
    starts = batch.query_starts.tolist()
    rows = [row for i in requests for row in range(starts[i], starts[i + 1])]
    tables = batch.block_tables[requests]
    chunks = [batch.chunks[i] for i in requests]
    lengths = torch.tensor([0, *(new for new, _ in chunks)]).cumsum(0)
    return replace(
        batch,
        q=batch.q[rows],
        block_tables=torch.nn.functional.pad(tables, (0, more_columns)),
        seq_lens=batch.seq_lens[requests],
        query_starts=lengths.to(batch.q.device, torch.int32),
        chunks=chunks,
    )


@POOLS
@pytest.mark.parametrize("num_splits", [None, 1, 3] if ON_GPU else [None])
def test_decode_twice(
    dtype: torch.dtype, scales: str, num_splits: int | None, device: torch.device
) -> None:
    batch = _decode_batch(device, dtype, scales)
    first = batch.decode(TRITON, num_splits=num_splits)
    for _ in range(REPEATS):
        assert torch.equal(batch.decode(TRITON, num_splits=num_splits), first)


@POOLS
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_of_one_request_alone_and_among_others(
    dtype: torch.dtype, scales: str, num_splits: int, device: torch.device
) -> None:
    batch = _decode_batch(device, dtype, scales)
    together = batch.decode(TRITON, num_splits=num_splits)
    for request in range(len(LENGTHS)):
        alone = _part(batch, [request], more_columns=16)
        assert torch.equal(alone.decode(TRITON, num_splits=num_splits)[0], together[request])
    turned = _part(batch, [4, 2, 0, 1, 3])
    assert torch.equal(turned.decode(TRITON, num_splits=num_splits), together[[4, 2, 0, 1, 3]])


@POOLS
def test_prefill_twice(dtype: torch.dtype, scales: str, device: torch.device) -> None:
    batch = _make_batch(device, CHUNKS, dtype, scales)
    first = batch.prefill(TRITON)
    for _ in range(REPEATS):
        assert torch.equal(batch.prefill(TRITON), first)


@POOLS
def test_prefill_of_one_request_alone_and_among_others(
    dtype: torch.dtype, scales: str, device: torch.device
) -> None:
    batch = _make_batch(device, CHUNKS, dtype, scales)
    most = max(new for new, _ in CHUNKS)
    together = batch.prefill(TRITON)
    starts = batch.query_starts.tolist()
    for request in range(len(CHUNKS)):
        alone = _part(batch, [request], more_columns=16).prefill(TRITON, max_query_len=most)
        assert torch.equal(alone, together[starts[request] : starts[request + 1]])
    turned = _part(batch, list(reversed(range(len(CHUNKS)))))
    pieces = [together[starts[i] : starts[i + 1]] for i in reversed(range(len(CHUNKS)))]
    assert torch.equal(turned.prefill(TRITON, max_query_len=most), torch.cat(pieces))
