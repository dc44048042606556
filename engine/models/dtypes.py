# SPDX-License-Identifier: Apache-2.0
"""The number types models are computed in, by the names of the command line.

Knows nothing of models. `auto` is float32 on the CPU, whatever the checkpoint holds: most CPUs have
no bfloat16 units, and the gap between the two best logits is often smaller than bfloat16 resolves,
so that greedy text would depend on the batch. On a GPU it is bfloat16, which halves what a step
reads and is what its matrix units compute in.
"""

from __future__ import annotations

import torch

from ..config_values import ConfigError

AUTO = "auto"
FP8_KV = "fp8_e4m3"

_BY_NAME = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_AUTO = {"cpu": torch.float32, "cuda": torch.bfloat16}
_POOL_TYPES = _BY_NAME | {FP8_KV: torch.float8_e4m3fn}


def compute_dtype(name: str, device_type: str = "cpu") -> torch.dtype:
    """The torch type for a `--dtype`; raises ConfigError for an unknown name."""
    if name == AUTO:
        return _AUTO[device_type]
    if name not in _BY_NAME:
        raise ConfigError(f"--dtype takes {' or '.join((AUTO, *_BY_NAME))}, not {name!r}")
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type as block layouts and identities write it."""
    return str(dtype).removeprefix("torch.")


def kv_dtype_name(wanted: str, compute: torch.dtype) -> str:
    """The name of K and V's type for a `--kv-cache-dtype`; `auto` is that of the computation."""
    return dtype_name(compute) if wanted == AUTO else wanted


def pool_dtype(kv_dtype: str) -> torch.dtype:
    """The torch type of a pool whose layout names this one."""
    return _POOL_TYPES[kv_dtype]
