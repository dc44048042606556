# SPDX-License-Identifier: Apache-2.0
"""The KV pool: one tensor, allocated once, in which every block is one contiguous chunk.

Block 0 is the null block: it stands for "nothing here" in tables and paddings, is never written,
and so holds zeros for ever.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace

import torch

from ...tiers.block import BlockLayout
from ...tiers.host_memory import available_memory_bytes
from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import MAX_BLOCKS, MIB, ConfigError
from ..cache.group_spec import CacheGroups
from ..models.checkpoint.checkpoint import CPU
from ..models.dtypes import pool_dtype
from .pool_memory import zeroed_memory

SHARE_FLAG = "--gpu-memory-utilization"


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
            _check_memory(layout.page_bytes, num_blocks)
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


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What requests take of a pool, in blocks over all layers, which is how a pool's size is given:
    where layers have windows, a request holds fewer pages than it has tokens for."""

    groups: CacheGroups
    most_step_tokens: int  # of one request in one step

    @property
    def block_bytes(self) -> int:
        """One block over all layers."""
        layout = self.groups.layout
        return layout.page_bytes // layout.num_layers * self.groups.num_layers

    @property
    def block_size(self) -> int:
        """Its tokens."""
        return self.groups.layout.block_size

    def blocks(self, num_tokens: int) -> int:
        """The blocks of the smallest pool that can serve a request of so many tokens, the null
        block included."""
        pages = self.groups.most_pages(num_tokens, self.most_step_tokens) + 1
        return -(-pages * self.groups.layout.num_layers // self.groups.num_layers)

    def longest(self, num_blocks: int, at_most: int) -> int:
        """The tokens of the longest request, up to `at_most`, that a pool of so many blocks can
        serve: whole blocks, unless it is `at_most`; 0 for none."""
        if self.blocks(at_most) <= num_blocks:
            return at_most
        size = self.block_size
        whole = range(1, -(-at_most // size) + 1)
        return bisect_right(whole, num_blocks, key=lambda count: self.blocks(count * size)) * size


def num_blocks_in(block_bytes: int, memory_bytes: int) -> int:
    """Blocks of so many bytes, the null block included, that fit into `memory_bytes`."""
    return memory_bytes // block_bytes


def check_pool_size(
    demand: PoolDemand, num_blocks: int, max_model_len: int, device: torch.device = CPU
) -> None:
    """Raise ConfigError where one request of `max_model_len` tokens could never be computed, or
    where the host's memory is not there. To be asked before anything is built for each block."""
    needed = demand.blocks(max_model_len)
    if num_blocks >= needed:
        if device.type == "cpu":
            _check_memory(demand.block_bytes, num_blocks)
        return
    fits = demand.longest(num_blocks, max_model_len)
    lower = f", or lower --max-model-len to {fits}" if fits else ""
    size = needed * demand.block_bytes
    raise ConfigError(
        f"a KV pool of {num_blocks} blocks ({rough_size(num_blocks * demand.block_bytes)}) cannot "
        f"hold one request of {max_model_len} tokens, which takes {needed} blocks "
        f"({rough_size(size)}); give --num-blocks {needed} or --kv-cache-memory-bytes "
        f"{-(-size // MIB)}MiB{lower}"
    )


def _check_memory(block_bytes: int, num_blocks: int) -> None:
    size, available = num_blocks * block_bytes, available_memory_bytes()
    most = MAX_BLOCKS if available is None else min(MAX_BLOCKS, available // block_bytes)
    if num_blocks > most:
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks takes {rough_size(size)}, and this machine can hold "
            f"one of {most} blocks ({rough_size(most * block_bytes)}); lower --num-blocks or "
            "--kv-cache-memory-bytes"
        )
