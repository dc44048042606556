# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: the memory-mapped tensors of a safetensors model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .stored_tensors import StoredTensors

CPU = torch.device("cpu")


class Checkpoint(StoredTensors):
    """The open shards (weight files) of a model, read to `device` without an extra copy. Tensors
    stay valid after the checkpoint is closed, because each tensor keeps the file mapping open."""

    def __init__(
        self,
        path: Path,
        device: torch.device = CPU,
        name_of: Callable[[str], str | None] | None = None,
    ) -> None:
        self.device = device
        super().__init__(path, name_of, framework="pt", device=str(device))

    def has_tensor(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a tensor as `dtype`. On the CPU, the result is a view of the mapped file if the
        stored type is `dtype`."""
        tensor: Tensor = self._where[name].get_tensor(self._stored[name])
        return tensor.to(dtype)
