# SPDX-License-Identifier: Apache-2.0
"""The kernels at the sizes that models have: on a device only, but for the judge itself."""

from __future__ import annotations

import pytest
import torch

from stratakv.kernels.copy.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from stratakv.kernels.kernel_choice import PLAIN, TRITON
from stratakv.kernels.write.write_kv import write_kv

from .decode_batches import Case, by_definition
from .large_batches import LargeBatch, assert_near, make_large_batch, truth

# New tokens of each request, and the tokens before them; before -1 are those of a length of 0.
DECODE = [(1, 4095), (1, 0), (1, 3000), (1, -1), (1, 8190), (1, 256)]
PREFILL = [(2048, 2048), (1, 4000), (513, 0), (0, 100), (300, 7000), (64, 1)]
HEADS = [(1, 64), (4, 64), (8, 64), (1, 128), (4, 128), (7, 128), (8, 128), (1, 256), (4, 256)]
SIZES = pytest.mark.parametrize(("group", "head_dim"), HEADS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
SCALES = pytest.mark.parametrize("scales", ["head", "token"])
LOOKS = pytest.mark.parametrize(
    "looks", [{"window": 1000}, {"softcap": 2.0}, {"window": 100, "softcap": 30.0}], ids=str
)
FREE_BYTES = 30e9  # a pool of 4.4 GB, copies to compare it with, and what comparing takes


def _small(device: torch.device, chunks: list[tuple[int, int]], **options: object) -> LargeBatch:
    return make_large_batch(device, chunks, head_dim=16, **options)


@pytest.mark.parametrize("scales", ["", "head", "token"])
@pytest.mark.parametrize("looks", [{}, {"window": 7, "softcap": 2.0}], ids=str)
def test_the_judge_agrees_with_the_definition(scales: str, looks: dict[str, object]) -> None:
    """The loop over requests and heads knows decode; a chunk is decode, token for token."""
    cpu = torch.device("cpu")
    decode = _small(cpu, [(1, 20), (1, 0), (1, 15), (1, 16)], scales=scales, **looks)
    tensors = (decode.q, decode.kv, decode.block_tables, decode.seq_lens)
    expected = truth(decode)
    torch.testing.assert_close(expected, by_definition(Case(*tensors, decode.options)))
    assert_near(decode.decode(PLAIN), expected)
    chunk = _small(cpu, [(9, 12), (0, 5), (3, 0)], scales=scales, **looks)
    expected = truth(chunk)
    rows = [(request, i) for request, (new, _) in enumerate(chunk.chunks) for i in range(new)]
    for row, (request, i) in enumerate(rows):
        length = torch.tensor([chunk.chunks[request][1] + i + 1], dtype=torch.int32)
        table = chunk.block_tables[request : request + 1]
        one = Case(chunk.q[row : row + 1], chunk.kv, table, length, chunk.options)
        torch.testing.assert_close(expected[row : row + 1], by_definition(one))
    assert_near(chunk.prefill(PLAIN), expected)


def test_the_judge_sees_one_token_too_many_among_hundreds(device: torch.device) -> None:
    batch = _small(device, [(1, 699)], num_splits=3)
    expected = truth(batch)
    assert_near(batch.decode(TRITON), expected)
    batch.chunks = [(1, 698)]
    with pytest.raises(AssertionError, match="elements are off"):
        assert_near(batch.decode(TRITON), truth(batch))
    chunk = _small(device, [(3, 297)], dtype=torch.float16)
    assert_near(chunk.prefill(TRITON), truth(chunk))


@pytest.mark.gpu
@SIZES
@DTYPES
def test_decode(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    batch = make_large_batch(device, DECODE, group=group, head_dim=head_dim, dtype=dtype)
    assert_near(batch.decode(TRITON), truth(batch))
    assert_near(batch.decode(TRITON, num_splits=1), truth(batch))


@pytest.mark.gpu
@SIZES
@SCALES
def test_decode_of_fp8(group: int, head_dim: int, scales: str, device: torch.device) -> None:
    batch = make_large_batch(device, DECODE, group=group, head_dim=head_dim, scales=scales)
    assert_near(batch.decode(TRITON), truth(batch))


@pytest.mark.gpu
@LOOKS
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_decode_that_sees_less(
    looks: dict[str, object], block_size: int, device: torch.device
) -> None:
    batch = make_large_batch(device, DECODE, block_size=block_size, **looks)
    assert_near(batch.decode(TRITON), truth(batch))


@pytest.mark.gpu
@SIZES
@DTYPES
def test_prefill(group: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    batch = make_large_batch(device, PREFILL, group=group, head_dim=head_dim, dtype=dtype)
    assert_near(batch.prefill(TRITON), truth(batch))


@pytest.mark.gpu
@SIZES
@SCALES
def test_prefill_of_fp8(group: int, head_dim: int, scales: str, device: torch.device) -> None:
    batch = make_large_batch(device, PREFILL, group=group, head_dim=head_dim, scales=scales)
    assert_near(batch.prefill(TRITON), truth(batch))


@pytest.mark.gpu
@LOOKS
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_prefill_that_sees_less(
    looks: dict[str, object], block_size: int, device: torch.device
) -> None:
    batch = make_large_batch(device, PREFILL, block_size=block_size, **looks)
    assert_near(batch.prefill(TRITON), truth(batch))


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_elements(device: torch.device) -> None:
    """Attention, writes and moves over 4.4 GB, and every byte of it is looked at."""
    free, _ = torch.cuda.mem_get_info()
    if free < FREE_BYTES:
        pytest.skip(f"needs {FREE_BYTES:.0e} free bytes on the device, and there are {free:.0e}")
    num_blocks = int(2.2e9) // (2 * 16 * 8 * 128)
    sizes = {"kv_heads": 8, "num_blocks": num_blocks}
    for chunks in (DECODE, PREFILL):
        batch = make_large_batch(device, chunks, **sizes)
        assert batch.kv.numel() > 2**31
        found = batch.decode(TRITON) if chunks is DECODE else batch.prefill(TRITON)
        assert_near(found, truth(batch))
    kv = batch.kv
    expected = kv.clone()
    k, v = torch.randn(2, 4, 8, 128, device=device).bfloat16()
    last = num_blocks * 16 - 1
    slots = torch.tensor([last, 0, -1, last // 2], device=device)
    write_kv(k, v, kv, slots, kernel=TRITON)
    write_kv(k, v, expected, slots, kernel=PLAIN)
    assert _same_bytes(kv, expected)
    sources = torch.tensor([num_blocks - 1, 0, num_blocks // 2], device=device)
    targets = torch.tensor([1, num_blocks - 2, 2], device=device)
    out = torch.empty_like(kv[:3])
    copy_blocks(kv, sources, targets, kernel=TRITON)
    expected[targets] = expected[sources]
    assert _same_bytes(kv, expected)
    gather_blocks(kv, targets, out, kernel=TRITON)
    assert _same_bytes(out, expected[sources])
    scatter_blocks(out.flip(0), kv, targets, kernel=TRITON)
    expected[targets] = out.flip(0)
    assert _same_bytes(kv, expected)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Block by block: NaN is not itself, and some of torch counts elements in 32 bits."""
    step = 4096
    return all(
        torch.equal(
            a[first : first + step].view(torch.int64), b[first : first + step].view(torch.int64)
        )
        for first in range(0, len(a), step)
    )
