# SPDX-License-Identifier: Apache-2.0
"""BlockCopier: copies of whole pages within the KV pool, on its device.

The copies serve requests that share a block and are about to write to it. The overwritten page may
have been evicted, so a copy must come after the connector has read the page; on a device the order
of the stream ensures this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...kernels.copy.copy_blocks import copy_blocks
from ..cache.kv_block import BlockCopy
from ..sampling.copies import to_device

_NONE = -1


class BlockCopier:
    """A copier of pages. Its constructor compiles the kernel, so the first copy does not."""

    def __init__(self, pool: Tensor, kernel: str) -> None:
        """`pool` is `[pages, …]`; the memory of each page is contiguous. `kernel`: see
        `kernels/kernel_choice.py`."""
        self._pool, self._kernel = pool, kernel
        self.copy_blocks([BlockCopy("", 0, 0, _NONE, _NONE)])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Queue the copies. Each page may be the target of one copy, and not a source and a target
        at once."""
        if not copies:
            return
        pairs = [[each.source for each in copies], [each.target for each in copies]]
        ids = to_device(np.array(pairs, np.int64), self._pool.device)
        copy_blocks(self._pool, ids[0], ids[1], kernel=self._kernel)
