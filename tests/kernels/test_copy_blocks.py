# SPDX-License-Identifier: Apache-2.0
"""Block moves: every byte of pool and buffer is as a loop over entries says.

Pools are views into larger memory that is compared as a whole, so a byte beside a block that
changes is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stratakv.kernels.copy import copy_blocks_plain
from stratakv.kernels.copy.copy_blocks import (
    MAX_BLOCK_BYTES,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
    transfer_blocks,
)
from stratakv.kernels.copy.copy_blocks_launch import CHUNK_WORDS
from stratakv.kernels.kernel_choice import AUTO, PLAIN, TRITON, KernelRefused

KERNELS = pytest.mark.parametrize("kernel", [PLAIN, TRITON])
# layers, 2, block_size, num_kv_heads, head_dim
BLOCK = (3, 2, 16, 2, 64)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
# Bytes of a block, bytes to the next one, bytes before the first: every width of word, and blocks
# that are less than a chunk, just one, and several with a rest.
PLACES = [
    (1, 1, 0),
    (7, 9, 3),
    (7, 8, 0),
    (8, 12, 0),
    (24, 32, 16),
    (24, 32, 4),
    (12, 12, 2),
    (CHUNK_WORDS * 8, CHUNK_WORDS * 8, 0),
    (CHUNK_WORDS * 20 + 8, CHUNK_WORDS * 20 + 8, 8),
    (CHUNK_WORDS * 2 + 3, CHUNK_WORDS * 2 + 4, 1),
]


def random_bytes(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def random_pool(
    num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return random_bytes(num_blocks * size, device).view(dtype).view(num_blocks, *shape)


def ids(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_on_write(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    pool = random_pool(9, BLOCK, dtype, device)
    expected = pool.clone()
    sources, targets = [8, 0, 3, 3, -1, 2], [1, 7, 5, 6, 4, -1]
    for source, target in list(zip(sources, targets, strict=True))[:4]:
        expected[target] = pool[source]
    copy_blocks(pool, ids(sources, device), ids(targets, device), kernel=kernel)
    assert torch.equal(as_bytes(pool), as_bytes(expected))


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_and_in_again(kernel: str, dtype: torch.dtype, device: torch.device) -> None:
    pool = random_pool(6, BLOCK, dtype, device)
    block_ids = [5, 0, -1, 3, 5]
    out = random_pool(5, (pool[0].numel(),), dtype, device)
    expected = out.clone()
    for row, block_id in enumerate(block_ids):
        if block_id >= 0:
            expected[row] = pool[block_id].flatten()
    gather_blocks(pool, ids(block_ids, device), out, kernel=kernel)
    assert torch.equal(as_bytes(out), as_bytes(expected))
    other = random_pool(6, BLOCK, dtype, device)
    expected = other.clone()
    for row, block_id in ((0, 4), (1, 1), (3, 0)):
        expected[block_id] = out[row].view(BLOCK)
    scatter_blocks(out, other, ids([4, 1, -1, 0, -1], device), kernel=kernel)
    assert torch.equal(as_bytes(other), as_bytes(expected))


@KERNELS
@pytest.mark.parametrize(("size", "stride", "start"), PLACES)
@pytest.mark.parametrize("max_programs", [1, 12])
def test_blocks_of_any_size_and_place(
    kernel: str, size: int, stride: int, start: int, max_programs: int, device: torch.device
) -> None:
    memory = random_bytes(start + 6 * stride, device)
    pool = torch.as_strided(memory, (6, size), (stride, 1), start)
    expected = memory.clone()
    for source, target in ((5, 0), (2, 4)):
        first = start + target * stride
        expected[first : first + size] = pool[source]
    copy_blocks(
        pool,
        ids([5, 2], device),
        ids([0, 4], device),
        max_programs=max_programs,
        kernel=kernel,
    )
    assert torch.equal(memory, expected)


@KERNELS
def test_a_pool_and_a_buffer_with_other_distances(kernel: str, device: torch.device) -> None:
    memory = random_bytes(4 * 40, device)
    pool = memory.view(4, 40)[:, :24]
    expected = pool[[3, 1]]
    out = torch.zeros(2, 24, dtype=torch.uint8, device=device)
    gather_blocks(pool, ids([3, 1], device), out, kernel=kernel)
    assert torch.equal(out, expected)
    expected = memory.clone()
    expected[:24], expected[80:104] = out[0], out[1]
    scatter_blocks(out, pool, ids([0, 2], device), kernel=kernel)
    assert torch.equal(memory, expected)


@KERNELS
def test_memory_that_begins_between_two_words(kernel: str, device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("CUDA gives no memory that begins so")
    owner = bytearray(128)
    address = torch.frombuffer(owner, dtype=torch.uint8).data_ptr()
    memory = torch.frombuffer(owner, dtype=torch.uint8, offset=(4 - address) % 8)
    pool = memory[4:100].view(4, 24)
    assert pool.data_ptr() % 8 == 0 and pool.storage_offset() == 4
    pool[:] = random_bytes(96, device).view(4, 24)
    expected = pool[1].clone()
    copy_blocks(pool, ids([1], device), ids([2], device), kernel=kernel)
    assert torch.equal(pool[2], expected)


@KERNELS
def test_blocks_past_2_to_the_31_elements(kernel: str, device: torch.device) -> None:
    # Memory that nobody writes is not there. Blocks of an odd size are moved in single bytes.
    size = 4099
    num_blocks = 2**31 // size + 4
    pool = torch.empty(num_blocks, size, dtype=torch.uint8, device=device)
    rows = random_bytes(2 * size, device).view(2, size)
    pool[-3:], pool[:4] = 7, 7
    last, before = num_blocks - 1, num_blocks - 2
    scatter_blocks(rows, pool, ids([last, 1], device), kernel=kernel)
    copy_blocks(pool, ids([last, 1], device), ids([2, before], device), kernel=kernel)
    out = torch.zeros_like(rows)
    gather_blocks(pool, ids([before, 2], device), out, kernel=kernel)
    assert torch.equal(out, rows.flip(0))
    assert torch.equal(pool[-1], rows[0]) and torch.equal(pool[1], rows[1])
    assert bool((pool[-3] == 7).all())
    assert bool((pool[0] == 7).all()) and bool((pool[3] == 7).all())


@KERNELS
def test_a_buffer_past_2_to_the_31_elements(kernel: str, device: torch.device) -> None:
    memory = torch.empty(2**31 + 64, dtype=torch.uint8, device=device)
    rows = torch.as_strided(memory, (3, 63), (2**30, 1))
    pool = random_bytes(3 * 63, device).view(3, 63)
    block_ids = ids([2, 0, 1], device)
    gather_blocks(pool, block_ids, rows, kernel=kernel)
    assert torch.equal(rows, pool[[2, 0, 1]])
    other = torch.zeros_like(pool)
    scatter_blocks(rows, other, block_ids, kernel=kernel)
    assert torch.equal(other, pool)


def test_the_plain_kernel_moves_a_few_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bytes_at_once in (1, 64, 150, 320):
        monkeypatch.setattr(copy_blocks_plain, "BYTES_AT_ONCE", bytes_at_once)
        pool = random_pool(10, (16,), torch.float32, device)
        expected = torch.cat([pool[:5], pool[:5]])
        copy_blocks(pool, ids(range(5), device), ids(range(5, 10), device), kernel=PLAIN)
        assert torch.equal(as_bytes(pool), as_bytes(expected))


@KERNELS
def test_no_ids_move_nothing(kernel: str, device: torch.device) -> None:
    pool = random_pool(2, (8,), torch.float32, device)
    before = as_bytes(pool).clone()
    none, row = ids([], device), torch.empty(0, 8, device=device)
    copy_blocks(pool, none, none, kernel=kernel)
    gather_blocks(pool, none, row, kernel=kernel)
    scatter_blocks(row, pool, none, kernel=kernel)
    copy_blocks(pool, ids([-1, 0], device), ids([1, -1], device), kernel=kernel)
    assert torch.equal(as_bytes(pool), before)


@pytest.mark.parametrize("outside", [4, 2**40, -2])
def test_ids_beyond_the_pool(outside: int, device: torch.device) -> None:
    pool = random_pool(4, (8,), torch.float32, device)
    before, expected = pool.clone(), pool.clone()
    row = random_pool(2, (8,), torch.float32, device)
    inside, beyond = ids([0, 1], device), ids([3, outside], device)
    with pytest.raises(KernelRefused, match=f"target ids from 0 to 3 or -1, got {outside}"):
        copy_blocks(pool, inside, beyond, kernel=PLAIN)
    with pytest.raises(KernelRefused, match=f"source ids from 0 to 3 or -1, got {outside}"):
        gather_blocks(pool, beyond, row, kernel=PLAIN)
    assert torch.equal(as_bytes(pool), as_bytes(before))
    copy_blocks(pool, inside, beyond, kernel=TRITON)
    expected[3] = before[0]
    assert torch.equal(as_bytes(pool), as_bytes(expected))
    expected_row = row.clone()
    expected_row[0] = pool[3]
    gather_blocks(pool, beyond, row, kernel=TRITON)
    assert torch.equal(as_bytes(row), as_bytes(expected_row))


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0, 1], [3, 3], "every target once, got block 3 twice"),
        ([0, 1], [1, 2], "no block to be read and written, got block 1"),
        ([2], [2], "no block to be read and written, got block 2"),
    ],
)
def test_lists_whose_order_matters(
    sources: list[int], targets: list[int], message: str, device: torch.device
) -> None:
    pool = random_pool(4, (8,), torch.float32, device)
    before = as_bytes(pool).clone()
    with pytest.raises(KernelRefused, match=message):
        copy_blocks(pool, ids(sources, device), ids(targets, device), kernel=PLAIN)
    assert torch.equal(as_bytes(pool), before)


def test_a_buffer_counts_its_own_blocks(device: torch.device) -> None:
    # Block 1 of the pool and row 1 of the buffer are not the same block.
    pool, row = (random_pool(2, (8,), torch.float32, device) for _ in range(2))
    gather_blocks(pool, ids([1, 0], device), row, kernel=PLAIN)
    assert torch.equal(as_bytes(row), as_bytes(pool.flip(0)))


POOL = torch.zeros(4, 2, 8)
IDS = torch.arange(2)


@pytest.mark.parametrize(
    ("pool", "sources", "targets", "message"),
    [
        (POOL, IDS.int(), IDS, r"int64 block ids \[n\], got torch.int32 \[2\]"),
        (POOL, IDS, IDS.reshape(1, 2), r"got torch.int64 \[1, 2\]"),
        (POOL, IDS.repeat(2)[::2], IDS, r"contiguous int64.*strides \(2,\)"),
        (POOL, IDS, IDS.to("meta"), "on the pool's device cpu, got meta"),
        (POOL, IDS, IDS[:1], r"as many targets as sources, got \[2, 1\]"),
        (POOL[:, 0, 0], IDS, IDS, r"expected blocks \[num_blocks, ...\].*got \[4\]"),
        (
            POOL.transpose(1, 2),
            IDS,
            IDS,
            r"contiguous and none in another, got \[4, 8, 2\] with strides \(16, 1, 8\)",
        ),
        (
            POOL[:, :, :4],
            IDS,
            IDS,
            r"contiguous and none in another, got \[4, 2, 4\] with strides \(16, 8, 1\)",
        ),
        (POOL[:, :0], IDS, IDS, f"of 1 to {MAX_BLOCK_BYTES} bytes, got 0"),
        (POOL[:1].expand(4, 2, 8), IDS, IDS, r"none in another.*strides \(0, 8, 1\)"),
        (POOL[:, :1].expand(4, 2, 8), IDS, IDS, r"each contiguous.*strides \(16, 0, 1\)"),
        (torch.empty(2, 2**29, device="meta"), IDS.to("meta"), IDS.to("meta"), "got 2147483648"),
    ],
)
def test_refused(
    pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, message: str
) -> None:
    with pytest.raises(KernelRefused, match=message):
        copy_blocks(pool, sources, targets)


def test_refused_buffers() -> None:
    with pytest.raises(KernelRefused, match="a buffer of 2 blocks, one for each id, got 3"):
        gather_blocks(POOL, IDS, torch.zeros(3, 16))
    with pytest.raises(KernelRefused, match="the same size on both sides, got 60 and 64 bytes"):
        scatter_blocks(torch.zeros(2, 15), POOL, IDS)
    with pytest.raises(KernelRefused, match="max_programs of 1 or more, got 0"):
        gather_blocks(POOL, IDS, torch.zeros(2, 16), max_programs=0)
    with pytest.raises(KernelRefused, match="runs on cpu and cannot reach meta memory that is not"):
        gather_blocks(POOL, IDS, torch.zeros(2, 16, device="meta"), kernel=TRITON)


@pytest.mark.parametrize(("max_programs", "programs"), [(1, 1), (12, 12), (1024, 15)])
def test_a_move_takes_no_more_programs_than_it_may(
    max_programs: int, programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stratakv.kernels.copy import copy_blocks_triton

    grids = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(copy_blocks_triton, "move_blocks_kernel", Recorder())
    # Five blocks of two chunks and a rest.
    pool = torch.zeros(10, CHUNK_WORDS * 2 + 2, dtype=torch.int64, device=device)
    sources, targets = ids(range(5), device), ids(range(5, 10), device)
    copy_blocks(pool, sources, targets, max_programs=max_programs, kernel=TRITON)
    assert grids == [(programs,)]


@pytest.mark.skipif(
    torch.cuda.device_count() == 1,
    reason="torch looks for the device behind a tensor without memory, and there is no second",
)
def test_another_device_is_out_of_reach() -> None:
    # Tensors without memory, so that there may be as many devices as the test wants.
    with FakeTensorMode():
        pool = torch.empty(4, 8, device="cuda:0")
        block_ids = torch.empty(2, dtype=torch.int64, device="cuda:0")
        row = torch.empty(2, 8, device="cuda:1")
        for wish in ({"kernel": TRITON}, {"strict": True}):
            with pytest.raises(KernelRefused, match="runs on cuda:0 and cannot reach cuda:1"):
                gather_blocks(pool, block_ids, row, **wish)
            with pytest.raises(KernelRefused, match="runs on cuda:0 and cannot reach cuda:1"):
                scatter_blocks(row, pool, block_ids, **wish)


@pytest.mark.gpu
def test_buffers_in_cpu_memory(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter has no device whose kernels could reach CPU memory")
    pool = random_pool(4, BLOCK, torch.float16, device)
    block_ids = ids([3, 1], device)
    pinned = torch.empty(2, *BLOCK, dtype=torch.float16).pin_memory()
    pageable = torch.empty_like(pinned)
    gather_blocks(pool, block_ids, pinned, kernel=TRITON, max_programs=12)
    with pytest.raises(KernelRefused, match="cannot reach cpu memory that is not page-locked"):
        gather_blocks(pool, block_ids, pageable, kernel=TRITON)
    gather_blocks(pool, block_ids, pageable, kernel=AUTO)
    torch.cuda.synchronize()
    assert torch.equal(as_bytes(pinned), as_bytes(pool[block_ids]))
    assert torch.equal(as_bytes(pageable), as_bytes(pinned))
    for data in (pinned, pageable):
        other = torch.zeros_like(pool)
        scatter_blocks(data, other, block_ids)
        assert torch.equal(as_bytes(other[block_ids]), as_bytes(pinned))


@KERNELS
def test_blocks_go_from_one_tensor_to_another(kernel: str, device: torch.device) -> None:
    """The same numbers may stand on both sides: the tensors are two."""
    source = torch.randint(0, 256, (5, 24), dtype=torch.uint8, device=device)
    slots = torch.zeros(6, 32, dtype=torch.uint8, device=device)
    target = slots[:, :24]  # slots that are longer than blocks
    source_ids = torch.tensor([4, 0, 2, -1], device=device)
    target_ids = torch.tensor([0, 2, 5, 1], device=device)
    transfer_blocks(source, target, source_ids, target_ids, kernel=kernel)
    expected = torch.zeros_like(slots)
    expected[[0, 2, 5], :24] = source[[4, 0, 2]]
    assert torch.equal(slots, expected)
