# SPDX-License-Identifier: Apache-2.0
"""Memory that is kept between calls of the compiled CPU library."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .huge_pages import memory_in_huge_pages


class Workspace:
    """Memory for partial results and tiles of a call. The memory grows to the size of the largest
    call and is kept, because new pages would cost more time than the computation."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes + num_bytes // 2, dtype=torch.uint8)
        return self._memory


class ResultMemory:
    """Memory that is reused for large results, because the system would need time to clear new
    pages. A result gets separate memory while an earlier result is still in use."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._borrower: weakref.ref[object] = weakref.ref(_Nobody())

    def lend(self, num_bytes: int) -> Tensor:
        """Return uninitialised uint8 `[num_bytes]`, in huge pages if the system has them."""
        if self._borrower() is not None:
            return memory_in_huge_pages(num_bytes)
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before more is allocated
            self._memory = memory_in_huge_pages(num_bytes)
        # The array `lent` lives as long as any tensor or array over its memory.
        lent = self._memory.numpy()[:num_bytes]
        self._borrower = weakref.ref(lent)
        return torch.from_numpy(lent)


class _Nobody:
    """An object that is freed at once; its dead weak reference means that memory is unused."""
