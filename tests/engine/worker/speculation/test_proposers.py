# SPDX-License-Identifier: Apache-2.0
"""What proposers guess: what followed the last tokens where they stood before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from stratakv.engine.worker.speculation import suffix
from stratakv.engine.worker.speculation.ngram import NgramProposer
from stratakv.engine.worker.speculation.proposer import DraftQuery, Proposer
from stratakv.engine.worker.speculation.suffix import _MEMORY_TOKENS, SuffixProposer
from stratakv.engine.worker.speculation.token_runs import RequestRuns, TokenRuns

KINDS = [NgramProposer, SuffixProposer]


def ask(
    proposer: Proposer, tokens: Sequence[int], *, name: str = "a", salt: bytes = b"",
    output: Sequence[int] = (), most: int = 4,
) -> list[int]:  # fmt: skip
    query = DraftQuery(name, np.array(tokens, np.int32), output, salt, most, 0)
    [drafts] = proposer.propose([query])
    return drafts


@pytest.mark.parametrize("kind", KINDS)
def test_what_followed_before_is_proposed(kind: type[NgramProposer]) -> None:
    assert ask(kind(2, 8), [1, 2, 3, 4, 5, 6, 7, 8, 2, 3]) == [4, 5, 6, 7]
    assert ask(kind(2, 8), [1, 2, 3, 4, 5, 6, 7, 8, 2, 3], most=1) == [4]
    # Fewer are found again than must be, or none.
    assert ask(kind(3, 8), [1, 2, 3, 4, 5, 6, 7, 8, 2, 3]) == []
    assert ask(kind(2, 8), [1, 2, 3]) == ask(kind(2, 8), [1]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_run_decides_and_of_equal_ones_the_newest(kind: type[NgramProposer]) -> None:
    text = [9, 1, 2, 3, 40, 8, 2, 3, 50, 7, 2, 3, 60, 9, 1, 2, 3]
    assert ask(kind(2, 8), text, most=1) == [40]
    assert ask(NgramProposer(2, 2), text, most=1) == [60]


def test_a_run_at_the_end_is_gone_on_with() -> None:
    assert ask(NgramProposer(2, 8), [5, 1, 2, 1, 2], most=6) == [1, 2, 1, 2, 1, 2]
    assert ask(NgramProposer(2, 8), [7, 7, 7, 7], most=3) == [7, 7, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_comes_back_with_fewer_tokens(kind: type[NgramProposer]) -> None:
    proposer = kind(2, 8)
    text = [1, 2, 3, 4, 9, 9, 8, 7, 2, 3]
    assert ask(proposer, text, most=2) == [4, 9]
    assert ask(proposer, text[:-1]) == []
    assert ask(proposer, [*text[:-1], 3], most=2) == [4, 9]
    proposer.remove_request("a")
    proposer.remove_request("nobody")
    assert ask(proposer, [2, 3]) == []


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_runs_are_those_of_a_search(size: int) -> None:
    rng = random.Random(size)
    tokens = np.array(rng.choices(range(3), k=400), np.int32)
    runs = TokenRuns(size)
    end = 0
    while end < len(tokens):
        end = min(len(tokens), end + rng.choice([1, 1, 1, 5, 60]))
        runs.extend(tokens[:end])
        ending = tokens[end - size : end].tolist() if end >= size else None
        expected = [
            place
            for place in range(end - 2, size - 2, -1)
            if tokens[place - size + 1 : place + 1].tolist() == ending
        ]
        assert runs.places(10**6) == expected
        assert runs.places(2) == expected[:2]
        if ending is not None:
            assert runs.places_of(tokens[:end], 10**6) == [end - 1, *expected]


def test_answers_of_a_tenant_are_remembered_for_that_tenant() -> None:
    proposer = SuffixProposer(2, 8)
    said = [21, 22, 23, 24, 25]
    assert ask(proposer, [1, 2, *said], name="a", salt=b"us", output=said) == []
    proposer.remove_request("a")
    assert ask(proposer, [50, 21, 22], name="b", salt=b"us", most=3) == [23, 24, 25]
    assert ask(proposer, [50, 21, 22], name="c", salt=b"them", most=3) == []
    # A prompt is not remembered, and what follows an answer is no token.
    assert ask(proposer, [60, 1, 2], name="d", salt=b"us") == []
    assert ask(proposer, [70, 24, 25], name="e", salt=b"us") == []


def test_of_many_tenants_those_are_forgotten_that_ask_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suffix, "_ALL_TOKENS", 100)
    proposer = SuffixProposer(2, 8)
    for number in range(40):
        said = [number, 500, *range(1000 + 10 * number, 1010 + 10 * number)]
        ask(proposer, [1, *said], name="a", salt=b"%d" % number, output=said)
        proposer.remove_request("a")
        assert ask(proposer, [7, 0, 500], name="b", salt=b"0", most=1) == [1000]
        assert ask(proposer, [7, number, 500], name="c", salt=b"%d" % number, most=1) == said[2:3]
    assert ask(proposer, [7, 20, 500], name="d", salt=b"20") == []
    assert sum(memory.num_tokens for memory in proposer._memories.values()) <= 100


def test_what_most_places_say_is_proposed_until_too_few_agree() -> None:
    proposer = SuffixProposer(2, 2)
    for number, behind in enumerate([[3, 4, 5], [3, 4, 6], [3, 7, 8], [9, 9, 9]]):
        ask(proposer, [1, 2, *behind], name=str(number), output=[1, 2, *behind])
        proposer.remove_request(str(number))
    assert ask(proposer, [80, 1, 2], name="x") == [3, 4]


def test_the_oldest_answers_are_forgotten() -> None:
    proposer = SuffixProposer(2, 8)
    rng = random.Random(3)
    for number in range(5):
        said = [number, 999, *rng.choices(range(100, 900), k=_MEMORY_TOKENS // 2)]
        ask(proposer, [1, *said], name="a", output=said)
        proposer.remove_request("a")
        assert ask(proposer, [5, number, 999], name="b", most=2) == said[2:4]
    assert ask(proposer, [5, 0, 999], name="c", most=2) == []


def test_requests_beyond_the_room_get_no_drafts_until_others_have_ended() -> None:
    runs = RequestRuns(2, most_tokens=30)

    def query(name: str, count: int) -> DraftQuery:
        return DraftQuery(name, np.arange(count, dtype=np.int32), [], b"", 4, 0)

    assert runs.update(query("a", 20)) is not None
    assert runs.update(query("b", 11)) is None
    assert runs.update(query("a", 40)) is not None  # who has room keeps it
    assert runs.update(query("b", 1)) is None
    runs.remove_request("a")
    runs.remove_request("a")
    assert runs.update(query("b", 30)) is not None
    assert runs.update(query("b", 10)) is not None  # it was sent back
    assert runs.update(query("c", 20)) is not None
    assert runs.update(query("d", 1)) is None
