# SPDX-License-Identifier: Apache-2.0
"""Random weights in place of a checkpoint's, made where they are used: for benchmarks and trials.

A directory with a config.json is then a model, whatever its size. The numbers are the same in every
start on one kind of device, so what tiers keep stays of use; on another kind they are others. Knows
nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SEED = 20261
SPREAD = 0.02  # what models are initialised with


class RandomTensors:
    """Reads like a checkpoint. The order of the reads decides the numbers."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.device = device
        self._shapes = shapes
        self._generator = torch.Generator(device).manual_seed(SEED)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Ones for a norm, zeros for a bias, normal numbers for a matrix."""
        shape = self._shapes[name]
        if len(shape) == 1:
            fill = 0.0 if name.endswith(".bias") else 1.0
            return torch.full(shape, fill, dtype=dtype, device=self.device)
        made = torch.empty(shape, dtype=dtype, device=self.device)
        return made.normal_(0.0, SPREAD, generator=self._generator)
