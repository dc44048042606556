# SPDX-License-Identifier: Apache-2.0
"""KV writes: every byte of the pool is as a loop over tokens says, in fp8 as float64 says.

The pool is a layer of a larger one, and all of that is compared: what lies beside a slot, in other
layers and in the scales of other slots must not change.
"""

from __future__ import annotations

import pytest
import torch

from stratakv.kernels.kernel_choice import PLAIN, TRITON, KernelRefused
from stratakv.kernels.write.write_kv import FP8, MAX_HEAD_DIM, write_kv

KERNELS = pytest.mark.parametrize("kernel", [PLAIN, TRITON])
NUM_BLOCKS, LAYERS, LAYER = 5, 3, 1
E4M3_MAX = 448.0
# num_kv_heads, head_dim, block_size
SHAPES = [(1, 64, 16), (2, 128, 32), (8, 128, 16), (3, 80, 64), (7, 96, 16)]


def e4m3_values() -> torch.Tensor:
    """Every finite value of the format, from its definition."""
    found = []
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 0:
                found.append(mantissa / 8 * 2.0**-6)
            elif (exponent, mantissa) != (15, 7):
                found.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    positive = torch.tensor(found, dtype=torch.float64)
    return torch.cat([positive, -positive])


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a pool held before, NaN patterns among it."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, device=device).view(dtype)


