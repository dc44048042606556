# SPDX-License-Identifier: Apache-2.0
"""The kernels of a layer against the functions whose place they take: `norm`, `gated`, `rotate`,
`write_kv`.

The rotation and the write agree bit for bit. A norm's sum is taken in another order and `exp` is
another one, which is rounded to at most one place of the type, and two behind the last product.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from stratakv.engine.models.layers import gated, gelu_gated, norm
from stratakv.engine.models.rope import rotate
from stratakv.kernels.kernel_choice import PLAIN, TRITON, Hardware, KernelRefused
from stratakv.kernels.layer.elementwise import (
    MAX_HIDDEN,
    choose_elementwise,
    gelu_gate,
    rms_norm,
    silu_gate,
)
from stratakv.kernels.layer.rotate_write import Rotary, choose_rotate_write, rotate_write
from stratakv.kernels.write.write_kv import FP8, write_kv

from .other_hardware import other_hardware

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
TYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
EPS = 1e-5
NUM_BLOCKS, BLOCK, LAYERS, LAYER = 4, 16, 3, 1
POSITIONS = 300


def assert_within_two_places(found: Tensor, expected: Tensor) -> None:
    """At most two places of the type apart, and few at all, or something is rounded elsewhere."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    if found.dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        return
    bits = [tensor.contiguous().view(torch.int16).int() for tensor in (found, expected)]
    ordered = [torch.where(each < 0, -(each & 0x7FFF), each) for each in bits]
    apart = (ordered[0] - ordered[1]).abs()
    assert not apart.numel() or int(apart.max()) <= 2
    assert int((apart > 0).sum()) <= 1 + 0.02 * apart.numel()


@TYPES
@pytest.mark.parametrize("size", [1, 80, 129, 256])
@pytest.mark.parametrize("is_wide", [False, True])
def test_norm(dtype: torch.dtype, size: int, is_wide: bool, device: torch.device) -> None:
    x = 3 * torch.randn(7, size + 3, device=device).to(dtype)
    weight = (1 + torch.rand(size, device=device)).to(torch.float32 if is_wide else dtype)
    rows = x[:, :size]
    before = x.clone()
    found = rms_norm(rows, weight, EPS)
    assert_within_two_places(found, norm(rows.contiguous(), weight, EPS))
    assert found.is_contiguous() and torch.equal(x, before)


