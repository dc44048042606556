# SPDX-License-Identifier: Apache-2.0
"""BlockCopier: copies of whole pages within the KV pool, on its device.

A copy is needed when a request is about to write to a block that it shares with other requests. The
target page may be an evicted page that the connector still has to read, so the copy must run after
that read. On a GPU the stream keeps this order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...kernels.copy.copy_blocks import copy_blocks
from ..cache.kv_block import BlockCopy
from ..sampling.copies import to_device

_NONE = -1


class BlockCopier:
    """Copies pages of the KV pool. The constructor compiles the kernel, so that the first copy does
    not wait for the compiler."""

    def __init__(self, pool: Tensor, kernel: str) -> None:
        """`pool` is `[pages, …]`; the memory of each page is contiguous. `kernel` is a name from
        `kernels/kernel_choice.py`."""
        self._pool, self._kernel = pool, kernel
        self.copy_blocks([BlockCopy("", 0, 0, _NONE, _NONE)])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Queue the copies on the device's stream. Each page may be the target of at most one copy
        of a call, and must not be both a source and a target."""
        if not copies:
            return
        pairs = [[each.source for each in copies], [each.target for each in copies]]
        ids = to_device(np.array(pairs, np.int64), self._pool.device)
        copy_blocks(self._pool, ids[0], ids[1], kernel=self._kernel)
