# SPDX-License-Identifier: Apache-2.0
"""The KV pool: one tensor, allocated once, in which every block is one contiguous chunk.

Block 0 is the null block: it stands for "nothing here" in tables and paddings, is never written,
and so holds zeros for ever.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ...tiers.block import BlockLayout
from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import ConfigError
from ..models.checkpoint.checkpoint import CPU
from ..models.dtypes import pool_dtype
from .pool_demand import SHARE_FLAG, check_memory
from .pool_memory import zeroed_memory


class KvPool:
    """`tensor` is `[num_blocks, num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]`,
    contiguous, zeroed (on the CPU by `pool_memory.py`). `kernel_tensor` is the same memory as
    attention sees it, and `kernel_layout` how a block lies there: as above, unless attention reads
    smaller blocks, of which a block holds several."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        device: torch.device = CPU,
        kernel_block_size: int | None = None,
    ) -> None:
        """`kernel_block_size` divides the tokens of a block. Raises ConfigError where the memory
        cannot be had."""
        if num_blocks < 2:
            raise ConfigError(
                f"the KV pool needs at least 2 blocks (one is the null block), not {num_blocks}"
            )
        # Asked again, since the tiers may have taken theirs: what is promised beyond the memory
        # ends with the process being killed, not with an error.
        if device.type == "cpu":
            check_memory(layout.page_bytes, num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        shape, dtype = (num_blocks, *block_shape(layout)), pool_dtype(layout.kv_dtype)
        try:
            if device.type == "cpu":
                memory = zeroed_memory(math.prod(shape) * dtype.itemsize)
                self.tensor = memory.view(dtype).view(shape)
            else:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, OSError) as error:  # what torch and the system raise without memory
            flags = "--kv-cache-memory-bytes"
            if device.type != "cpu":
                flags += f", --num-blocks or {SHARE_FLAG}"
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks ({rough_size(num_blocks * layout.page_bytes)}) "
                f"does not fit into {_memory_of(device)}; lower {flags}"
            ) from error
        # Of a block table, for each block of the pool.
        self.entries_per_block = layout.block_size // (kernel_block_size or layout.block_size)
        self.kernel_layout = replace(layout, block_size=kernel_block_size or layout.block_size)
        self.kernel_tensor = self.tensor.view(-1, *block_shape(self.kernel_layout))


def block_shape(layout: BlockLayout) -> tuple[int, ...]:
    """The shape of one block in a pool."""
    return layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim


def _memory_of(device: torch.device) -> str:
    return "memory" if device.type == "cpu" else f"the memory of {device}"
