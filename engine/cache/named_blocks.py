# SPDX-License-Identifier: Apache-2.0
"""NamedBlocks: which blocks of requests have names, and what blocks of given tokens are called.

    tokens of a block    its digest, which covers those before it too (`block_hash.py`)
    page in the pool     digest and cache group, its key

Blocks are named from the first on, each once, when its tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...connector.page_names import group_suffix
from ..request.request import Request
from .block_pool import BlockPool
from .group_manager import GroupManager
from .kv_block import GroupBlocks, KVCacheBlock, page_ids


class NamedBlocks:
    """The names of blocks that requests hold. Called by the engine's step thread only.

    `hashes_per_block`: the digests of a request that come for each of its blocks, of which the last
    names it. The manager removes the count of a request together with its blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[GroupManager],
        block_size: int,
        hashes_per_block: int = 1,
    ) -> None:
        self.hashes_per_block = hashes_per_block
        self._pool, self._groups, self._block_size = pool, groups, block_size
        self.counts: dict[str, int] = {}  # leading blocks that have had names, by request

    def name_full(
        self, request: Request, tables: GroupBlocks, num_tokens: int, *, computed: bool
    ) -> None:
        """Name the full blocks among the first `num_tokens` that have no name yet; none where the
        request has no digests."""
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

    def name_tail(self, request: Request, tables: GroupBlocks) -> None:
        """Name the block that the prompt's end lies in, if it is not a full one. The prompt has
        been computed, and nothing more will be written for the request."""
        if tail := request.prompt_tail_hash():
            index = (request.num_prompt_tokens - 1) // self._block_size
            for group, table in zip(self._groups, tables, strict=True):
                self._pool.name_computed(tail, table[index], group.group_id)

    def revoke_names(self, request_id: str, tables: GroupBlocks, num_blocks: int) -> None:
        """Blocks that the step being scheduled named, behind the first `num_blocks`, lose their
        names. Raises RuntimeError where another request of the step has found one of them, and
        nothing changes."""
        known = self.counts.get(request_id, 0)
        self._pool.revoke_names([block for table in tables for block in table[num_blocks:known]])
        self.counts[request_id] = min(known, num_blocks)

    def of_blocks(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """The digests of a request that name a block: the last of each block's."""
        each = self.hashes_per_block
        return digests if each == 1 else digests[each - 1 :: each]

    def of_request(self, request: Request) -> list[bytes]:
        """The digests of all full blocks of a request, its output's too."""
        return list(self.of_blocks(request.block_hashes))

    def of_prompt(self, request: Request, *, with_tail: bool = True) -> list[bytes]:
        """The digests of the blocks of a prompt; its end has one of its own where it fills none."""
        blocks = self.of_blocks(request.block_hashes)
        digests = list(blocks[: request.num_prompt_tokens // self._block_size])
        tail = request.prompt_tail_hash() if with_tail else b""
        return [*digests, tail] if tail else digests

    def page_keys(self, digests: Sequence[bytes], num_tokens: int = 0) -> list[bytes]:
        """The names of the pages of every group, head first in each, as the pool keeps them: those
        that the token behind the first `num_tokens`, or any later one, reads."""
        return [
            digest + group_suffix(group.group_id + place)
            for group in self._groups
            for place in range(self._pool.width)
            for digest in digests[group.first_needed(num_tokens) :]
        ]

    def _report(
        self, request: Request, group_id: int, first: int, blocks: Sequence[KVCacheBlock]
    ) -> None:
        # Null blocks come before all others.
        ids = [block.block_id for block in blocks if not block.is_null]
        first += len(blocks) - len(ids)
        if self._pool.observer is not None and ids:
            for place in range(self._pool.width):
                pages = page_ids(ids, place)
                self._pool.observer.named(request, group_id + place, first, pages)
