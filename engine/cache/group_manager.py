# SPDX-License-Identifier: Apache-2.0
"""What cache groups need of a block table, and what they give back: the rules of one kind of
attention, for groups that share blocks (often just one).

Token `i` of a request lies in block `i // block_size` of its table. A table only ever grows at its
end. Where the layers of a group do not see all that came before a token, blocks that none will read
again are given back, and the null block stands in their places:

    table of a window    0  0  0  17  4  9        held: 17, 4, 9

A *hit* of n blocks needs those that a token behind them sees: all of them, or the last ones.

The tables themselves are the `KVCacheManager`'s; the two managers below differ by kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..models.layer_attention import LayerAttention
from .kv_block import KVCacheBlock


class GroupManager(ABC):
    """Counts are of blocks, whatever their pages. A table holds the blocks of one request in the
    order of its tokens, null blocks among them; `hits` are to lie before everything else in it."""

    def __init__(
        self, group_id: int, attention: LayerAttention, block_size: int, most_step_tokens: int
    ) -> None:
        """`group_id`: the first of the groups. No step computes more than `most_step_tokens` of a
        request."""
        self.group_id = group_id
        self.attention = attention
        self._block_size = block_size
        self._most_step_tokens = most_step_tokens

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at once at most, when nothing is shared."""
        return self.attention.most_blocks(num_tokens, self._block_size, self._most_step_tokens)

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """The first block that the token behind `num_tokens`, or any later one, reads."""

    @abstractmethod
    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        """The most blocks, up to `most_blocks`, that are a hit where `is_there` says which blocks
        can be had."""

    @abstractmethod
    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        """Blocks that are free now and that a request takes, at most, until `num_tokens` have been
        computed. The hits are not its own yet."""

    @abstractmethod
    def num_reserved(self, table: Sequence[KVCacheBlock], num_tokens: int) -> int:
        """Blocks that a request takes, at most, until `num_tokens` have been computed, also where
        other requests give back blocks that it shares with them."""

    @abstractmethod
    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        """Blocks that a request takes which begins with these hits and will have `num_tokens`
        computed: free ones that it holds, and those that it reserves."""

    @abstractmethod
    def num_given_back(self, table: Sequence[KVCacheBlock], first: int) -> int:
        """The number of blocks that `prune` makes free."""

    @abstractmethod
    def prune(self, table: list[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        """Put null blocks in the places of those before `first`, which no later token reads. They
        are the caller's to give back, in this order."""

    @abstractmethod
    def can_go_on(self, table: Sequence[KVCacheBlock], num_computed: int) -> bool:
        """Whether the table has all that the token behind `num_computed` reads."""


def num_free(blocks: Sequence[KVCacheBlock]) -> int:
    """The blocks that no request holds: each leaves the free queue when it is held."""
    return sum([not (block.ref_cnt or block.is_null) for block in blocks])


class FullAttentionManager(GroupManager):
    """See there."""

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        return next((i for i in range(most_blocks) if not is_there(i)), most_blocks)

    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        # Hits that others hold cost nothing.
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
    """See there. `null` is the pool's null block."""

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
        # As `LayerAttention.first_seen`, which a step would ask for hundreds of requests.
        size = self._size
        first = num_tokens - size + 1 if self._is_window else num_tokens - num_tokens % size
        return first // self._block_size if first > 0 else 0

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        """Search from the end; `is_there` is called at most once for each block."""
        length = most_blocks
        while length:
            first = self.first_needed(length * self._block_size)
            gap = next((i for i in range(length - 1, first - 1, -1) if not is_there(i)), None)
            if gap is None:
                break
            length = gap  # every length up to here needs the missing block too
        return length

    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        blocks = -(-num_tokens // self._block_size)
        more = max(0, blocks - len(table) - len(hits)) + num_free(hits)
        # What it gives back it can take again.
        held = sum([not block.is_null for block in table])
        return min(more, max(0, self.most_blocks(num_tokens) - held))

    def num_reserved(self, table: Sequence[KVCacheBlock], num_tokens: int) -> int:
        # A block that another request reads too is not free once this one has given it back.
        own = self.num_given_back(table, len(table))
        more = max(0, -(-num_tokens // self._block_size) - len(table))
        return min(more, max(0, self.most_blocks(num_tokens) - own))

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        more = max(0, -(-num_tokens // self._block_size) - len(hits))
        taken = num_free(hits)
        # Who holds one of the hits alone cannot count on getting it back any more.
        newly_shared = sum([block.ref_cnt == 1 for block in hits])
        most = max(0, self.most_blocks(num_tokens) - taken)
        return taken + newly_shared + min(more, most)

    def num_given_back(self, table: Sequence[KVCacheBlock], first: int) -> int:
        return sum([block.ref_cnt == 1 for block in table[self._first_held(table, first) : first]])

    def prune(self, table: list[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        end = first if first < len(table) else len(table)
        if not end or table[end - 1].is_null:
            return []  # most often: the window has not passed the end of a block
        start = self._first_held(table, end - 1)
        unread = table[start:end]
        table[start:end] = [self._null] * len(unread)
        return unread  # the first one is the least likely to be asked for

    def can_go_on(self, table: Sequence[KVCacheBlock], num_computed: int) -> bool:
        first, end = self.first_needed(num_computed), -(-num_computed // self._block_size)
        return not any(block.is_null for block in table[first:end])

    def _first_held(self, table: Sequence[KVCacheBlock], end: int) -> int:
        """The index of the first block before `end` that the request holds. The held ones are
        adjacent: all before them are null blocks."""
        start = end if end < len(table) else len(table)
        while start and not table[start - 1].is_null:
            start -= 1
        return start
