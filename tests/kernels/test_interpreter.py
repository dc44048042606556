# SPDX-License-Identifier: Apache-2.0
"""The test kit itself: bf16 and fp8 come out right, and each planted fault is caught.

Truth is float64 or torch's own rounding. A kit that let one of these faults pass would make every
other test of the kernels worth less, so each guard is shown to fire, and not to fire beside it.
"""

from __future__ import annotations

import mmap
import os

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from . import launch_guard

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests the interpreter: TRITON_INTERPRET=1"
)

SIZE = 64
PAST_2_31 = 2**31 + 2**20


@triton.jit
def _arithmetic(a, b, out, size: tl.constexpr):
    lane = tl.arange(0, size)
    x = tl.load(a + lane)
    y = tl.load(b + lane)
    tl.store(out + lane, x + y)
    tl.store(out + size + lane, x * y)
    tl.store(out + 2 * size + lane, x - y)
    tl.store(out + 3 * size + lane, tl.maximum(x, y))
    tl.store(out + 4 * size + lane, tl.where(x < y, x, -y))
    tl.store(out + 5 * size + lane, tl.fma(x, y, x))
    tl.store(out + 6 * size + lane, tl.abs(x) * 0.3)


@triton.jit
def _dot(a, b, out, size: tl.constexpr):
    row = tl.arange(0, size)[:, None] * size
    column = tl.arange(0, size)[None, :]
    sums = tl.dot(tl.load(a + row + column), tl.load(b + row + column))
    tl.store(out + row + column, sums)


@triton.jit
def _reduce(a, sums, largest, running, size: tl.constexpr):
    row = tl.arange(0, size)
    cells = row[:, None] * size + tl.arange(0, size)[None, :]
    x = tl.load(a + cells)
    tl.store(sums + row, tl.sum(x, axis=1))
    tl.store(largest + row, tl.max(x, axis=1))
    tl.store(running + cells, tl.cumsum(x, axis=1))


@triton.jit
def _cast(a, out, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.store(out + lane, tl.load(a + lane).to(out.dtype.element_ty))


@triton.jit
def _copy(source, target, count, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.store(target + lane, tl.load(source + lane), mask=lane < count)


@triton.jit
def _copy_masked(source, target, count, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.store(target + lane, tl.load(source + lane, mask=lane < count))


@triton.jit
def _read_block(pool, blocks, out, stride, wide: tl.constexpr, size: tl.constexpr):
    block = tl.load(blocks)
    if wide:
        block = block.to(tl.int64)
    lane = tl.arange(0, size)
    tl.store(out + lane, tl.load(pool + block * stride + lane))


@triton.jit
def _number_programs(out, counter):
    ticket = tl.atomic_add(counter, 1)
    tl.store(out + tl.program_id(0), ticket)


@triton.jit
def _running_total(values, total):
    tl.store(total, tl.load(total) * 0.5 + tl.load(values + tl.program_id(0)))


@triton.jit
def _double(values, out):
    tl.store(out + tl.program_id(0), tl.load(values + tl.program_id(0)) * 2)


def test_bf16_arithmetic_is_rounded_once() -> None:
    a, b = torch.randn(2, SIZE).bfloat16()
    out = torch.empty(7, SIZE, dtype=torch.bfloat16)
    _arithmetic[(1,)](a, b, out, SIZE)
    x, y = a.float(), b.float()
    scaled = (x.abs() * torch.tensor(0.3).bfloat16().float()).bfloat16()
    expected = [x + y, x * y, x - y, torch.maximum(x, y), torch.where(x < y, x, -y), x * y + x]
    assert torch.equal(out[:6], torch.stack(expected).bfloat16())
    # Python's 0.3 becomes a bf16 beside a bf16, as it does on the device.
    assert torch.equal(out[6], scaled)


def test_bf16_dot_sums_in_fp32() -> None:
    a, b = torch.randn(2, 16, 16).bfloat16()
    out = torch.empty(16, 16)
    _dot[(1,)](a, b, out, 16)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=0, atol=1e-5)


def test_bf16_reductions_are_done_in_fp32() -> None:
    a = torch.randn(16, 16).bfloat16()
    sums, largest = torch.empty(2, 16, dtype=torch.bfloat16)
    running = torch.empty(16, 16, dtype=torch.bfloat16)
    _reduce[(1,)](a, sums, largest, running, 16)
    # Rounded once at the end; sixteen roundings on the way would differ.
    assert torch.equal(sums, a.double().sum(1).bfloat16())
    assert torch.equal(largest, a.amax(1))
    assert torch.equal(running, a.double().cumsum(1).bfloat16())


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even(target: torch.dtype) -> None:
    # Ties between neighbours, carries into the exponent, subnormals, signed zero.
    values = torch.cat([torch.randn(40) * 2.0**e for e in (-12, -8, 0, 6)])
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.0625, 1.1875, 1.9999, -0.0, 2**-9, 3 * 2**-10])
    values = torch.cat([values, ties])[-128:].contiguous()
    out = torch.empty(128, dtype=target)
    _cast[(1,)](values, out, 128)
    assert torch.equal(out.view(_bits(target)), values.to(target).view(_bits(target)))
    back = torch.empty(128)
    _cast[(1,)](out, back, 128)
    assert torch.equal(back, out.float())


