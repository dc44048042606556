# SPDX-License-Identifier: Apache-2.0
"""BlockKeys: gives the blocks of requests the keys by which prefix lookups find the blocks.

    block of tokens      has a digest, which covers all earlier tokens (`block_hash.py`)
    page in the pool     has a key: the digest and the cache group

A block of a request is cached once, when all its tokens are known, in the order of the blocks."""

from __future__ import annotations

from collections.abc import Sequence

from ...connector.page_keys import group_suffix
from ..request.request import Request
from .block_pool import BlockPool
from .group_manager import GroupManager
from .kv_block import GroupBlocks, KVCacheBlock, page_ids


class BlockKeys:
    """Gives keys to blocks that requests hold. Called by the engine's step thread only.

    A request has `hashes_per_block` digests per block; a key begins with a block's last digest.
    `KVCacheManager` removes a request from `counts` when the request's blocks are released."""

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[GroupManager],
        block_size: int,
        hashes_per_block: int = 1,
    ) -> None:
        self.hashes_per_block = hashes_per_block
        self._pool, self._groups, self._block_size = pool, groups, block_size
        self.counts: dict[str, int] = {}  # request id → leading blocks that were cached

    def cache_full_blocks(
        self, request: Request, tables: GroupBlocks, num_tokens: int, *, computed: bool
    ) -> None:
        """Cache the full, uncached blocks of the first `num_tokens`, if the request has digests."""
        pool, digests = self._pool, request.block_hashes
        each, known = self.hashes_per_block, self.counts.get(request.request_id, 0)
        full = min(num_tokens // self._block_size, len(digests) // each)
        if full > known and pool.enable_caching:
            wanted = digests[(known + 1) * each - 1 : full * each : each]
            for group, table in zip(self._groups, tables, strict=True):
                blocks = table[known:full]
                pool.cache_full_blocks(wanted, blocks, group.group_id, computed)
                if pool.observer is not None:
                    self._report(request, group.group_id, known, blocks)
            self.counts[request.request_id] = full

    def cache_tail(self, request: Request, tables: GroupBlocks) -> None:
        """Cache a partly filled block at the prompt's end; see `KVCacheManager.cache_tail`."""
        if tail := request.prompt_tail_hash():
            index = (request.num_prompt_tokens - 1) // self._block_size
            for group, table in zip(self._groups, tables, strict=True):
                self._pool.cache_computed(tail, table[index], group.group_id)

    def revoke_caching(self, request_id: str, tables: GroupBlocks, num_blocks: int) -> None:
        """Uncache the blocks after the first `num_blocks` that the step being scheduled cached. If
        another request of the step has found such a block, raise RuntimeError and change
        nothing."""
        known = self.counts.get(request_id, 0)
        self._pool.revoke_caching([block for table in tables for block in table[num_blocks:known]])
        self.counts[request_id] = min(known, num_blocks)

    def of_blocks(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Return the digests with which the keys of blocks begin: the last digest of each block."""
        each = self.hashes_per_block
        return digests if each == 1 else digests[each - 1 :: each]

    def of_request(self, request: Request) -> list[bytes]:
        """Return the digests of all full blocks of a request, including its output."""
        return list(self.of_blocks(request.block_hashes))

    def of_prompt(self, request: Request, *, with_tail: bool = True) -> list[bytes]:
        """Return the digests of a prompt's blocks; `with_tail` adds a partly filled last block."""
        blocks = self.of_blocks(request.block_hashes)
        digests = list(blocks[: request.num_prompt_tokens // self._block_size])
        tail = request.prompt_tail_hash() if with_tail else b""
        return [*digests, tail] if tail else digests

    def page_keys(self, digests: Sequence[bytes], num_tokens: int = 0) -> list[bytes]:
        """Return the page keys, in all groups, of the blocks that any token from index `num_tokens`
        on reads. Within a group, the first block comes first."""
        return [
            digest + group_suffix(group.group_id + place)
            for group in self._groups
            for place in range(self._pool.width)
            for digest in digests[group.first_needed(num_tokens) :]
        ]

    def _report(
        self, request: Request, group_id: int, first: int, blocks: Sequence[KVCacheBlock]
    ) -> None:
        # Null blocks stand only before all other blocks.
        ids = [block.block_id for block in blocks if not block.is_null]
        first += len(blocks) - len(ids)
        if self._pool.observer is not None and ids:
            for place in range(self._pool.width):
                pages = page_ids(ids, place)
                self._pool.observer.named(request, group_id + place, first, pages)
