# SPDX-License-Identifier: Apache-2.0
"""Small kernels with known properties, for the test of the ahead-of-time gate.

One is sound, and one breaks each rule: it spills, wants too much shared memory, or lacks an
instruction that it names. The others are the sound one, made dearer in one way each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stratakv.kernels.configuration import Configuration


@triton.jit
def _product(
    a,
    b,
    out,
    stride,
    steps,
    rows: tl.constexpr,
    inner: tl.constexpr,
    unit: tl.constexpr,  # elements that a stride counts in
    barrier: tl.constexpr,
    exponentials: tl.constexpr,
):
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, inner)[None, :]
    sums = tl.zeros((rows, rows), tl.float32)
    for step in range(steps):
        left = tl.load(a + row * stride * unit + step * inner + column)
        right = tl.load(b + row * stride * unit + step * inner + column)
        sums = tl.dot(left, right.T, sums)
        if barrier:  # the rows are shared out among the warps
            sums -= tl.max(sums, 0)[None, :]
        if exponentials:
            sums = tl.exp2(sums)
    tl.store(out + row * stride + tl.arange(0, rows)[None, :], sums.to(tl.bfloat16))


def shipped_configurations() -> list[Configuration]:
    return [
        _planted("sound"),
        _planted("spills", inner=128, num_warps=1, num_stages=1, needs=()),
        _planted("shared", inner=128, num_stages=9, needs=()),
        _planted("lacks", num_stages=1),
        _planted("dearer.barrier", changed={"barrier": True}, target=(9, 0)),
        _planted("dearer.instructions", changed={"exponentials": True}, target=(9, 0)),
        # A row may begin at any four bytes, so no wider copy is right.
        _planted("dearer.narrow", changed={"unit": 2}, aligned=(), target=(9, 0)),
        _planted("dearer.room", num_stages=6, target=(9, 0)),
    ]


def _planted(
    name: str,
    *,
    inner: int = 64,
    num_warps: int = 4,
    num_stages: int = 3,
    needs: tuple[str, ...] = ("HGMMA", "LDGSTS"),
    changed: dict[str, object] | None = None,
    aligned: tuple[str, ...] = ("stride",),
    target: tuple[int, int] = (8, 0),
) -> Configuration:
    usual = {"rows": 64, "inner": inner, "unit": 1, "barrier": False, "exponentials": False}
    return Configuration(
        name=f"planted.{name}",
        function=_product,
        signature={**dict.fromkeys(("a", "b", "out"), "*bf16"), "stride": "i32", "steps": "i32"},
        constexprs=usual | (changed or {}),
        num_warps=num_warps,
        num_stages=num_stages,
        multiples_of_16=frozenset(aligned),
        needs=frozenset(needs),
        min_capability=target,
        min_programs=4 if "HGMMA" in needs and inner == 64 else 1,
    )
