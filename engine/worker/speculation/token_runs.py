# SPDX-License-Identifier: Apache-2.0
"""TokenRuns has the positions at which each run of tokens occurs in a sequence. RequestRuns has a
`TokenRuns` for each request."""

from __future__ import annotations

import numpy as np

from ...request.request import TokenArray
from .proposer import DraftQuery

_MASK_64 = 2**64 - 1
_FACTOR = 0x9E3779B97F4A7C15  # an odd number
_NOWHERE = -1
MOST_TOKENS = 1 << 20  # tokens of all requests together, in some 150 MB


class TokenRuns:
    """The positions of each run of `size` tokens in a growing sequence; the position of a run is
    the position of its last token. Runs are compared by 64 bits of a hash, so the caller must
    compare the tokens too."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._newest: dict[int, int] = {}  # hash of a run → place of its last token
        self._before: list[int] = []  # place → previous place where the same run ended

    def __len__(self) -> int:
        return len(self._before)

    def extend(self, token_ids: TokenArray) -> None:
        """Add the tokens of `token_ids`, the whole sequence, after its first `len(self)` tokens."""
        start, size = len(self._before), self._size
        newest, before = self._newest, self._before
        first = max(start, size - 1)
        before += [_NOWHERE] * (min(first, len(token_ids)) - start)
        for place, run in enumerate(self._hashes(token_ids, first), start=first):
            before.append(newest.get(run, _NOWHERE))
            newest[run] = place

    def places(self, most: int) -> list[int]:
        """Return up to `most` earlier positions of the sequence's last run, the newest first."""
        return self._chain(self._before[-1] if self._before else _NOWHERE, most)

    def places_of(self, token_ids: TokenArray, most: int) -> list[int]:
        """Return up to `most` positions of the run that the last `size` tokens of `token_ids` form,
        the newest first. `token_ids` must have at least `size` tokens."""
        [run] = self._hashes(token_ids, len(token_ids) - 1)
        return self._chain(self._newest.get(run, _NOWHERE), most)

    def _chain(self, place: int, most: int) -> list[int]:
        found: list[int] = []
        while place != _NOWHERE and len(found) < most:
            found.append(place)
            place = self._before[place]
        return found

    def _hashes(self, token_ids: TokenArray, first: int) -> list[int]:
        """Return the hashes of the runs whose last token is at position `first` or later."""
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


class RequestRuns:
    """The runs of all requests that get drafts. If all requests together have MOST_TOKENS tokens, a
    new request gets no runs until other requests have ended."""

    def __init__(self, size: int, most_tokens: int = MOST_TOKENS) -> None:
        self._size, self._most_tokens = size, most_tokens
        self._runs: dict[str, TokenRuns] = {}
        self._num_tokens = 0

    def update(self, query: DraftQuery) -> TokenRuns | None:
        """Return the runs of a request, updated to its present tokens; None if there is no space
        for a new request."""
        runs, token_ids = self._runs.get(query.request_id), query.token_ids
        if runs is not None and len(runs) > len(token_ids):
            self.remove_request(query.request_id)
            runs = None
        if runs is None:
            if self._num_tokens + len(token_ids) > self._most_tokens:
                return None
            runs = self._runs[query.request_id] = TokenRuns(self._size)
        self._num_tokens += len(token_ids) - len(runs)
        runs.extend(token_ids)
        return runs

    def remove_request(self, request_id: str) -> None:
        """Drop the runs of a request. An unknown id is ignored."""
        runs = self._runs.pop(request_id, None)
        if runs is not None:
            self._num_tokens -= len(runs)


def common_length(left: TokenArray, right: TokenArray) -> int:
    """Return the number of equal tokens at the beginning of both arrays."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size
