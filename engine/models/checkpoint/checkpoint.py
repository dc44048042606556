# SPDX-License-Identifier: Apache-2.0
"""The tensors of a safetensors model, memory-mapped; `stored_tensors.py` checks them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .stored_tensors import StoredTensors

CPU = torch.device("cpu")


class Checkpoint(StoredTensors):
    """Open shards, read to `device` without an extra copy. Tensors stay valid after the checkpoint
    is closed, because the file mapping lives as long as they do."""

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
        """Read a tensor as `dtype`; on the CPU a view of the mapped file if the types agree."""
        tensor: Tensor = self._where[name].get_tensor(self._stored[name])
        return tensor.to(dtype)
