# SPDX-License-Identifier: Apache-2.0
"""The number types models are computed in, by the names of the command line.

`auto` is the type that the checkpoint's config.json names, where the device is quick in it. A CPU
without units for a 16-bit type computes in float32: it would be many times slower otherwise. On a
GPU float32 and float64 become bfloat16, which halves what a step reads and is what its matrix units
compute in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from ...tiers.settings.values import ConfigError

AUTO = "auto"
FP8_KV = "fp8_e4m3"

_BY_NAME = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_POOL_TYPES = _BY_NAME | {FP8_KV: torch.float8_e4m3fn}
CPUINFO = Path("/proc/cpuinfo")
# Names in /proc/cpuinfo of the units that multiply a type: on x86, then on ARM.
_UNITS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}


@dataclass(frozen=True, slots=True)
class ComputeDtype:
    """What a model is computed in, and why, in words for the log."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        """The type's name in block layouts and identities."""
        return dtype_name(self.dtype)


def choose_dtype(name: str, device_type: str = "cpu", stored: str | None = None) -> ComputeDtype:
    """The type for a `--dtype`; `stored` is that of the checkpoint, None where it does not say.
    Raises ConfigError for an unknown name."""
    if name != AUTO:
        if name not in _BY_NAME:
            raise ConfigError(f"--dtype takes {' or '.join((AUTO, *_BY_NAME))}, not {name!r}")
        return ComputeDtype(_BY_NAME[name], "asked for")
    if device_type != "cpu":
        if stored == "float16":
            return ComputeDtype(torch.float16, "the checkpoint's")
        why = "the checkpoint's" if stored == "bfloat16" else "what a GPU is quick in"
        return ComputeDtype(torch.bfloat16, why)
    if stored is None:
        return ComputeDtype(torch.float32, "config.json names none")
    if stored not in _UNITS or stored in quick_cpu_types():
        return ComputeDtype(_BY_NAME[stored], "the checkpoint's")
    units = " or ".join(_UNITS[stored][:2])
    return ComputeDtype(
        torch.float32,
        f"since the checkpoint's {stored} is slow on this CPU, which has no {units}; --dtype "
        f"{stored} takes half the memory",
    )


def compute_dtype(name: str, device_type: str = "cpu", stored: str | None = None) -> torch.dtype:
    """`choose_dtype` without the reason."""
    return choose_dtype(name, device_type, stored).dtype


def planned_dtype(name: str, stored: str | None) -> str:
    """The name of the type that a plan reckons in: the machine that serves need not be this one, so
    `auto` is the checkpoint's."""
    return stored if name == AUTO and stored is not None else dtype_name(compute_dtype(name))


@cache
def quick_cpu_types(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The 16-bit types that this CPU has units for; none where it does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    # The first processor speaks for all.
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    words = set(flags.partition(":")[2].split())
    return frozenset(name for name, units in _UNITS.items() if words.intersection(units))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type as block layouts and identities write it."""
    return str(dtype).removeprefix("torch.")


def kv_dtype_name(wanted: str, compute: torch.dtype) -> str:
    """The name of K and V's type for a `--kv-cache-dtype`; `auto` is that of the computation."""
    return dtype_name(compute) if wanted == AUTO else wanted


def pool_dtype(kv_dtype: str) -> torch.dtype:
    """The torch type of a pool whose layout names this one."""
    return _POOL_TYPES[kv_dtype]
