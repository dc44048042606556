# SPDX-License-Identifier: Apache-2.0
"""Placement: the settings of the worker, which are the device of the model and its kernels.

`engine/core/` makes the placement from the engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....kernels.attention.gathered_prefill import LIBRARIES
from ...config.engine_config import DEFAULT_GPU_SHARE
from ...models.checkpoint.checkpoint import CPU
from ...models.dtypes import FP8_KV

# Other values: `triton`, and the names in LIBRARIES (kernels, with this library for long chunks).
AUTO, GATHER, KERNELS = "auto", "gather", "kernels"


def with_index(device: torch.device) -> torch.device:
    """Return the device with its index, which parts of torch need: `cuda` becomes `cuda:0`."""
    return device if device.type == "cpu" else torch.device(device.type, device.index or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The device of a model and its kernels. The defaults are for a CPU."""

    device: torch.device = CPU
    kv_cache_dtype: str = AUTO  # auto: the type of the computation
    attention_backend: str = AUTO
    strict_kernels: bool = False  # on a GPU, refuse to replace a kernel by its plain twin
    record_decodes: bool = True  # capture CUDA graphs, if the device can
    compile_elementwise: bool = False
    random_weights: bool = False
    memory_share: float = (
        DEFAULT_GPU_SHARE  # share of a GPU's memory, for weights, steps and the KV pool together
    )

    @property
    def uses_kernels(self) -> bool:
        """Whether `KernelAttention` computes attention, by Triton kernels or plain kernels.
        `attention_backend` decides; `auto` means on a GPU, and on a CPU for a float8 pool, which
        other attention cannot read."""
        if self.attention_backend != AUTO:
            return self.attention_backend != GATHER
        return self.device.type != "cpu" or self.kv_cache_dtype == FP8_KV

    @property
    def may_use_library(self) -> bool:
        """Whether a library may compute the attention of long chunks: on a GPU, if
        `attention_backend` is `auto` or names a library."""
        is_open = self.attention_backend in (AUTO, *LIBRARIES)
        return is_open and self.device.type != "cpu"
