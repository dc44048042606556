# SPDX-License-Identifier: Apache-2.0
"""The block tables of one cache group whose layers attend to everything before a token.

A table only ever grows at its end: token `i` of a request lies in block `i // block_size` of its
table, for as long as it holds one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request
from .block_pool import BlockPool
from .kv_block import KVCacheBlock


class FullAttentionManager:
    """Tables by request id; a request without blocks has none."""

    def __init__(self, pool: BlockPool, block_size: int, group_id: int) -> None:
        self.group_id = group_id
        self._pool = pool
        self._block_size = block_size
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}  # leading blocks that have had their names

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The blocks of a request, in the order of its tokens."""
        return self._tables.get(request_id, ())

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks in which `num_tokens` have a place."""
        return -(-num_tokens // self._block_size)

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Blocks to add until `num_tokens` have a place."""
        return max(0, self.num_blocks_for(num_tokens) - len(self.table(request_id)))

    def attach(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Begin a table with blocks found by their names."""
        if self._tables.get(request_id):
            raise RuntimeError(f"request {request_id} has blocks, so no hits can go before them")
        self._pool.touch(hits)
        self._tables[request_id] = list(hits)
        self._num_cached[request_id] = len(hits)

    def extend(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Add held blocks at the end."""
        self._tables.setdefault(request_id, []).extend(blocks)

    def cache(self, request: Request, num_tokens: int, computed: bool) -> None:
        """Name the full blocks among the first `num_tokens` that have no name yet; none where the
        request has no digests."""
        request_id, digests, pool = request.request_id, request.block_hashes, self._pool
        known = self._num_cached.get(request_id, 0)
        full = min(num_tokens // self._block_size, len(digests))
        if full > known:
            blocks = self._tables[request_id][known:full]
            pool.cache_full_blocks(digests[known:full], blocks, self.group_id, computed)
            self._num_cached[request_id] = full
            if pool.observer is not None:
                pool.observer.named(request, self.group_id, known, [b.block_id for b in blocks])

    def name_tail(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        """Name the block that the last of the first `num_tokens`, all computed, lies in."""
        block = self._tables[request_id][(num_tokens - 1) // self._block_size]
        self._pool.name_computed(digest, block, self.group_id)

    def named_beyond(self, request_id: str, num_tokens: int) -> Sequence[KVCacheBlock]:
        """The blocks after the first `num_tokens` that have had their names."""
        first, end = num_tokens // self._block_size, self._num_cached.get(request_id, 0)
        return self.table(request_id)[first:end]

    def take_back(self, request_id: str, num_tokens: int, num_blocks: int) -> None:
        """The blocks after the first `num_tokens` have lost their names, and the last `num_blocks`
        of the table are given back."""
        known = self._num_cached.get(request_id, 0)
        self._num_cached[request_id] = min(known, num_tokens // self._block_size)
        if num_blocks:
            table = self._tables[request_id]
            self._pool.free_blocks(table[: -num_blocks - 1 : -1])
            del table[-num_blocks:]

    def rename(self, request_id: str, holder: str) -> None:
        """The table of a request is another holder's from now on."""
        if (blocks := self._tables.pop(request_id, None)) is not None:
            self._tables[holder] = blocks
        if (known := self._num_cached.pop(request_id, None)) is not None:
            self._num_cached[holder] = known

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back, the last one first."""
        blocks = self._tables.pop(request_id, None)
        self._num_cached.pop(request_id, None)
        if blocks:
            blocks.reverse()
            self._pool.free_blocks(blocks)
