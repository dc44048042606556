# SPDX-License-Identifier: Apache-2.0
"""Configuration: the inputs of a compilation of a Triton kernel ahead of time.

`shipped.py` lists the configurations. Each configuration is compiled for GPUs that the compiling
machine may lack, and `resources.json` stores the figures that the compiler reports. This module
does not import triton, so it can be imported on any machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TYPE = re.compile(r"\*?(i1|i8|i16|i32|i64|u8|u16|u32|u64|fp16|bf16|fp32|fp64|fp8e4nv|fp8e5)")
NAME = re.compile(r"[a-z0-9_.-]{1,80}")


class ConfigurationRefused(ValueError):
    """A configuration has an error that would make its compilation fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The inputs from which the compiler compiles one variant of a kernel.

    `signature` has the type of every argument that is passed when the kernel runs, in Triton's
    names: "*bf16", "*fp8e4nv", "fp32", "i32", "i64". `constexprs` has the values of all other
    arguments: those of `tl.constexpr` arguments, those of integers that are always 1 (Triton makes
    them constants at a launch), and None for pointers that are not passed. Pointers are assumed to
    be aligned to 16 bytes. `multiples_of_16` names the integers that are multiples of 16, such as
    strides.

    `tile_bytes` and `tile_flops` are the work of one pass of the inner loop: the bytes read from
    the pool, and the operations of the matrix products without those on padding. A tool compares
    the loop's machine code with `tile_bytes` and `tile_flops`; a value of 0 is not compared."""

    name: str  # unique among all configurations: "paged_decode.bf16.d128.g4"
    function: Any  # a triton.JITFunction, made by triton.jit
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    multiples_of_16: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()  # instructions that the code for sm_90 must contain
    min_capability: tuple[int, int] = (8, 0)  # fp8 e4m3 needs (8, 9)
    min_programs: int = 1  # programs that must fit on a multiprocessor of sm_90
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
