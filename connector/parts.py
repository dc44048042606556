# SPDX-License-Identifier: Apache-2.0
"""The blocks that make up a position of a request, and the choice of the blocks that a hit needs.

A position is a range of `block_size` tokens of a request. The parts of a position are the blocks
with its K and V: one block for each cache group and tensor-parallel rank. In a list of keys, the
parts of a position are adjacent.

    position          0   1   2   3   4   5
    full attention    x   x   x   x   x          a hit of five positions: what the next token
    window                        x   x          attends to, and nothing else

A hit needs the blocks of every rank. Of a cache group with a sliding window, a hit needs only the
blocks in the window; the tiers may have dropped the blocks before the window.

If layers carry states (state space models), a hit also needs the states after its last position. A
checkpoint of these states is cut into pieces of a block's size; each piece has its own cache group,
numbered after the groups of K and V (`engine/cache/state_checkpoints.py`). Few positions have a
checkpoint of many pieces, so the keys of pieces are made for one position at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..tiers.base import Answer
from ..tiers.block import DIGEST_BYTES, key_suffix
from ..tiers.hierarchy.hierarchy import Hierarchy
from ..tiers.hierarchy.prefix_lookup import Prefix
from .messages import Part
from .page_keys import GROUP_BYTES

# Position → the first position to which its tokens or any later tokens attend.
FirstSeen = Callable[[int], int]
# Looks up blocks in remote stores, and returns whether a store will answer.
Prefetch = Callable[[Sequence[bytes]], bool]

# Windowed blocks are looked up from the end of a hit backwards, FIND_POSITIONS at a time.
FIND_POSITIONS = 64
FIND_STATES = 1024  # how many positions a look-up of states covers at a time


class StatePieces(NamedTuple):
    """The number of pieces of a checkpoint of layer states. The key of a piece is like the key of a
    block in a cache group of its own."""

    num_pieces: int


class Parts:
    """The parts of a position of `block_size` tokens. `seen` has an entry for each cache group
    (None for full attention), then a `StatePieces` if layers carry states. `ranks` are the
    tensor-parallel ranks, out of `num_ranks`, whose blocks this connector handles.

    With `whole_only` a load brings all blocks of a hit or none. Windows and states imply
    `whole_only` and forbid overlapped loads."""

    def __init__(
        self,
        block_size: int,
        seen: Sequence[FirstSeen | StatePieces | None] = (None,),
        *,
        ranks: Sequence[int] = (0,),
        num_ranks: int = 1,
        whole_only: bool = False,
    ) -> None:
        states = [each.num_pieces for each in seen if isinstance(each, StatePieces)]
        groups = [each for each in seen if not isinstance(each, StatePieces)]
        self.num_groups = num_groups = len(groups)
        self.all = tuple(Part(group, rank) for group in range(num_groups) for rank in ranks)
        self.suffixes = tuple(key_suffix(part.group, part.rank, num_ranks) for part in self.all)
        self.width = len(self.all)
        # The key suffixes of the states after a position, one for each piece.
        self._state_suffixes = [
            key_suffix(num_groups + piece, rank, num_ranks)
            for rank in ranks
            for piece in range(sum(states))
        ]
        self.num_state_keys = len(self._state_suffixes)
        self.has_windows = any(each is not None for each in groups)
        self.is_windowed = bool(states) or self.has_windows
        # A shorter hit needs other blocks of a window than a longer hit.
        self.whole_only = whole_only or self.is_windowed
        # Suffixes, one for each rank, that turn a key of the pool into a key of the tiers.
        self.shards = tuple(key_suffix(0, rank, num_ranks)[GROUP_BYTES:] for rank in ranks)
        self.block_size = block_size
        self._seen = tuple(groups[part.group] for part in self.all)
        self._full = [i for i, each in enumerate(self._seen) if each is None]

    def keys_of(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the keys of all parts of the positions with these digests."""
        if self.width == 1:
            suffix = self.suffixes[0]
            return [digest + suffix for digest in digests]
        return [digest + suffix for digest in digests for suffix in self.suffixes]

    def state_keys(self, digest: bytes) -> list[bytes]:
        """Return the keys of all pieces of the states after the position with this digest."""
        return [digest + suffix for suffix in self._state_suffixes]

    def first_state_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the key of the first piece of the states after each position, the last position
        first. `keys` are the keys of the positions' parts. Raises IndexError for a model without
        states."""
        suffix = self._state_suffixes[0]
        return [key[:DIGEST_BYTES] + suffix for key in keys[:: -self.width]]

    def needed(
        self, first: int, num_positions: int, most_tokens: int | None = None, num_kept: int = 0
    ) -> Sequence[int]:
        """Return which keys a hit of `num_positions` needs, in the order of the sequence, as
        indices into the list of the keys of all parts from position `first` on. In all methods,
        `most_tokens` is the number of tokens before the next token to compute, which may lie inside
        the last position. The pool has the parts of the first `num_kept` positions, but not the
        states after them."""
        if not self.is_windowed:
            return range(num_positions * self.width)
        starts = self._starts(first, num_positions, most_tokens, num_kept)
        return [
            position * self.width + index
            for position in range(num_positions)
            for index, start in enumerate(starts)
            if position >= start
        ]

    def hit_keys(self, digests: Sequence[bytes], num_tokens: int) -> list[bytes]:
        """Return the keys of the blocks that a hit of the positions with these digests needs, in
        the order of the sequence. At least `num_tokens` tokens precede the next token to
        compute."""
        keys = self.keys_of(digests)
        if not self.is_windowed or not digests:
            return keys
        found = [keys[place] for place in self.needed(0, len(digests), num_tokens)]
        return found + self.state_keys(digests[-1])

    def num_needed(self, num_positions: int) -> int:
        if not self.is_windowed:
            return num_positions * self.width
        num_blocks = sum(num_positions - start for start in self._starts(0, num_positions, None))
        return num_blocks + self.num_state_keys if num_positions else 0

    def find_longest_hit(
        self,
        hierarchy: Hierarchy,
        first: int,
        keys: Sequence[bytes],
        most_tokens: int | None = None,
        num_kept: int = 0,
        prefetch: Prefetch | None = None,
    ) -> Prefix:
        """Return the longest hit from position `first` on; `keys` are the keys of all parts from
        there on. The tier of a position is the slowest tier of its blocks. `prefetch` looks up the
        other pieces of found first pieces in remote stores."""
        width = self.width
        if not self.is_windowed:
            prefix = hierarchy.find_prefix(keys)
            if width == 1:
                return prefix
            return prefix._replace(tiers=whole_positions(prefix.tiers, width, hierarchy.tiers))
        prefix = Prefix([hierarchy.tiers[0]] * (len(keys) // width), False)
        if self._full:
            places = range(num_kept * width, len(keys), width)
            full = hierarchy.find_prefix([keys[place + i] for place in places for i in self._full])
            tiers = whole_positions(full.tiers, len(self._full), hierarchy.tiers)
            prefix = full._replace(tiers=[*hierarchy.tiers[:1] * num_kept, *tiers])
        search = _Search(self, hierarchy, first, keys, most_tokens, num_kept, prefetch)
        num_found = len(prefix.tiers)
        num_positions = search.longest(num_found)
        return Prefix(
            search.slowest_tiers(prefix.tiers[:num_positions]),
            prefix.pending or search.pending,
            prefix.asked or search.asked,
            num_found,
        )

    def longest(
        self,
        hierarchy: Hierarchy,
        first: int,
        keys: Sequence[bytes],
        num_positions: int,
        most_tokens: int | None = None,
        num_kept: int = 0,
    ) -> int:
        """Return the length of the longest hit up to `num_positions`, whose full-attention blocks
        are all in the tiers."""
        if not self.is_windowed:
            return num_positions
        search = _Search(self, hierarchy, first, keys, most_tokens, num_kept)
        return search.longest(num_positions)

    def _starts(
        self, first: int, num_positions: int, most_tokens: int | None, num_kept: int = 0
    ) -> list[int]:
        """Return, for each part, the first position that a hit needs, counted from `first`."""
        end = (first + num_positions) * self.block_size
        if most_tokens is not None:
            end = min(end, most_tokens)
        kept = min(num_kept, num_positions)
        return [
            kept
            if seen is None
            else max(kept, min(seen(end) // self.block_size - first, num_positions))
            for seen in self._seen
        ]

    def windows(
        self, first: int, num_positions: int, most_tokens: int | None, num_kept: int = 0
    ) -> list[tuple[int, int]]:
        """Return the index of each windowed part, and its first needed position, counted from
        `first`."""
        starts = self._starts(first, num_positions, most_tokens, num_kept)
        return [(i, starts[i]) for i, seen in enumerate(self._seen) if seen is not None]


@dataclass(slots=True, eq=False)
class _Search:
    """A search for the longest hit in the tiers, for a model with windows or states."""

    parts: Parts
    hierarchy: Hierarchy
    first: int  # position
    keys: Sequence[bytes]
    most_tokens: int | None
    num_kept: int = 0
    prefetch: Prefetch | None = None
    there: dict[int, bool] = field(default_factory=dict)  # by index of a part's key
    state_answers: dict[int, bool] = field(default_factory=dict)  # by position
    pending: bool = False
    asked: bool = False

    def longest(self, num_positions: int) -> int:
        """Return the length of the longest hit; see `Parts.longest`."""
        while num_positions:
            missing = self._missing(num_positions) if self.parts.has_windows else None
            if missing is not None:
                # Every longer hit, up to `num_positions`, needs the missing block.
                num_positions = missing
            elif self.parts.num_state_keys:
                end = self._last_with_states(num_positions)
                if end == num_positions or not self.parts.has_windows:
                    return end
                num_positions = end
            elif self.parts.needed(self.first, num_positions, self.most_tokens):
                break
            else:  # the next token attends to no block, but a load must bring one
                num_positions -= 1
        return num_positions

    def slowest_tiers(self, tiers: Sequence[str]) -> list[str]:
        """Return the slowest tier of each position of a hit, with windowed blocks and states."""
        width, order = self.parts.width, self.hierarchy.tiers
        found = list(tiers)
        places = [
            position * width + index
            for index, start in self._windows(len(tiers))
            for position in range(start, len(tiers))
        ]
        keys = [self.keys[place] for place in places]
        if tiers and self.parts.num_state_keys:
            states = self.parts.state_keys(self._digest(len(tiers) - 1))
            keys += states
            places += [(len(tiers) - 1) * width] * len(states)
        names = self.hierarchy.find_prefix(keys).tiers
        for place, name in zip(places, names, strict=False):
            position = place // width
            found[position] = max(found[position], name, key=order.index)
        return found

    def _windows(self, num_positions: int) -> list[tuple[int, int]]:
        return self.parts.windows(self.first, num_positions, self.most_tokens, self.num_kept)

    def _digest(self, position: int) -> bytes:
        return self.keys[position * self.parts.width][:DIGEST_BYTES]

    def _last_with_states(self, num_positions: int) -> int:
        """Return the most leading positions, up to `num_positions`, followed by loadable states."""
        answers = self.state_answers
        for position in range(num_positions - 1, -1, -1):
            if position not in answers:
                self._find_first_pieces(position)
            if answers[position]:
                answers[position] = self._has_all_pieces(self._digest(position))
                if answers[position]:
                    return position + 1
        return 0

    def _has_all_pieces(self, digest: bytes) -> bool:
        """Whether all pieces of a checkpoint can be loaded, if a tier has the first piece. The
        other pieces are looked up in remote stores, unless an earlier search did so."""
        keys = self.parts.state_keys(digest)
        answers = self.hierarchy.lookup(keys)
        if answers.count(Answer.HIT) == len(keys):
            return True
        self.pending |= Answer.PENDING in answers
        unknown = [key for key, each in zip(keys, answers, strict=True) if each is Answer.MISS]
        if unknown and self.prefetch is not None:
            self.asked |= self.prefetch(unknown)
            # An earlier search has looked up remote stores, whose answers may still be due.
            self.asked |= self.hierarchy.find_prefix(unknown).asked
        return False

    def _find_first_pieces(self, last: int) -> None:
        """Look up the states after all positions up to `last` at once; few positions have any."""
        first, width = max(0, last + 1 - FIND_STATES), self.parts.width
        keys = self.parts.first_state_keys(self.keys[first * width : (last + 1) * width])
        answers = self.hierarchy.lookup(keys)
        there = [answer is Answer.HIT for answer in answers]
        self.state_answers.update(zip(range(last, first - 1, -1), there, strict=True))
        self.pending |= Answer.PENDING in answers
        if not there[0]:
            self.asked |= self.hierarchy.find_prefix(keys[:1]).asked

    def _missing(self, num_positions: int) -> int | None:
        """Return the last position at which a hit of `num_positions` lacks a windowed block."""
        width = self.parts.width
        last: int | None = None
        for index, start in self._windows(num_positions):
            least = start if last is None else max(start, last + 1)
            for position in range(num_positions - 1, least - 1, -1):
                if not self._is_there(position * width + index):
                    last = position
                    break
        return last

    def _is_there(self, place: int) -> bool:
        if place not in self.there:
            width = self.parts.width
            places = [p for p in range(place, -1, -width)[:FIND_POSITIONS] if p not in self.there]
            answers = self.hierarchy.lookup([self.keys[p] for p in places])
            for each, answer in zip(places, answers, strict=True):
                self.there[each] = answer is Answer.HIT
            if answers[0] is not Answer.HIT:
                alone = self.hierarchy.find_prefix([self.keys[place]])
                self.pending |= alone.pending
                self.asked |= alone.asked
        return self.there[place]


def whole_positions(tiers: Sequence[str], width: int, order: Sequence[str]) -> list[str]:
    """Return the tier of each position whose `width` blocks were all found: the slowest tier of the
    blocks. `order` lists the tiers, the fastest first."""
    if width == 1:
        return list(tiers)
    whole = range(0, len(tiers) - width + 1, width)
    return [max(tiers[start : start + width], key=order.index) for start in whole]
