# SPDX-License-Identifier: Apache-2.0
"""NgramProposer: proposes the tokens that followed an earlier occurrence of a request's last
tokens.

The proposer helps with answers that quote the prompt or themselves: code, quotations, tables."""

from __future__ import annotations

from collections.abc import Sequence

from ...request.request import TokenArray
from .proposer import DraftQuery, Proposer
from .token_runs import RequestRuns, common_length

_MOST_PLACES = 16  # most earlier copies that are compared, the newest first


class NgramProposer(Proposer):
    """Finds an earlier occurrence of the tokens at the end of a request, with the longest match of
    at least `least` tokens. At most the last `most` tokens are compared."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._runs = RequestRuns(least)

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [self._propose(query) for query in queries]

    def remove_request(self, request_id: str) -> None:
        self._runs.remove_request(request_id)

    def _propose(self, query: DraftQuery) -> list[int]:
        runs, token_ids = self._runs.update(query), query.token_ids
        places = [] if runs is None else runs.places(_MOST_PLACES)
        if not places:
            return []
        end = len(token_ids)
        ending = token_ids[max(0, end - self._most) :][::-1]
        best, longest = -1, self._least - 1
        for place in places:
            length = common_length(
                ending, token_ids[max(0, place + 1 - self._most) : place + 1][::-1]
            )
            if length > longest:
                best, longest = place, length
                if longest == len(ending):
                    break
        return [] if best == -1 else following(token_ids, best, query.most)


def following(token_ids: TokenArray, place: int, count: int) -> list[int]:
    """Return `count` tokens after position `place`, repeated if the sequence ends before."""
    found: list[int] = token_ids[place + 1 : place + 1 + count].tolist()
    period = len(found)
    while len(found) < count:
        found.append(found[len(found) - period])
    return found
