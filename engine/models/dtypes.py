# SPDX-License-Identifier: Apache-2.0
"""The number types models are computed in, by the names of the command line.

Knows nothing of models. `auto` is float32 on the CPU, whatever the checkpoint holds: most CPUs have
no bfloat16 units, and the gap between the two best logits is often smaller than bfloat16 resolves,
so that greedy text would depend on the batch.
"""

from __future__ import annotations

import torch

from ..config import ConfigError

_BY_NAME = {
    "auto": torch.float32,
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(name: str) -> torch.dtype:
    """The torch type for a `--dtype`; raises ConfigError for an unknown name."""
    if name not in _BY_NAME:
        raise ConfigError(f"--dtype takes {' or '.join(_BY_NAME)}, not {name!r}")
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a type as block layouts and identities write it."""
    return str(dtype).removeprefix("torch.")