def test_fp8_saturates_as_the_device_does() -> None:
    values = torch.tensor([1e4, -1e4, 448.0, 460.0, float("inf"), float("nan"), 0.0, 1.0])
    out = torch.empty(8, dtype=torch.float8_e4m3fn)
    _cast[(1,)](values, out, 8)
    expected = [448.0, -448.0, 448.0, 448.0, 448.0, float("nan"), 0.0, 1.0]
    torch.testing.assert_close(out.float(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("source", [torch.int32, torch.float16, torch.float64])
def test_other_types_become_bf16(source: torch.dtype) -> None:
    values = (torch.randn(SIZE) * 100).to(source)
    out = torch.empty(SIZE, dtype=torch.bfloat16)
    _cast[(1,)](values, out, SIZE)
    assert torch.equal(out, values.to(torch.bfloat16))


def test_a_lane_past_the_end_is_caught() -> None:
    source, target = torch.arange(SIZE + 1.0), torch.zeros(SIZE)
    _copy[(1,)](source[:SIZE], target, SIZE, SIZE)
    assert torch.equal(target, source[:SIZE])
    with pytest.raises(InterpreterError, match=r"load of 4 bytes a lane, 1 of 64 lanes outside"):
        _copy[(1,)](source[: SIZE - 1], target, SIZE, SIZE)
    with pytest.raises(InterpreterError, match=r"store of 4 bytes a lane, 1 of 64 lanes outside"):
        _copy[(1,)](source, target[: SIZE - 1], SIZE, SIZE)
    _copy[(1,)](source, target[: SIZE - 1], SIZE - 1, SIZE)


def test_the_space_between_the_rows_of_a_view_is_outside() -> None:
    pool = torch.zeros(4, 2, SIZE)
    target = torch.zeros(4, 2, SIZE)
    with pytest.raises(InterpreterError, match="load of 4 bytes a lane, 64 of 128 lanes outside"):
        _copy[(1,)](pool[:, 0], target, 2 * SIZE, 2 * SIZE)
    _copy[(1,)](pool[:, 0], target, SIZE, SIZE)


def test_a_masked_lane_without_other_is_nan() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        source, target = torch.ones(SIZE, dtype=dtype), torch.zeros(SIZE, dtype=dtype)
        _copy_masked[(1,)](source, target, 3, SIZE)
        assert torch.equal(target[:3], source[:3]) and bool(target[3:].isnan().all())


def _huge_pool() -> torch.Tensor:
    """bf16, more than 2^31 elements, of which no page is real until it is written."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python has the name since 3.13
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, 2 * PAST_2_31, flags=flags)
    return torch.frombuffer(memory, dtype=torch.bfloat16)


def test_a_32_bit_offset_into_a_large_pool_is_caught() -> None:
    stride = 2**20
    pool = _huge_pool().view(-1, stride)
    last = torch.tensor([len(pool) - 1], dtype=torch.int32)
    pool[-1, :16] = torch.arange(16.0)
    out = torch.zeros(16, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match=r"Overflow.*should be 64-bit"):
        _read_block[(1,)](pool, last, out, stride, False, 16)
    before = _resident_bytes()
    _read_block[(1,)](pool, last, out, stride, True, 16)
    assert torch.equal(out, torch.arange(16.0).bfloat16())
    assert _resident_bytes() - before < 2**28


def test_a_negative_offset_is_caught() -> None:
    pool, out = torch.zeros(4, 16), torch.zeros(16)
    with pytest.raises(InterpreterError, match=r"16 of 16 lanes outside every tensor"):
        _read_block[(1,)](pool, torch.tensor([-2], dtype=torch.int32), out, 16, True, 16)


def test_every_program_of_a_grid_runs_once_in_an_order_that_the_seed_decides() -> None:
    orders = []
    for seed in (None, 1, 2, 1):
        launch_guard.shuffle(seed)
        out, counter = torch.zeros(24, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        _number_programs[(24,)](out, counter)
        orders.append(out.tolist())
    plain, first, second, again = orders
    assert plain == list(range(24)) and sorted(first) == plain
    assert plain != first != second and first == again


def test_a_kernel_that_depends_on_the_order_shows_under_the_shuffle() -> None:
    values = torch.randn(12)
    totals, doubled = set(), set()
    for seed in range(4):
        launch_guard.shuffle(seed)
        total, out = torch.zeros(1), torch.zeros(12)
        _running_total[(12,)](values, total)
        _double[(12,)](values, out)
        totals.add(total.item())
        doubled.add(tuple(out.tolist()))
    assert len(totals) > 1 and len(doubled) == 1


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.uint16 if dtype.itemsize == 2 else torch.uint8


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE
