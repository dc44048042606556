# SPDX-License-Identifier: Apache-2.0
"""PoolDemand: the number of KV pool blocks that requests need, and checks of a pool's size against
it. This module only computes, and needs no torch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import MAX_BLOCKS, MIB, ConfigError
from ...tiers.slab.host_memory import available_memory_bytes
from ..cache.group_spec import CacheGroups

SHARE_FLAG = "--gpu-memory-utilization"


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """The blocks that requests need, counted over all layers like the pool's size. In layers with a
    window, a request has fewer pages than its tokens would fill."""

    groups: CacheGroups
    most_step_tokens: int  # for one request in one step

    @property
    def block_bytes(self) -> int:
        return self.groups.layout.place_bytes * self.groups.num_places

    @property
    def block_size(self) -> int:
        return self.groups.layout.block_size

    def blocks(self, num_tokens: int) -> int:
        """Return the number of blocks, including the null block, of the smallest pool that can
        serve a request of `num_tokens` tokens."""
        pages = self.groups.most_pages(num_tokens, self.most_step_tokens) + 1
        return -(-pages * self.groups.layout.num_layers // self.groups.num_places)

    def longest(self, num_blocks: int, at_most: int) -> int:
        """Return the length in tokens of the longest request, up to `at_most`, that a pool of
        `num_blocks` blocks can serve. A result below `at_most` is in whole blocks; 0 means that the
        pool can serve no request."""
        if self.blocks(at_most) <= num_blocks:
            return at_most
        size = self.block_size
        whole = range(1, -(-at_most // size) + 1)
        return bisect_right(whole, num_blocks, key=lambda count: self.blocks(count * size)) * size


def num_blocks_in(block_bytes: int, memory_bytes: int) -> int:
    """Return how many blocks of `block_bytes` fit into `memory_bytes`, including the null block."""
    return memory_bytes // block_bytes


def check_pool_size(
    demand: PoolDemand, num_blocks: int, max_model_len: int, *, on_host: bool = True
) -> None:
    """Raise ConfigError if the pool cannot hold one request of `max_model_len` tokens. With
    `on_host`, also raise it if the host lacks the memory for the pool. This check must come before
    any allocation for each block."""
    needed = demand.blocks(max_model_len)
    if num_blocks >= needed:
        if on_host:
            check_memory(demand.block_bytes, num_blocks)
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


def check_memory(block_bytes: int, num_blocks: int) -> None:
    """Raise ConfigError if the pool does not fit into the host's free memory."""
    size, available = num_blocks * block_bytes, available_memory_bytes()
    most = MAX_BLOCKS if available is None else min(MAX_BLOCKS, available // block_bytes)
    if num_blocks > most:
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks takes {rough_size(size)}, and this machine can hold "
            f"one of {most} blocks ({rough_size(most * block_bytes)}); lower --num-blocks or "
            "--kv-cache-memory-bytes"
        )
