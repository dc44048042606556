# SPDX-License-Identifier: Apache-2.0
"""A shipped configuration: one Triton kernel with everything that its compiler has to know.

`shipped.py` lists them all. They are compiled ahead of time, for devices that this machine lacks,
and `resources.json` keeps the compiler's figures. This module imports no triton, so that a list can
be read on any machine; the function in a configuration is the object that `triton.jit` made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPE = re.compile(r"\*?(i1|i8|i16|i32|i64|u8|u16|u32|u64|fp16|bf16|fp32|fp64|fp8e4nv|fp8e5)")
NAME = re.compile(r"[a-z0-9_.-]{1,80}")


class ConfigurationRefused(ValueError):
    """A configuration that could not be compiled as it is written, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The facts that one launch is compiled from.

    `signature` has the type of every argument that is passed when the kernel runs, in Triton's
    words: "*bf16", "*fp8e4nv", "fp32", "i32", "i64". Every other argument is in `constexprs` with
    its value: the ones that are `tl.constexpr`, integers that are always 1 (Triton makes a constant
    of those when it launches), and None for a pointer that is not passed. Pointers count as aligned
    to 16 bytes; integers that are multiples of 16, such as strides, are named in `multiples_of_16`.

    `tile_bytes` and `tile_flops` are the work of one pass of the inner loop, by which its machine
    code is judged: bytes of the pool that it reads, and operations of its products, without those
    on padding. 0 if they are not counted.
    """

    name: str  # unique among all kernels: "paged_decode.bf16.d128.g4"
    function: Any  # a triton.JITFunction
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    multiples_of_16: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()  # of the machine code for sm_90: {"HGMMA", "LDGSTS"}
    min_capability: tuple[int, int] = (8, 0)  # fp8 e4m3 needs (8, 9)
    min_programs: int = 1  # the fewest that a multiprocessor of sm_90 has to run side by side
    tile_bytes: int = 0
    tile_flops: int = 0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigurationRefused(f"expected a name of {NAME.pattern}, got {self.name!r}")
        for argument, type_ in self.signature.items():
            if not TYPE.fullmatch(type_):
                raise ConfigurationRefused(
                    f"{self.name}: expected {TYPE.pattern} for {argument}, got {type_!r}"
                )
        passed, constant = set(self.signature), set(self.constexprs)
        if passed & constant:
            raise ConfigurationRefused(
                f"{self.name}: both passed and constant: {sorted(passed & constant)}"
            )
        arguments = set(self.function.arg_names)
        if passed | constant != arguments:
            raise ConfigurationRefused(
                f"{self.name}: missing {sorted(arguments - passed - constant)}, "
                f"unknown {sorted((passed | constant) - arguments)}"
            )
        if not self.multiples_of_16 <= passed:
            raise ConfigurationRefused(
                f"{self.name}: multiples of 16 that are not passed: "
                f"{sorted(self.multiples_of_16 - passed)}"
            )
