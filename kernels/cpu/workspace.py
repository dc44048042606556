# SPDX-License-Identifier: Apache-2.0
"""Memory for calls of the compiled library, kept from one to the next."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from .huge_pages import memory_in_huge_pages


class Workspace:
    """Memory for partial results and tiles, which grows to the largest request and is kept, since
    fresh pages cost more than the work in them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, num_bytes: int) -> Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes + num_bytes // 2, dtype=torch.uint8)
        return self._memory


class ResultMemory:
    """Memory of large results, lent to one after the other: the system clears new pages first. A
    result that comes while another one lives has memory of its own."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._borrower: weakref.ref[object] = weakref.ref(_Nobody())

    def lend(self, num_bytes: int) -> Tensor:
        """Return `[num_bytes]` uint8, not set, in huge pages if there are some."""
        if self._borrower() is not None:
            return memory_in_huge_pages(num_bytes)
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before there is more
            self._memory = memory_in_huge_pages(num_bytes)
        # Lives as long as any tensor or array over this memory.
        lent = self._memory.numpy()[:num_bytes]
        self._borrower = weakref.ref(lent)
        return torch.from_numpy(lent)


class _Nobody:
    """A borrower that is gone at once."""
