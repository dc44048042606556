# SPDX-License-Identifier: Apache-2.0
"""SuffixProposer: proposes the tokens that most often followed a request's last tokens, in the
request itself and in earlier answers of the same tenant.

The proposer helps with answers that resemble each other: tool calls of agents, filled-in forms. The
number of drafts is higher if the matching run of tokens is longer, and if more of its occurrences
agree on the next tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...request.request import TokenArray
from .proposer import DraftQuery, Proposer
from .token_runs import RequestRuns, TokenRuns, common_length

_BORDER = -1  # between two answers; not a token
_MEMORY_TOKENS = 1 << 15  # tokens in each half of a tenant's memory of answers
_ALL_TOKENS = 1 << 19  # tokens of all tenants together, in some 70 MB
_MOST_PLACES = 6  # most occurrences used in each text, the newest first
_DRAFTS_PER_TOKEN = 2  # drafts for each token of the found run
_LEAST_SHARE = 0.3  # least share of the occurrences that must agree on all drafts


class _Place(NamedTuple):
    """An occurrence of a request's last tokens in a text."""

    token_ids: TokenArray
    last: int
    length: int  # equal tokens; at most `most` are compared


class _Text:
    """A growing sequence of tokens, and the places of the runs in it."""

    def __init__(self, size: int, room: int) -> None:
        self.runs = TokenRuns(size)
        self._tokens = np.empty(room, np.int32)
        self.num_tokens = 0

    @property
    def token_ids(self) -> TokenArray:
        return self._tokens[: self.num_tokens]

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.num_tokens + len(token_ids)
        self._tokens[self.num_tokens : end] = token_ids
        self.num_tokens = end
        self.runs.extend(self.token_ids)


class _Memory:
    """The newest answers of a tenant, in two halves of a fixed size. When the newer half is full,
    the older half is dropped and a new half begins."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.texts: list[_Text] = [_Text(size, _MEMORY_TOKENS)]  # the newer first

    @property
    def num_tokens(self) -> int:
        """Number of tokens in both halves, including the borders between answers."""
        return sum(text.num_tokens for text in self.texts)

    def append(self, token_ids: Sequence[int]) -> None:
        kept = token_ids[-(_MEMORY_TOKENS - 1) :]
        if self.texts[0].num_tokens + len(kept) + 1 > _MEMORY_TOKENS:
            self.texts = [_Text(self._size, _MEMORY_TOKENS), self.texts[0]]
        self.texts[0].append([*kept, _BORDER])


class SuffixProposer(Proposer):
    """Finds earlier occurrences of the last tokens of a request, with a match of at least `least`
    tokens. At most the last `most` tokens are compared."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._runs = RequestRuns(least)
        self._outputs: dict[str, tuple[bytes, Sequence[int]]] = {}  # by id: tenant and output
        self._memories: OrderedDict[bytes, _Memory] = OrderedDict()

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [self._propose(query) for query in queries]

    def remove_request(self, request_id: str) -> None:
        self._runs.remove_request(request_id)
        tenant, output = self._outputs.pop(request_id, (b"", ()))
        if len(output) >= self._least:
            self._memory_of(tenant).append(output)
            left = sum(memory.num_tokens for memory in self._memories.values())
            while left > _ALL_TOKENS:  # the tenant used last is dropped last
                left -= self._memories.popitem(last=False)[1].num_tokens

    def _propose(self, query: DraftQuery) -> list[int]:
        runs, token_ids = self._runs.update(query), query.token_ids
        if runs is None:
            return []
        self._outputs[query.request_id] = query.cache_salt, query.output_token_ids
        ending = token_ids[max(0, len(token_ids) - self._most) :][::-1]
        places = [self._place_of(ending, token_ids, last) for last in runs.places(_MOST_PLACES)]
        memory = self._memories.get(query.cache_salt)
        if memory is not None and len(token_ids) >= self._least:
            self._memories.move_to_end(query.cache_salt)
            for text in memory.texts:
                found = text.runs.places_of(token_ids, _MOST_PLACES)
                places += [self._place_of(ending, text.token_ids, last) for last in found]
        longest = max((place.length for place in places), default=0)
        if longest < self._least:
            return []
        best = [place for place in places if place.length == longest]
        return agreed(best, min(query.most, _DRAFTS_PER_TOKEN * longest))

    def _place_of(self, ending: TokenArray, token_ids: TokenArray, last: int) -> _Place:
        before = token_ids[max(0, last + 1 - self._most) : last + 1][::-1]
        return _Place(token_ids, last, common_length(ending, before))

    def _memory_of(self, tenant: bytes) -> _Memory:
        memory = self._memories.get(tenant)
        if memory is None:
            memory = self._memories[tenant] = _Memory(self._least)
        self._memories.move_to_end(tenant)
        return memory


def agreed(places: Sequence[_Place], most: int) -> list[int]:
    """Return the tokens after the occurrences `places` on which they agree, at most `most`. Each
    token is the most frequent next token among the places that agreed on all tokens before it; the
    first place decides ties. The list ends when fewer than the share `_LEAST_SHARE` of the places
    agree."""
    left = [place.token_ids[place.last + 1 : place.last + 1 + most].tolist() for place in places]
    least = _LEAST_SHARE * len(left)
    drafts: list[int] = []
    while len(drafts) < most:
        at = len(drafts)
        following = [said[at] if at < len(said) else _BORDER for said in left]
        token, count = following[0], len(left)
        if following.count(token) < count:
            [(token, count)] = Counter(following).most_common(1)
            left = [said for said, one in zip(left, following, strict=True) if one == token]
        if token == _BORDER or count < least:
            break
        drafts.append(token)
    return drafts
