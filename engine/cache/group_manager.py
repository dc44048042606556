# SPDX-License-Identifier: Apache-2.0
"""Group managers decide which blocks a kind of attention needs, and which it releases. One manager
serves all cache groups that share blocks, often a single group.

Token `i` of a request lies in block `i // block_size` of its table. A table only grows at its end.
If the layers of a group see only nearby tokens, blocks that no later token reads are released, and
the null block replaces them:

    table of a window    0  0  0  17  4  9        held: 17, 4, 9

A *hit* of n blocks needs the blocks that the next token reads: with full attention all n blocks,
with local attention the last blocks.

`KVCacheManager` owns the tables. The group managers differ by the kind of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..models.layer_attention import LayerAttention
from .kv_block import KVCacheBlock


class GroupManager(ABC):
    """The block rules of one kind of attention. All counts are in blocks, not pages. A table lists
    the blocks of a request in token order, null blocks included; `hits` will become the start of a
    table."""

    def __init__(
        self, group_id: int, attention: LayerAttention, block_size: int, most_step_tokens: int
    ) -> None:
        """`group_id` is the first of the groups that share the blocks. A step computes at most
        `most_step_tokens` tokens of a request."""
        self.group_id = group_id
        self.attention = attention
        self._block_size = block_size
        self._most_step_tokens = most_step_tokens

    def most_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at once, without sharing."""
        return self.attention.most_blocks(num_tokens, self._block_size, self._most_step_tokens)

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """Return the index of the first block that any token from index `num_tokens` on reads."""

    @abstractmethod
    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        """Return the longest hit, of at most `most_blocks` blocks, that uses only blocks for whose
        index `is_there` is true."""

    @abstractmethod
    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        """Return the most free blocks that a request takes until `num_tokens` are computed. Free
        blocks among the hits count, because the request does not hold them yet."""

    @abstractmethod
    def num_reserved(self, table: Sequence[KVCacheBlock], num_tokens: int) -> int:
        """Return the most blocks that a request takes until `num_tokens` are computed, even if
        other requests keep holding the shared blocks that it releases."""

    @abstractmethod
    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        """Return the number of blocks of a new request with `hits` and `num_tokens` to compute: the
        free hits that the request takes, plus the blocks to reserve for the request."""

    @abstractmethod
    def num_given_back(self, table: Sequence[KVCacheBlock], first: int) -> int:
        """Return how many of the blocks that `prune` returns become free when they are released."""

    @abstractmethod
    def prune(self, table: list[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        """Replace the blocks before `first`, which no later token reads, by null blocks. Return the
        replaced blocks; the caller releases them in this order."""

    @abstractmethod
    def can_go_on(self, table: Sequence[KVCacheBlock], num_computed: int) -> bool:
        """Whether the table has all blocks that the token at index `num_computed` reads."""


def num_free(blocks: Sequence[KVCacheBlock]) -> int:
    """Count the blocks without a holder; null blocks do not count."""
    return sum([not (block.ref_cnt or block.is_null) for block in blocks])


class FullAttentionManager(GroupManager):
    """Full attention: a token reads all tokens before it, so every block is needed."""

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        return next((i for i in range(most_blocks) if not is_there(i)), most_blocks)

    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        # A hit that another request holds takes no free block.
        return max(0, -(-num_tokens // self._block_size) - len(table) - len(hits)) + num_free(hits)

    def num_reserved(self, table: Sequence[KVCacheBlock], num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(table))

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(hits)) + num_free(hits)

    def num_given_back(self, table: Sequence[KVCacheBlock], first: int) -> int:
        return 0

    def prune(self, table: list[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        return []

    def can_go_on(self, table: Sequence[KVCacheBlock], num_computed: int) -> bool:
        return True


class LocalAttentionManager(GroupManager):
    """Attention to nearby tokens only, in a window or a chunk. `null` is the pool's null block."""

    def __init__(
        self,
        group_id: int,
        attention: LayerAttention,
        block_size: int,
        most_step_tokens: int,
        null: KVCacheBlock,
    ) -> None:
        super().__init__(group_id, attention, block_size, most_step_tokens)
        self._null = null
        self._size = attention.num_tokens
        self._is_window = attention.window is not None

    def first_needed(self, num_tokens: int) -> int:
        # Repeats `LayerAttention.first_seen` for speed: a step calls it for hundreds of requests.
        size = self._size
        first = num_tokens - size + 1 if self._is_window else num_tokens - num_tokens % size
        return first // self._block_size if first > 0 else 0

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        """Search from the end backwards. `is_there` is called at most once for each block."""
        length = most_blocks
        while length:
            first = self.first_needed(length * self._block_size)
            gap = next((i for i in range(length - 1, first - 1, -1) if not is_there(i)), None)
            if gap is None:
                break
            length = gap  # each longer hit, up to the old `length`, needs the missing block too
        return length

    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        blocks = -(-num_tokens // self._block_size)
        more = max(0, blocks - len(table) - len(hits)) + num_free(hits)
        # The request can allocate again the blocks that it releases.
        held = sum([not block.is_null for block in table])
        return min(more, max(0, self.most_blocks(num_tokens) - held))

    def num_reserved(self, table: Sequence[KVCacheBlock], num_tokens: int) -> int:
        # A block shared with another request does not become free when this request releases it.
        own = self.num_given_back(table, len(table))
        more = max(0, -(-num_tokens // self._block_size) - len(table))
        return min(more, max(0, self.most_blocks(num_tokens) - own))

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        more = max(0, -(-num_tokens // self._block_size) - len(hits))
        taken = num_free(hits)
        # A hit's only holder so far can no longer free the block by releasing it.
        newly_shared = sum([block.ref_cnt == 1 for block in hits])
        most = max(0, self.most_blocks(num_tokens) - taken)
        return taken + newly_shared + min(more, most)

    def num_given_back(self, table: Sequence[KVCacheBlock], first: int) -> int:
        return sum([block.ref_cnt == 1 for block in table[self._first_held(table, first) : first]])

    def prune(self, table: list[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        end = first if first < len(table) else len(table)
        if not end or table[end - 1].is_null:
            return []  # the usual case: the window has not passed the end of a block
        start = self._first_held(table, end - 1)
        unread = table[start:end]
        table[start:end] = [self._null] * len(unread)
        return unread  # the first block is the least likely to be found again

    def can_go_on(self, table: Sequence[KVCacheBlock], num_computed: int) -> bool:
        first, end = self.first_needed(num_computed), -(-num_computed // self._block_size)
        return not any(block.is_null for block in table[first:end])

    def _first_held(self, table: Sequence[KVCacheBlock], end: int) -> int:
        """Return the index of the first block before `end` that is not a null block."""
        start = end if end < len(table) else len(table)
        while start and not table[start - 1].is_null:
            start -= 1
        return start
