# SPDX-License-Identifier: Apache-2.0
"""Small kernels with known properties, for the test of the ahead-of-time gate.

One is sound, and one breaks each rule: it spills, wants too much shared memory, or lacks an
instruction that it names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from stratakv.kernels.configuration import Configuration


@triton.jit
def _product(a, b, out, stride, steps, rows: tl.constexpr, inner: tl.constexpr):
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, inner)[None, :]
    sums = tl.zeros((rows, rows), tl.float32)
    for step in range(steps):
        left = tl.load(a + row * stride + step * inner + column)
        right = tl.load(b + row * stride + step * inner + column)
        sums = tl.dot(left, right.T, sums)
    tl.store(out + row * stride + tl.arange(0, rows)[None, :], sums.to(tl.bfloat16))


def shipped_configurations() -> list[Configuration]:
    return [
        _planted("sound", 64, 64, 4, 3, {"HGMMA", "LDGSTS"}),
        _planted("spills", 64, 128, 1, 1, set()),
        _planted("shared", 64, 128, 4, 9, set()),
        _planted("lacks", 64, 64, 4, 1, {"HGMMA", "LDGSTS"}),
    ]


def _planted(
    name: str, rows: int, inner: int, num_warps: int, num_stages: int, needs: set[str]
) -> Configuration:
    return Configuration(
        name=f"planted.{name}",
        function=_product,
        signature={**dict.fromkeys(("a", "b", "out"), "*bf16"), "stride": "i32", "steps": "i32"},
        constexprs={"rows": rows, "inner": inner},
        num_warps=num_warps,
        num_stages=num_stages,
        multiples_of_16=frozenset({"stride"}),
        needs=frozenset(needs),
    )
