# SPDX-License-Identifier: Apache-2.0
"""Tiny cases for compute-sanitizer, a process each: `python sanitizer_cases.py NAME`.

Tensors are made on the CPU and judged there, so that hardly a kernel runs but ours. The exit status
is 0 when the numbers are right. `planted` reads where nothing is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from stratakv.kernels.attention.paged_decode import paged_decode
from stratakv.kernels.attention.paged_prefill import paged_prefill
from stratakv.kernels.copy.copy_blocks import copy_blocks, gather_blocks, scatter_blocks
from stratakv.kernels.kernel_choice import FP8_CAPABILITY
from stratakv.kernels.layer.elementwise import rms_norm, silu_gate
from stratakv.kernels.layer.rotate_write import Rotary, rotate_write
from stratakv.kernels.pool_checks import FP8
from stratakv.kernels.write.write_kv import write_kv

TOLERANCE = 5e-3


@triton.jit
def _read_beyond(source, target, beyond, size: tl.constexpr):
    lane = tl.arange(0, size)
    tl.store(target + lane, tl.load(source + beyond + lane))


def _pool() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every block and slot is somebody's, so that whatever is read beyond is out of the pool."""
    kv = torch.randn(4, 2, 16, 2, 80).half()
    tables = torch.tensor([[3, 0, 1], [2, 0, 0]], dtype=torch.int32)
    return kv, tables, torch.tensor([48, 7], dtype=torch.int32)


def decode() -> None:
    kv, tables, lengths = _pool()
    q = torch.randn(2, 8, 80).half()
    for options in ({"num_splits": 2}, {"num_splits": 1, "window": 20, "softcap": 5.0}):
        found, expected = (
            paged_decode(*tensors, scale=0.1, **options, kernel=kernel)
            for kernel, tensors in _both(q, kv, tables, lengths)
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=TOLERANCE)


def prefill() -> None:
    kv, tables, lengths = _pool()
    q = torch.randn(25, 8, 80).half()
    starts = torch.tensor([0, 20, 25], dtype=torch.int32)
    for options in ({}, {"window": 20, "softcap": 5.0}):
        found, expected = (
            paged_prefill(*tensors, max_query_len=20, scale=0.1, **options, kernel=kernel)
            for kernel, tensors in _both(q, kv, tables, lengths, starts)
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=TOLERANCE)


def write() -> None:
    """Quantised into the pool where the device can, and its blocks moved within it, out and in."""
    slots, ids = torch.tensor([63, -1, 0, 17, 33]), torch.tensor([[3, 0], [1, -1]])
    both = _both(*torch.randn(2, 5, 2, 80), slots, *ids)
    dtype = FP8 if torch.cuda.get_device_capability() >= FP8_CAPABILITY else torch.float32
    results = []
    for kernel, (k, v, slots, sources, targets) in both:
        kv = torch.zeros(4, 2, 16, 2, 80 * dtype.itemsize, dtype=torch.uint8)
        kv, scales = kv.view(dtype).to(k.device), torch.zeros(4, 2, 16, 2).to(k.device)
        out = torch.zeros(2, kv[0].numel() * dtype.itemsize, dtype=torch.uint8).to(k.device)
        write_kv(k, v, kv, slots, kv_scales=scales if dtype == FP8 else None, kernel=kernel)
        copy_blocks(kv, sources, targets, kernel=kernel)
        gather_blocks(kv, sources, out, kernel=kernel)
        scatter_blocks(out, kv, sources.flip(0), kernel=kernel)
        results.append([x.cpu().view(torch.uint8) for x in (kv, scales, out)])
    assert all(map(torch.equal, *results))


def layer() -> None:
    """The norm, the gate, and the rotation with the write."""
    x, weight, both = torch.randn(5, 80).half(), torch.rand(80).half(), torch.randn(5, 2, 80).half()
    qkv, kv = torch.randn(5, 8, 80).half(), torch.zeros(4, 2, 16, 2, 80).half()
    cos, sin = torch.randn(2, 9, 40).half()
    positions, slots = torch.tensor([8, 0, 3, 1, 8]), torch.tensor([63, -1, 0, 17, 33])
    on_device = [tensor.to("cuda") for tensor in (x, weight, both, qkv, kv, cos, sin)]
    x, weight, both, there, pool, cosines, sines = on_device
    gate = silu_gate(both[:, 0], both[:, 1])
    rotary = Rotary(positions.to("cuda"), cosines, sines)
    rotate_write(there, rotary, pool, slots.to("cuda"))
    normed = rms_norm(x, weight, 1e-5)
    assert all(bool(tensor.isfinite().all()) for tensor in (gate.cpu(), normed.cpu()))
    first, second = qkv[:, :6].float().chunk(2, dim=-1)
    cos, sin = cos[positions][:, None].float(), sin[positions][:, None].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    near = {"rtol": 0, "atol": TOLERANCE}
    torch.testing.assert_close(there[:, :4].cpu().float(), turned[:, :4], **near)
    torch.testing.assert_close(pool[3, 0, 15].cpu().float(), turned[0, 4:], **near)
    assert torch.equal(pool[3, 1, 15].cpu(), qkv[0, 6:])


def planted() -> None:
    source, target = torch.zeros(64).to("cuda"), torch.zeros(64).to("cuda")
    _read_beyond[(1,)](source, target, 2**20, 64)
    torch.cuda.synchronize()


def _both(*tensors: torch.Tensor) -> tuple[tuple[str, list[torch.Tensor]], ...]:
    """For Triton's kernel on the device, and for the plain one on the CPU."""
    on_device = [tensor.to("cuda") for tensor in tensors]
    return ("triton", on_device), ("plain", list(tensors))


CASES: dict[str, Callable[[], None]] = {
    "decode": decode,
    "prefill": prefill,
    "write": write,
    "layer": layer,
    "planted": planted,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
    print("right")
