# SPDX-License-Identifier: Apache-2.0
"""The number types of a model's computation, by the names that `--dtype` takes.

`auto` means the type that config.json names, if the device is fast in this type. A CPU without
units for a 16-bit type computes in float32, because the 16-bit type would be many times slower. On
a GPU, float32 and float64 become bfloat16: bfloat16 halves the bytes that a step reads, and tensor
cores compute in it. Only the functions that return a torch dtype import torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...tiers.settings.values import ConfigError

if TYPE_CHECKING:
    import torch

AUTO = "auto"
FP8_KV = "fp8_e4m3"

_NAMES = ("float64", "float32", "bfloat16", "float16")
_IN_TORCH = {FP8_KV: "float8_e4m3fn"}  # types with another name in torch
CPUINFO = Path("/proc/cpuinfo")
# Flags in /proc/cpuinfo (x86, then ARM) that show arithmetic units for a 16-bit type.
_UNITS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}


@dataclass(frozen=True, slots=True)
class ComputeDtype:
    """The number type of a model's computation, and the reason for its choice as a text for the
    log."""

    name: str  # the name in block layouts and model identities
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        return pool_dtype(self.name)


def choose_dtype(name: str, device_type: str = "cpu", stored: str | None = None) -> ComputeDtype:
    """Choose the number type for a value of `--dtype`. `stored` is the type that the checkpoint's
    config.json names; None if it names none. Raises ConfigError for an unknown name."""
    if name != AUTO:
        if name not in _NAMES:
            raise ConfigError(f"--dtype takes {' or '.join((AUTO, *_NAMES))}, not {name!r}")
        return ComputeDtype(name, "asked for")
    if device_type != "cpu":
        if stored == "float16":
            return ComputeDtype("float16", "the checkpoint's")
        why = "the checkpoint's" if stored == "bfloat16" else "what a GPU is quick in"
        return ComputeDtype("bfloat16", why)
    if stored is None:
        return ComputeDtype("float32", "config.json names none")
    if stored not in _UNITS or stored in quick_cpu_types():
        return ComputeDtype(stored, "the checkpoint's")
    units = " or ".join(_UNITS[stored][:2])
    return ComputeDtype(
        "float32",
        f"since the checkpoint's {stored} is slow on this CPU, which has no {units}; --dtype "
        f"{stored} takes half the memory",
    )


def compute_dtype(name: str, device_type: str = "cpu", stored: str | None = None) -> torch.dtype:
    return choose_dtype(name, device_type, stored).dtype


def planned_dtype(name: str, stored: str | None) -> str:
    """Return the name of the number type for a memory plan. `auto` gives the checkpoint's type even
    if this CPU is slow in it, since another machine may serve the model."""
    return stored if name == AUTO and stored is not None else choose_dtype(name).name


@cache
def quick_cpu_types(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the 16-bit types for which this CPU has arithmetic units; the result is empty if
    `cpuinfo` cannot be read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    # All processors are assumed to equal the first one in /proc/cpuinfo.
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    words = set(flags.partition(":")[2].split())
    return frozenset(name for name, units in _UNITS.items() if words.intersection(units))


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a dtype in block layouts and model identities."""
    return str(dtype).removeprefix("torch.")


def kv_dtype_name(wanted: str, compute: torch.dtype | str) -> str:
    """The name of the dtype of K and V for a value of `--kv-cache-dtype`; `auto` gives the
    computation's dtype."""
    return dtype_name(compute) if wanted == AUTO else wanted


def pool_dtype(kv_dtype: str) -> torch.dtype:
    """The torch dtype whose name in a block layout is `kv_dtype`."""
    import torch

    found: torch.dtype = getattr(torch, _IN_TORCH.get(kv_dtype, kv_dtype))
    return found