@HALVES
def test_norm_is_rounded_before_a_narrow_weight_and_after_a_wide_one(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Or the test above could not tell the two apart."""
    x, weight = torch.randn(5, 256, device=device).to(dtype), torch.rand(256, device=device)
    narrow = weight.to(dtype)
    differ = rms_norm(x, narrow, EPS) != rms_norm(x, narrow.float(), EPS)
    assert float(differ.float().mean()) > 0.1


@TYPES
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of numpy: the quotient is 0
@pytest.mark.parametrize("size", [1, 1000, 1025])
@pytest.mark.parametrize(("found", "plain"), [(silu_gate, gated), (gelu_gate, gelu_gated)])
def test_gate(dtype, size, found, plain, device) -> None:  # type: ignore[no-untyped-def]
    both = (4 * torch.randn(3, 2 * size + 1, device=device)).to(dtype)
    gate, up = both[:, :size], both[:, size : 2 * size]
    expected, rest = plain(gate.clone(), up.clone()), both[:, size:].clone()
    assert found(gate, up) is gate
    # Far below 0 torch's gelu is a multiple of what 1 + tanh is exact to, and this one is not.
    torch.testing.assert_close(gate, expected, rtol=2**-7, atol=1e-5)
    large = expected.abs() > 2e-3
    assert_within_two_places(gate[large], expected[large])
    assert torch.equal(both[:, size:], rest)


class Step(NamedTuple):
    """Tokens of a step, and the pool of several layers that they are written to."""

    qkv: Tensor
    rotary: Rotary
    pool: Tensor
    slots: Tensor
    kv_scales: Tensor | None


def make_step(
    dtype: torch.dtype,
    device: torch.device,
    *,
    tokens: int = 6,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    norms: torch.dtype | None = None,
    pool_dtype: torch.dtype | None = None,
) -> Step:
    num_heads, kv_heads = heads
    rows = num_heads + 2 * kv_heads
    wide = torch.randn(tokens, rows + 1, head_dim, device=device).to(dtype)
    shape = (NUM_BLOCKS, LAYERS, 2, BLOCK, kv_heads, head_dim)
    pool = torch.randn(shape, device=device).to(pool_dtype or dtype)
    angles = torch.randn(POSITIONS, head_dim // 2, device=device)
    positions = torch.randint(POSITIONS, (tokens,), device=device)
    positions[:1] = POSITIONS - 1
    slots = torch.randperm(NUM_BLOCKS * BLOCK, device=device)[:tokens]
    slots[1::3] = -1  # rows that fill up a batch
    head_norms = None
    if norms is not None:
        head_norms = (1 + torch.rand(num_heads + kv_heads, head_dim, device=device)).to(norms)
    scales = None
    if pool_dtype is FP8:
        scales = torch.rand(2, kv_heads, device=device) + 0.01
    rotary = Rotary(positions, angles.cos().to(dtype), angles.sin().to(dtype), head_norms, EPS)
    return Step(wide[:, :rows], rotary, pool, slots, scales)


def run(step: Step) -> None:
    kv = step.pool[:, LAYER]
    rotate_write(step.qkv, step.rotary, kv, step.slots, kv_scales=step.kv_scales)


def run_plain(step: Step) -> Step:
    """What `step` has to become."""
    qkv, pool = step.qkv.clone(), step.pool.clone()
    kv_heads = pool.shape[4]
    positions, cos, sin, head_norms, eps = step.rotary
    turned, v = qkv[:, :-kv_heads], qkv[:, -kv_heads:]
    if head_norms is not None:
        turned = norm(turned, head_norms, eps)
    rotated = rotate(turned, cos[positions][:, None], sin[positions][:, None])
    q, k = rotated[:, :-kv_heads], rotated[:, -kv_heads:]
    kv, scales = pool[:, LAYER], step.kv_scales
    write_kv(k, v, kv, step.slots, kv_scales=scales, kernel=PLAIN)
    qkv[:, : q.shape[1]] = q
    return step._replace(qkv=qkv, pool=pool)


@HALVES
@pytest.mark.parametrize("pool_dtype", [None, FP8], ids=["same", "fp8"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 2), 64), ((32, 8), 128), ((3, 3), 80), ((5, 1), 256), ((9, 3), 6)]
)
def test_rotation_and_write_are_those_of_torch_bit_for_bit(
    dtype: torch.dtype,
    pool_dtype: torch.dtype | None,
    heads: tuple[int, int],
    head_dim: int,
    device: torch.device,
) -> None:
    tokens = 2 if heads[0] > 9 else 5
    step = make_step(
        dtype, device, tokens=tokens, heads=heads, head_dim=head_dim, pool_dtype=pool_dtype
    )
    expected = run_plain(step)
    run(step)
    assert torch.equal(step.qkv, expected.qkv)
    assert torch.equal(step.pool.view(torch.uint8), expected.pool.view(torch.uint8))


@HALVES
def test_a_product_that_is_not_rounded_has_other_bits(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Or the test above would show less than it says."""
    step = make_step(dtype, device, tokens=4)
    wide = make_step(dtype, device, tokens=4)._replace(
        qkv=step.qkv.float(),
        rotary=Rotary(step.rotary.positions, step.rotary.cos.float(), step.rotary.sin.float()),
        pool=step.pool.float(),
    )
    kept, rounded = run_plain(wide), run_plain(step)
    assert not torch.equal(kept.qkv.to(dtype), rounded.qkv)


@HALVES
@pytest.mark.parametrize("norms", ["narrow", "wide"])
def test_heads_are_normed_first(dtype: torch.dtype, norms: str, device: torch.device) -> None:
    of_norms = dtype if norms == "narrow" else torch.float32
    step = make_step(dtype, device, heads=(6, 2), head_dim=80, norms=of_norms)
    expected = run_plain(step)
    run(step)
    # One place of a head's norm is a few of what is rotated: of the sum of two products.
    near = {"rtol": 0, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(step.qkv, expected.qkv, **near)
    torch.testing.assert_close(step.pool, expected.pool, **near)
    differ = step.qkv[:, :6] != expected.qkv[:, :6]
    assert float(differ.float().mean()) < 0.02


def test_a_step_without_tokens(device: torch.device) -> None:
    step = make_step(torch.bfloat16, device, tokens=0)
    before = step.pool.clone()
    run(step)
    assert torch.equal(step.pool, before)
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=device)
    assert rms_norm(x, torch.ones(32, device=device), EPS).shape == (0, 32)
    assert silu_gate(x, x).shape == (0, 32)


def test_slots_beyond_the_pool_are_not_written(device: torch.device) -> None:
    step = make_step(torch.bfloat16, device, tokens=3)
    step.slots.copy_(torch.tensor([NUM_BLOCKS * BLOCK, -2, 2**40]))
    before = step.pool.clone()
    run(step)
    assert torch.equal(step.pool, before)


def test_rows_and_tables_past_2_to_the_31_elements(device: torch.device) -> None:
    # Memory that nobody writes is not there, so gigabytes cost nothing.
    step = make_step(torch.bfloat16, device, tokens=2, heads=(1, 1), head_dim=64)
    rows = step.qkv.shape[1] * 64
    memory = torch.empty(2**31 + rows, dtype=torch.bfloat16, device=device)
    far = memory.as_strided((2, 3, 64), (2**31, 64, 1))
    far.copy_(step.qkv)
    length = 2**31 // 32 + 2
    tables = [torch.empty(length, 32, dtype=torch.bfloat16, device=device) for _ in range(2)]
    positions = torch.tensor([length - 1, 0], device=device)
    for table, values in zip(tables, (step.rotary.cos, step.rotary.sin), strict=True):
        table[positions] = values[:2]
    near = step._replace(rotary=step.rotary._replace(positions=torch.tensor([0, 1], device=device)))
    expected = run_plain(near)
    run(step._replace(qkv=far, rotary=Rotary(positions, *tables)))
    assert torch.equal(far, expected.qkv) and torch.equal(step.pool, expected.pool)


ROWS = torch.zeros(3, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(ROWS[0], ROWS[0], EPS), r"x \[rows, size\] and weight.*bfloat16 \[8\]"),
        (lambda: rms_norm(ROWS, ROWS[0, :4], EPS), r"got .*\[3, 8\] and .*\[4\]"),
        (lambda: rms_norm(ROWS, ROWS[0].half(), EPS), "of its type or float32, got .*float16"),
        (lambda: rms_norm(ROWS.t(), ROWS[:, 0], EPS), "x contiguous in its last axis"),
        (lambda: silu_gate(ROWS, ROWS[:, :4]), r"same strides, got .*\[3, 8\].*\[3, 4\]"),
        (lambda: gelu_gate(ROWS, ROWS.float()), "of one type.*torch.float32"),
        (lambda: silu_gate(ROWS[:, :4], torch.zeros_like(ROWS[:, :4])), r"\(8, 1\).*\(4, 1\)"),
    ],
)
def test_rows_that_are_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelRefused, match=message):
        call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv": torch.zeros(6, 4, 64).bfloat16()}, r"\[tokens, heads \+ 2 x 2 kv heads"),
        ({"qkv": torch.zeros(6, 64, 8).bfloat16().transpose(1, 2)}, "heads of a token side by si"),
        ({"qkv": torch.zeros(6, 8, 64)}, "expected k and v of one dtype.*got torch.float32"),
        ({"slots": torch.zeros(6, dtype=torch.int32)}, "int64 slots"),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, r"positions \[6\], got .*\[5\]"),
        ({"positions": torch.zeros(12, dtype=torch.int64)[::2]}, "contiguous positions"),
        ({"cos": torch.zeros(300, 32)}, r"cos \[300, 32\] of torch.bfloat16, got torch.float32"),
        ({"sin": torch.zeros(300, 64).bfloat16()}, r"sin \[300, 32\].*got .*\[300, 64\]"),
        ({"head_norms": torch.zeros(8, 64)}, r"head_norms \[6, 64\] of .*got .*\[8, 64\]"),
        ({"kv_scales": torch.ones(2, 2)}, "expected no kv_scales beside a pool"),
    ],
)
def test_steps_that_are_refused(changed: dict[str, Tensor], message: str) -> None:
    step = make_step(torch.bfloat16, torch.device("cpu"))
    rotary = {name: t for name, t in changed.items() if name in Rotary._fields}
    rest = {name: t for name, t in changed.items() if name not in rotary}
    with pytest.raises(KernelRefused, match=message):
        run(step._replace(rotary=step.rotary._replace(**rotary), **rest))


