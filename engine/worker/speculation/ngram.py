# SPDX-License-Identifier: Apache-2.0
"""NgramProposer: what followed the last tokens of a request where they stood before.

Pays where an answer quotes its prompt, or itself: edits of code, quotations, tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...request.request import TokenArray
from .proposer import DraftQuery, Proposer

_MASK_64 = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd
_MOST_PLACES = 16  # of a run of tokens that are compared, the newest first
_NOWHERE = -1


class TokenRuns:
    """The places of each run of `size` tokens in a sequence that grows. Runs are told apart by 64
    bits of a hash; the caller compares what is found."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: dict[int, int] = {}  # hash of a run → the place of its last token
        self._before: list[int] = []  # place → the place before where the same run ended

    def __len__(self) -> int:
        return len(self._before)

    def extend(self, token_ids: TokenArray) -> None:
        """`token_ids` is all of the sequence, of which the first `len(self)` are known."""
        start, size = len(self._before), self._size
        newest, before = self._newest, self._before
        first = max(start, size - 1)
        before += [_NOWHERE] * (min(first, len(token_ids)) - start)
        for place, run in enumerate(self._hashes(token_ids, first), start=first):
            before.append(newest.get(run, _NOWHERE))
            newest[run] = place

    def places(self, most: int) -> list[int]:
        """Up to `most` places where the run at the end ended before, the newest first."""
        return self._chain(self._before[-1] if self._before else _NOWHERE, most)

    def places_of(self, token_ids: TokenArray, most: int) -> list[int]:
        """The same for the run at the end of another sequence, which has `size` tokens."""
        [run] = self._hashes(token_ids, len(token_ids) - 1)
        return self._chain(self._newest.get(run, _NOWHERE), most)

    def _chain(self, place: int, most: int) -> list[int]:
        found: list[int] = []
        while place != _NOWHERE and len(found) < most:
            found.append(place)
            place = self._before[place]
        return found

    def _hashes(self, token_ids: TokenArray, first: int) -> list[int]:
        """The hashes of the runs that end at `first` and behind it."""
        if first >= len(token_ids):
            return []
        if len(token_ids) - first == 1:
            run = 0
            for token in token_ids[first - self._size + 1 :].tolist():
                run = (run * _FACTOR + token + 1) & _MASK_64
            return [run]
        known = token_ids[first - self._size + 1 :].astype(np.uint64) + np.uint64(1)
        count = len(token_ids) - first
        runs = np.zeros(count, np.uint64)
        for offset in range(self._size):
            runs = runs * np.uint64(_FACTOR) + known[offset : offset + count]
        hashes: list[int] = runs.tolist()
        return hashes


class NgramProposer(Proposer):
    """Looks for the longest run of tokens at the end of a request that it had before: of `least`
    tokens, at least, and compares up to `most` of them."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._runs: dict[str, TokenRuns] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [self._propose(query) for query in queries]

    def remove_request(self, request_id: str) -> None:
        self._runs.pop(request_id, None)

    def _propose(self, query: DraftQuery) -> list[int]:
        runs, token_ids = self._runs.get(query.request_id), query.token_ids
        if runs is None or len(runs) > len(token_ids):
            runs = self._runs[query.request_id] = TokenRuns(self._least)
        runs.extend(token_ids)
        places = runs.places(_MOST_PLACES)
        if not places:
            return []
        end = len(token_ids)
        ending = token_ids[max(0, end - self._most) :][::-1]
        best, longest = _NOWHERE, self._least - 1
        for place in places:
            length = common_length(
                ending, token_ids[max(0, place + 1 - self._most) : place + 1][::-1]
            )
            if length > longest:
                best, longest = place, length
                if longest == len(ending):
                    break
        return [] if best == _NOWHERE else following(token_ids, best, query.most)


def common_length(left: TokenArray, right: TokenArray) -> int:
    """The number of tokens that are equal, from the first one on."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


def following(token_ids: TokenArray, place: int, count: int) -> list[int]:
    """`count` tokens behind a place; at the end of the sequence it goes on as behind the place."""
    found: list[int] = token_ids[place + 1 : place + 1 + count].tolist()
    period = len(found)
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
