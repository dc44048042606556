# SPDX-License-Identifier: Apache-2.0
"""The section for KV writes: bytes per second, as a share of the GPU's copy bandwidth.

K and V are slices of one qkv tensor, as after a fused projection. The floor of the bytes is a read
of K, V and slots, and a write of K, V and scales of tokens."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ....kernels.write.write_kv import write_kv
from ....kernels.write.write_kv_plain import write_kv_plain
from ..plots import draw_writes
from ..section import Launch, Place, Results, Section, Target, check_close, run_cases, time_launches
from .cases import FP8, num_layers

NAME = "writes"
MAX_SETS = 512  # so many sets of 64 tokens, half a megabyte each, exceed the level-2 cache
CEILING = "device_copy_gb_per_second"
ROOM = 2  # slots of the pool per written token
# The relative tolerance, about the distance of adjacent float8 values, and the smallest value. The
# rounding of a scale may change a stored value to an adjacent value.
FP8_STEP = 0.13
FP8_SMALLEST = 2.0**-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A launch that writes `tokens` tokens; the defaults are the shape of the targets' model."""

    tokens: int
    order: str  # order of the slots: "random" or "consecutive"
    scales: str = ""  # "head" or "token" for a float8 pool
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"{self.tokens} {self.order}" + (f" fp8 {self.scales}" if self.scales else "")

    @property
    def floor_bytes(self) -> int:
        """The bytes that are read (K and V in bf16, slots) and written (K and V in the pool, and
        the scales of tokens)."""
        values = 2 * self.tokens * self.kv_heads * self.head_dim
        scales = 2 * self.tokens * self.kv_heads * 4 if self.scales == "token" else 0
        return values * 2 + self.tokens * 8 + values * (1 if self.scales else 2) + scales


@dataclass(slots=True)
class Buffers:
    """The tensors that one launch reads and writes."""

    k: Tensor
    v: Tensor
    kv: Tensor
    slots: Tensor
    scales: Tensor | None

    def write(self, kernel: str) -> None:
        write_kv(self.k, self.v, self.kv, self.slots, kv_scales=self.scales, kernel=kernel)


def choose_cases(place: Place) -> list[Case]:
    """Return all sizes with a bf16 pool, then with a float8 pool; a quick run has only the smallest
    and the largest size."""
    sizes: tuple[int, ...] = place.choose((1, 64, 512, 8192), (1, 8192), (1, 16))
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16} if place.is_rehearsal else {}
    return [
        Case(tokens=tokens, order=order, scales=scales, **shape)
        for scales in ("", "head", "token")
        for tokens in sizes
        for order in ("random", "consecutive")
    ]


def run(place: Place, results: Results) -> None:
    """Measure all cases. Raises SectionOver, WrongResult."""
    run_cases(place, results, NAME, choose_cases(place), lambda case: measure(place, results, case))


def measure(place: Place, results: Results, case: Case) -> None:
    """Check the bytes of a launch, then time the launch and add a row. Raises WrongResult."""
    sets = make_buffers(place, case)
    check(place, case, sets[0])
    launches: list[Launch] = [partial(buffers.write, place.kernel) for buffers in sets]
    timing = time_launches(place, launches, rounds=place.choose(7, 5, 3))
    rate = case.floor_bytes / timing.median / 1e9
    share = results.ratio_to_ceiling(rate, CEILING)
    results.add_row(
        NAME,
        {
            "case": case.name,
            "tokens": case.tokens,
            "order": case.order,
            "pool": f"fp8, {case.scales} scales" if case.scales else "bfloat16",
            "sets": len(sets),
            "floor_bytes": case.floor_bytes,
            **timing.figures(),
            "gb_per_second": rate,
            "over_device_copy": share,
        },
    )
    largest = place.choose(8192, 8192, 16)
    is_wanted = case.tokens == largest and case.order == "random" and not case.scales
    if is_wanted and share is not None:
        results.set_ratio("write_over_byte_floor", share)


def make_buffers(place: Place, case: Case) -> list[Buffers]:
    """Return sets of random values, slots and pools that together exceed the level-2 cache. Within
    a set no slot occurs twice."""
    generator = torch.Generator(device=place.device)
    generator.manual_seed(zlib.crc32(case.name.encode()))
    on_device = partial(torch.empty, device=place.device)
    num_blocks = -(-ROOM * case.tokens // case.block_size)
    rows = case.heads + 2 * case.kv_heads
    pool_shape = (num_blocks, 2, case.block_size, case.kv_heads, case.head_dim)
    sets = []
    for _ in range(num_layers(place, case.floor_bytes, MAX_SETS)):
        qkv = on_device((case.tokens, rows, case.head_dim), dtype=torch.bfloat16)
        qkv.normal_(generator=generator)
        _, k, v = torch.split(qkv, [case.heads, case.kv_heads, case.kv_heads], dim=1)
        kv = on_device(pool_shape, dtype=FP8 if case.scales else torch.bfloat16)
        kv.view(torch.uint8).zero_()
        scales = None
        if case.scales:
            shape = pool_shape[:-1] if case.scales == "token" else (2, case.kv_heads)
            scales = torch.full(shape, 5.0 / 448.0, device=place.device)
        sets.append(Buffers(k, v, kv, _slots(place, case, num_blocks, generator), scales))
    return sets


def check(place: Place, case: Case, buffers: Buffers) -> None:
    """Compare the whole pool with the result of the plain version on the CPU. On CUDA, torch would
    multiply by a reciprocal instead of dividing. Raises WrongResult."""
    cpu = torch.device("cpu")
    kv, slots = buffers.kv.to(cpu, copy=True), buffers.slots.to(cpu)
    scales = None if buffers.scales is None else buffers.scales.to(cpu, copy=True)
    write_kv_plain(buffers.k.to(cpu), buffers.v.to(cpu), kv, slots, kv_scales=scales)
    buffers.write(place.kernel)
    if scales is not None and buffers.scales is not None:
        what = f"scales of {case.name}"
        check_close(what, buffers.scales.to(cpu), scales, absolute=0.0, relative=1e-6)
    absolute, relative = (FP8_SMALLEST, FP8_STEP) if case.scales else (0.0, 0.0)
    check_close(case.name, buffers.kv.to(cpu), kv, absolute=absolute, relative=relative)


def _slots(place: Place, case: Case, num_blocks: int, generator: torch.Generator) -> Tensor:
    if case.order == "consecutive":
        return torch.arange(case.tokens, device=place.device)
    slots = torch.randperm(num_blocks * case.block_size, generator=generator, device=place.device)
    return slots[: case.tokens].contiguous()


SECTION = Section(
    NAME,
    "KV writes",
    run,
    draw_writes,
    (Target("write_over_byte_floor", "KV write over device copy, 8192 tokens, bf16", least=0.80),),
)