def test_norm_and_gate_are_chosen_for_16_bits_on_devices_that_can() -> None:
    cuda = torch.device("cuda")
    with other_hardware(lambda: Hardware("H100", (9, 0), has_triton=True)):
        for dtype in (torch.bfloat16, torch.float16):
            assert choose_elementwise(cuda, dtype, 4096, strict=True) == TRITON
        assert choose_elementwise(cuda, torch.float64, 4096, strict=True) == PLAIN
        assert choose_elementwise(cuda, torch.bfloat16, MAX_HIDDEN + 1) == PLAIN
        with pytest.raises(KernelRefused, match="rows of up to 32768, and these have 32769"):
            choose_elementwise(cuda, torch.bfloat16, MAX_HIDDEN + 1, strict=True)
    with other_hardware(lambda: Hardware("V100", (7, 0), has_triton=True)):
        assert choose_elementwise(cuda, torch.float16, 4096) == PLAIN
        with pytest.raises(KernelRefused, match=r"needs compute capability \(8, 0\)"):
            choose_elementwise(cuda, torch.float16, 4096, strict=True)


def test_what_the_kernels_of_a_layer_do_not_take() -> None:
    cpu = torch.device("cpu")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert choose_elementwise(cpu, dtype, 64, strict=True) == PLAIN
    q, kv = torch.zeros(0, 4, 64).bfloat16(), torch.zeros(1, 2, 16, 2, 64).bfloat16()
    assert choose_rotate_write(q, kv, None) == PLAIN
    by_token = torch.ones(1, 2, 16, 2)
    with pytest.raises(KernelRefused, match="cannot run: it takes scales of heads"):
        choose_rotate_write(q, kv.to(FP8), by_token, kernel="triton")
    odd = torch.zeros(1, 2, 16, 2, 63).bfloat16()
    with pytest.raises(KernelRefused, match="cannot run: it takes heads of an even size up to 512"):
        choose_rotate_write(q, odd, None, kernel="triton")
    assert choose_rotate_write(q.double(), kv.double(), None, kernel="triton") == PLAIN