def some_slots(count: int, block_size: int, device: torch.device) -> torch.Tensor:
    """Slots in no order, the first and the last of the pool among them, and every fourth -1."""
    last = NUM_BLOCKS * block_size - 1
    inner = torch.randperm(last - 1)[: count - 2] + 1
    slots = torch.cat([torch.tensor([last, 0]), inner])
    slots[3::4] = -1
    return slots.to(device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def expected_pool(
    pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    result = pool.clone()
    block_size = pool.shape[3]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            result[slot // block_size, LAYER, 0, slot % block_size] = k[token]
            result[slot // block_size, LAYER, 1, slot % block_size] = v[token]
    return result


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES)
def test_slices_of_one_tensor_reach_their_slots(
    kernel: str,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
) -> None:
    pool = random_bytes((NUM_BLOCKS, LAYERS, 2, block_size, heads, head_dim), dtype, device)
    slots = some_slots(37, block_size, device)
    qkv = torch.randn(37, 4 * heads, head_dim, device=device).to(dtype)
    k, v = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    expected = expected_pool(pool, k, v, slots)
    write_kv(k, v, pool[:, LAYER], slots, kernel=kernel)
    assert torch.equal(as_bytes(pool), as_bytes(expected))


@KERNELS
def test_any_strides_of_the_source(kernel: str, device: torch.device) -> None:
    pool = random_bytes((NUM_BLOCKS, LAYERS, 2, 16, 2, 64), torch.float32, device)
    slots = some_slots(9, 16, device)
    k = torch.randn(2, 9, 64, device=device).transpose(0, 1)
    v = torch.randn(9, 64, 4, device=device).transpose(1, 2)[:, ::2]
    expected = expected_pool(pool, k, v, slots)
    write_kv(k, v, pool[:, LAYER], slots, kernel=kernel)
    assert torch.equal(as_bytes(pool), as_bytes(expected))


@KERNELS
@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(kernel: str, count: int, device: torch.device) -> None:
    pool = random_bytes((NUM_BLOCKS, LAYERS, 2, 16, 1, 64), torch.float16, device)
    k, v = torch.randn(2, count, 1, 64, device=device).half()
    slots = torch.full((count,), 17, device=device)
    expected = expected_pool(pool, k, v, slots)
    write_kv(k, v, pool[:, LAYER], slots, kernel=kernel)
    assert torch.equal(as_bytes(pool), as_bytes(expected))


def test_float64_is_for_the_plain_kernel(device: torch.device) -> None:
    pool = random_bytes((NUM_BLOCKS, LAYERS, 2, 16, 1, 64), torch.float64, device)
    k, v = torch.randn(2, 1, 1, 64, dtype=torch.float64, device=device)
    slots = torch.tensor([3], device=device)
    expected = expected_pool(pool, k, v, slots)
    write_kv(k, v, pool[:, LAYER], slots)
    assert torch.equal(as_bytes(pool), as_bytes(expected))
    with pytest.raises(KernelRefused, match=r"computes nothing in torch\.float64"):
        write_kv(k, v, pool[:, LAYER], slots, kernel=TRITON)


@KERNELS
def test_slots_past_2_to_the_31_elements(kernel: str, device: torch.device) -> None:
    # Memory that nobody writes is not there, so gigabytes cost nothing.
    num_blocks = 2**31 // (2 * 16 * 8 * 128) + 2
    kv = torch.empty(num_blocks, 2, 16, 8, 128, dtype=torch.float16, device=device)
    assert kv[-1].storage_offset() > 2**31
    for block in (0, 1, 2, -2, -1):
        kv[block] = 7.0
    k, v = torch.randn(2, 2, 8, 128, device=device).half()
    slots = torch.tensor([num_blocks * 16 - 1, 0], device=device)
    write_kv(k, v, kv, slots, kernel=kernel)
    assert torch.equal(kv[-1, 0, 15], k[0]) and torch.equal(kv[-1, 1, 15], v[0])
    assert torch.equal(kv[0, 0, 0], k[1]) and torch.equal(kv[0, 1, 0], v[1])
    assert bool((kv[-1, :, :15] == 7).all()) and bool((kv[-2] == 7).all())
    assert bool((kv[0, :, 1:] == 7).all()) and bool((kv[1:3] == 7).all())


@KERNELS
def test_a_source_past_2_to_the_31_elements(kernel: str, device: torch.device) -> None:
    memory = torch.empty(2**31 + 64, dtype=torch.float16, device=device)
    k = torch.as_strided(memory, (3, 1, 64), (2**30, 64, 1))
    k[:] = torch.randn(3, 1, 64, device=device)
    kv = torch.full((1, 2, 16, 1, 64), 7.0, dtype=torch.float16, device=device)
    write_kv(k, k, kv, torch.arange(3, device=device), kernel=kernel)
    assert torch.equal(kv[0, 0, :3], k) and torch.equal(kv[0, 1, :3], k)
    assert bool((kv[0, :, 3:] == 7).all())


def fp8_case(
    dtype: torch.dtype, heads: int, head_dim: int, block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool, k, v and slots; the rows have magnitudes from 2^-9 to 2^9."""
    pool = random_bytes((NUM_BLOCKS, LAYERS, 2, block_size, heads, head_dim), FP8, device)
    sizes = 2.0 ** torch.randint(-9, 10, (2, 21, heads, 1), device=device)
    k, v = (torch.randn(2, 21, heads, head_dim, device=device) * sizes).to(dtype)
    return pool, k, v, some_slots(21, block_size, device)


def assert_nearest(stored: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """`stored` is an e4m3 value nearest to `values / scale`, computed in float64."""
    grid = e4m3_values()
    wanted = (values.double().cpu() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    nearest = (wanted.unsqueeze(-1) - grid).abs().amin(-1)
    distance = (stored.double().cpu() - wanted).abs()
    assert bool((distance <= nearest + 1e-6 * wanted.abs()).all())


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(2, 128, 16), (3, 80, 32)])
def test_fp8_under_given_scales(
    kernel: str,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
) -> None:
    pool, k, v, slots = fp8_case(dtype, heads, head_dim, block_size, device)
    before = pool.clone()
    scales = torch.rand(2, heads, device=device) + 0.01
    given = scales.clone()
    write_kv(k, v, pool[:, LAYER], slots, kv_scales=scales, kernel=kernel)
    assert torch.equal(scales, given)
    for token, slot in enumerate(slots.tolist()):
        for side, head in ((side, head) for side in (0, 1) for head in range(heads) if slot >= 0):
            place = (slot // block_size, LAYER, side, slot % block_size, head)
            assert_nearest(pool[place], (k, v)[side][token, head], float(given[side, head]))
            # It has been compared; what is left must be as it was.
            pool.view(torch.uint8)[place] = before.view(torch.uint8)[place]
    assert torch.equal(as_bytes(pool), as_bytes(before))


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(2, 128, 16), (3, 80, 32)])
def test_fp8_under_computed_scales(
    kernel: str,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
) -> None:
    pool, k, v, slots = fp8_case(dtype, heads, head_dim, block_size, device)
    all_scales = torch.full((NUM_BLOCKS, LAYERS, 2, block_size, heads), -3.0, device=device)
    before = pool.clone()
    write_kv(k, v, pool[:, LAYER], slots, kv_scales=all_scales[:, LAYER], kernel=kernel)
    for token, slot in enumerate(slots.tolist()):
        for side, head in ((side, head) for side in (0, 1) for head in range(heads) if slot >= 0):
            place = (slot // block_size, LAYER, side, slot % block_size, head)
            row = (k, v)[side][token, head]
            scale = float(all_scales[place])
            assert scale == pytest.approx(float(row.double().abs().max()) / E4M3_MAX, rel=1e-6)
            assert_nearest(pool[place], row, scale)
            assert float(pool[place].float().abs().max()) == E4M3_MAX
            all_scales[place] = -3.0
            pool.view(torch.uint8)[place] = before.view(torch.uint8)[place]
    assert torch.equal(as_bytes(pool), as_bytes(before))
    assert bool((all_scales == -3).all())


@pytest.mark.parametrize("is_given", [True, False])
def test_both_kernels_store_the_same_bits(is_given: bool, device: torch.device) -> None:
    pool, k, v, slots = fp8_case(torch.float32, 3, 80, 16, device)
    shape = (2, 3) if is_given else (NUM_BLOCKS, 2, 16, 3)
    scales = torch.rand(shape, device=device) + 0.1
    results = []
    for kernel in (PLAIN, TRITON):
        kv, kv_scales = pool.clone()[:, LAYER], scales.clone()
        write_kv(k, v, kv, slots, kv_scales=kv_scales, kernel=kernel)
        results.append((as_bytes(kv), as_bytes(kv_scales)))
    (plain, plain_scales), (triton, triton_scales) = results
    assert torch.equal(plain, triton) and torch.equal(plain_scales, triton_scales)


@KERNELS
@pytest.mark.parametrize("is_given", [True, False])
def test_what_has_no_fp8_value(kernel: str, is_given: bool, device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    k = torch.zeros(5, 1, 64, device=device)
    k[0, 0, :4] = torch.tensor([1e30, -1e30, 448.0, 0.0])  # beyond a given scale
    k[1, 0, :4] = torch.tensor([inf, -inf, 2.0, 1.0])
    k[2, 0, :4] = torch.tensor([nan, 2.0, -2.0, 0.0])
    k[4, 0, :4] = torch.tensor([1e-42, -1e-42, 0.0, 0.0])  # its own scale would be zero
    kv = random_bytes((1, 2, 16, 1, 64), FP8, device)
    scales = torch.ones((2, 1) if is_given else (1, 2, 16, 1), device=device)
    write_kv(k, -k, kv, torch.arange(5, device=device), kv_scales=scales, kernel=kernel)
    stored, negated = kv[0, 0, :5, 0, :4].float(), kv[0, 1, :5, 0, :4].float()
    scale = torch.ones(5) if is_given else scales[0, 0, :5, 0].cpu()
    values = stored.cpu() * scale.unsqueeze(-1)
    assert bool((stored.nan_to_num(-9) == (-negated).nan_to_num(-9)).all())
    if is_given:
        assert values[0].tolist() == [448, -448, 448, 0]
        assert values[1].tolist() == [448, -448, 2, 1]
        assert values[4].tolist() == [0, 0, 0, 0]
    else:
        assert values[0].tolist() == pytest.approx([1e30, -1e30, 0, 0], rel=1e-6)
        assert values[1].tolist() == pytest.approx([2, -2, 2, 1], rel=1e-6)
        assert values[4].abs().max() < 1e-40
        assert bool((scale > 0).all()) and bool((1 / scale).isfinite().all())
    assert bool(values[2, 0].isnan()) and values[2, 1:].tolist() == pytest.approx([2, -2, 0])
    assert values[3].tolist() == [0, 0, 0, 0]
    assert not bool(kv[0, :, :5, 0, 4:].float().any())


def test_slots_beyond_the_pool(device: torch.device) -> None:
    kv = random_bytes((2, 2, 16, 1, 64), torch.float16, device)
    before = kv.clone()
    k, v = torch.randn(2, 2, 1, 64, device=device).half()
    for slot in (32, 2**40, -2):
        slots = torch.tensor([0, slot], device=device)
        with pytest.raises(KernelRefused, match=r"slots from 0 to 31 or -1, got"):
            write_kv(k, v, kv, slots, kernel=PLAIN)
        assert torch.equal(as_bytes(kv), as_bytes(before))
    for slot in (32, 2**40, -2):
        write_kv(k, v, kv, torch.tensor([0, slot], device=device), kernel=TRITON)
    before[0, 0, 0], before[0, 1, 0] = k[0], v[0]
    assert torch.equal(as_bytes(kv), as_bytes(before))


KV = torch.zeros(2, 2, 16, 3, 64)
ROWS = torch.zeros(4, 3, 64)
SLOTS = torch.zeros(4, dtype=torch.int64)
FP8_KV = torch.zeros(2, 2, 16, 3, 64, dtype=FP8)


@pytest.mark.parametrize(
    ("k", "v", "kv", "slots", "scales", "message"),
    [
        (ROWS, ROWS, KV[0], SLOTS, None, r"expected kv \[num_blocks.*got \[2, 16, 3, 64\]"),
        (ROWS, ROWS, KV.transpose(3, 4), SLOTS, None, r"kv contiguous in its last axis, got"),
        (ROWS[:3], ROWS, KV, SLOTS, None, r"of \[4, 3, 64\].*got \[3, 3, 64\] and \[4, 3, 64\]"),
        (
            ROWS[:, :0],
            ROWS[:, :0],
            KV[:, :, :, :0],
            SLOTS,
            None,
            r"not empty, got \[2, 2, 16, 0, 64\]",
        ),
        (ROWS, ROWS[..., :32], KV, SLOTS, None, r"got \[4, 3, 64\] and \[4, 3, 32\]"),
        (ROWS, ROWS, KV, SLOTS.int(), None, r"int64 slots \[tokens\], got torch.int32"),
        (ROWS, ROWS, KV, SLOTS.repeat(2)[::2], None, r"contiguous int64 slots.*\(2,\)"),
        (ROWS, ROWS, KV, SLOTS.reshape(2, 2), None, r"slots \[tokens\], got torch.int64 \[2, 2\]"),
        (ROWS, ROWS, KV, SLOTS.to("meta"), None, "expected one device, got .*'slots': 'meta'"),
        (ROWS, ROWS.half(), KV, SLOTS, None, "one dtype.*got torch.float32, torch.float16"),
        (ROWS.half(), ROWS.half(), KV, SLOTS, None, "kv of the same.*got.*torch.float32"),
        (ROWS.int(), ROWS.int(), KV.int(), SLOTS, None, "16 to 64 bits.*got torch.int32"),
        (ROWS, ROWS, KV, SLOTS, torch.ones(2, 3), "expected no kv_scales beside a pool of to"),
        (ROWS, ROWS, FP8_KV, SLOTS, None, "kv_scales beside a pool of torch.float8_e4m3fn, got n"),
        (
            ROWS,
            ROWS,
            FP8_KV,
            SLOTS,
            torch.ones(2, 4),
            r"\[2, 3\] or \[2, 2, 16, 3\], got .*\[2, 4\]",
        ),
        (ROWS, ROWS, FP8_KV, SLOTS, torch.ones(2, 3).half(), "float32 kv_scales.*float16"),
        (ROWS, ROWS, FP8_KV, SLOTS, torch.ones(2, 3).to("meta"), "one device.*kv_scales': 'meta"),
    ],
)
def test_refused(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None,
    message: str,
) -> None:
    with pytest.raises(KernelRefused, match=message):
        write_kv(k, v, kv, slots, kv_scales=scales)


def test_triton_takes_heads_up_to_a_limit(device: torch.device) -> None:
    kv = torch.zeros(1, 2, 16, 1, MAX_HEAD_DIM + 1, device=device)
    k = torch.ones(1, 1, MAX_HEAD_DIM + 1, device=device)
    slots = torch.tensor([0], device=device)
    with pytest.raises(KernelRefused, match="heads of up to 1024, and this is 1025"):
        write_kv(k, k, kv, slots, kernel=TRITON)
    write_kv(k, k, kv, slots)
    assert torch.equal(kv[0, 0, 0], k[0])
    assert float(kv.sum()) == 2 * (MAX_HEAD_DIM + 1)
