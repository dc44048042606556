# SPDX-License-Identifier: Apache-2.0
"""The longest hit in the tiers of a request whose model has windows.

A prefix may be cut anywhere, a hit of a window may not: it needs the blocks that its last window
lies in. So the search goes round, as in the pool (`engine/cache/kv_cache_coordinator.py`): full
attention bounds the length, each kind of window shortens it to one that has all it needs, and the
round ends when all agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tiers.hierarchy.hierarchy import Hierarchy, Prefix
from .reach import Needs, Reach, needs_of


class WindowSearch:
    """Finds hits for groups that attend as `reaches` say; each of `suffixes` completes a digest to
    the key of a group."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        block_size: int,
        suffixes: Sequence[bytes],
        reaches: Sequence[Reach],
    ) -> None:
        self._hierarchy = hierarchy
        self._block_size = block_size
        self._suffixes = tuple(suffixes)
        self._reaches = tuple(reaches)
        self._full = [s for s, r in zip(suffixes, reaches, strict=True) if r.is_full]
        self._local: dict[Reach, list[bytes]] = {}  # kinds of window, and their groups
        for suffix, reach in zip(suffixes, reaches, strict=True):
            if not reach.is_full:
                self._local.setdefault(reach, []).append(suffix)

    def find(
        self, digests: Sequence[bytes], first: int, most_tokens: int
    ) -> tuple[Needs, list[bytes], Prefix]:
        """The longest hit behind `first` blocks, for the digests from there on: what it needs, the
        keys of that, and the tier of each position. At most `most_tokens` of the request are not
        computed; the last block may be a part. Changes nothing."""
        is_asked = is_pending = False
        length = len(digests)
        if self._full:
            width = len(self._full)
            prefix = self._hierarchy.find([d + s for d in digests for s in self._full])
            is_asked, is_pending = prefix.asked, prefix.pending
            length = len(prefix.tiers) // width
        while length:
            before = length
            for reach, suffixes in self._local.items():
                length, prefix = self._shorten(reach, suffixes, digests, first, length, most_tokens)
                is_asked, is_pending = is_asked or prefix.asked, is_pending or prefix.pending
            if length == before:
                break
        num_tokens = self._tokens(first + length, most_tokens)
        needs = needs_of(self._reaches, first, length, num_tokens, self._block_size)
        keys = needs.keys(digests[:length], self._suffixes)
        found = self._hierarchy.find(keys)
        if len(found.tiers) < len(keys):  # on its way somewhere since
            return Needs(0, needs.lows), [], Prefix([], True, is_asked)
        tiers = needs.by_position(found.tiers, self._hierarchy.tiers)
        return needs, keys, Prefix(tiers, is_pending, is_asked)

    def _shorten(
        self,
        reach: Reach,
        suffixes: Sequence[bytes],
        digests: Sequence[bytes],
        first: int,
        length: int,
        most_tokens: int,
    ) -> tuple[int, Prefix]:
        """The longest hit of groups that attend alike, and what was said where one was missing."""
        is_asked = is_pending = False
        while length:
            num_tokens = self._tokens(first + length, most_tokens)
            low = max(0, reach.first_seen(num_tokens) // self._block_size - first)
            keys = [digests[i] + s for i in range(length - 1, low - 1, -1) for s in suffixes]
            prefix = self._hierarchy.find(keys)
            if len(prefix.tiers) == len(keys):
                break
            is_asked, is_pending = is_asked or prefix.asked, is_pending or prefix.pending
            # Every length up to this one needs the block that is missing.
            length = length - 1 - len(prefix.tiers) // len(suffixes)
        return length, Prefix([], is_pending, is_asked)

    def _tokens(self, num_blocks: int, most_tokens: int) -> int:
        return min(num_blocks * self._block_size, most_tokens)
