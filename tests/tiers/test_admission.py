# SPDX-License-Identifier: Apache-2.0
"""Admission filters: what is written pays, and a wrong "no" is made good."""

from __future__ import annotations

import sys

import pytest

from stratakv.tiers.admission import (
    DEFAULT_FILTER,
    FILTERS,
    AdmissionFilter,
    AdmitAll,
    known_filters,
    make_filter,
)
from stratakv.tiers.admission.filters import MIN_NAMES, Doorkeeper, WhileUsed
from stratakv.tiers.admission.reuse import MIN_BLOCKS, ReuseFilter
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.policies.base import EvictionPolicy
from stratakv.tiers.policies.known_policies import POLICIES


def chain_of(name: str, length: int) -> list[bytes]:
    return [f"{name}/{depth}".encode() for depth in range(length)]


def learned(blocks_below: int = 10_000) -> ReuseFilter:
    """A filter that has seen chats which go on twice, and single questions four times as long."""
    admission = ReuseFilter(blocks_below)
    for now in range(0, 4000, 10):
        admission.observe(chain_of(f"question {now}", 40), now)
        for turn in range(3):
            if now >= 100 * turn:
                admission.observe(chain_of(f"chat {now - 100 * turn}", 10 + turn), now + 1)
    return admission


def test_filters_have_names() -> None:
    assert isinstance(make_filter(DEFAULT_FILTER, 100), WhileUsed)
    assert isinstance(make_filter("all", 100), AdmitAll)
    assert set(FILTERS) == {"while-used", "all", "doorkeeper", "reuse"}
    assert isinstance(make_filter("second-sight", 100), Doorkeeper), "its name until now"
    assert "second-sight" in known_filters()
    with pytest.raises(TierConfigError, match="no admission filter 'some'; there are: while-used"):
        make_filter("some", 100)


@pytest.mark.parametrize("name", FILTERS)
def test_answers_stand_in_the_order_of_the_keys(name: str) -> None:
    admission = make_filter(name, 100)
    chain = chain_of("a", 5)
    assert admission.admit([], 0.0) == []
    admission.observe(chain, 1.0)
    assert len(admission.admit(chain, 2.0)) == 5
    admission.observe(chain, 3.0)
    admission.observe([], 3.0)
    assert admission.admit(chain, 4.0) == [True] * 5, "asked for twice"


def offer(admission: WhileUsed, blocks: int) -> list[int]:
    """Places of those that are written, of so many blocks that are offered fifty at a time."""
    written: list[int] = []
    for start in range(0, blocks, 50):
        verdicts = admission.admit([b""] * 50, 0.0)
        written += (start + i for i, admitted in enumerate(verdicts) if admitted)
    return written


def test_everything_is_written_for_one_turnover_whether_it_is_used_or_not() -> None:
    admission = WhileUsed(1000)
    assert offer(admission, 1000) == list(range(1000))
    assert admission.is_sampling, "nothing of which was promoted"


def test_what_nobody_asks_for_is_written_in_whole_stretches_of_one_in_eight() -> None:
    admission = WhileUsed(6400)
    offer(admission, 6400)
    written = offer(admission, 8000)
    assert written == [place for place in range(8000) if place % 800 < 100]


def test_what_is_used_is_written() -> None:
    admission = WhileUsed(1000)
    for _ in range(200):
        assert len(offer(admission, 100)) == 100
        admission.promoted(3)


def test_a_sample_that_is_used_has_everything_written_again() -> None:
    admission = WhileUsed(1000)
    offer(admission, 3000)
    offered = 0
    while admission.is_sampling:
        admission.promoted(len(offer(admission, 100)) // 2)  # every second one comes back
        offered += 100
        assert offered < 500, "half a turnover is enough to find out"
    assert len(offer(admission, 100)) == 100


def test_uses_of_long_ago_fade() -> None:
    admission = WhileUsed(1000)
    offer(admission, 1000)
    admission.promoted(1000)
    turnovers = 0
    while not admission.is_sampling:
        offer(admission, 1000)
        turnovers += 1
    assert 2 <= turnovers <= 5


def test_the_doorkeeper_admits_what_two_prompts_asked_for() -> None:
    admission = Doorkeeper(100)
    admission.observe([b"a", b"b"], 0.0)
    admission.observe([b"a", b"c"], 0.0)
    assert admission.admit([b"c", b"a", b"d", b"b"], 0.0) == [False, True, False, False]


def test_reuse_admits_what_goes_on_and_refuses_what_does_not() -> None:
    admission = learned()
    admission.observe(chain_of("a question", 40), 4000.0)
    admission.observe(chain_of("a chat", 10), 4000.0)
    assert not any(admission.admit(chain_of("a question", 40), 4010.0))
    assert all(admission.admit(chain_of("a chat", 10), 4010.0))
    # So long after the last use a chat is over.
    admission.observe(chain_of("an old chat", 10), 4010.0)
    assert not any(admission.admit(chain_of("an old chat", 10), 5000.0))


def test_a_wrong_no_is_made_good_when_the_block_is_asked_for_again() -> None:
    admission = learned()
    question = chain_of("a question", 40)
    admission.observe(question, 4000.0)
    assert not any(admission.admit(question, 4010.0))
    assert not any(admission.admit(question, 4020.0)), "not asked for since"
    admission.observe(question, 4030.0)
    assert all(admission.admit(question, 4040.0))


def test_nothing_that_is_written_stands_behind_a_hole() -> None:
    """Tails are lost first. What comes before an admitted one follows it, however late."""
    admission = learned()
    for name in ("a chat", "another"):
        admission.observe(chain_of(name, 10), 4000.0)
    chat, other = chain_of("a chat", 10)[::-1], chain_of("another", 10)[::-1]
    assert all(admission.admit(chat[:3], 4010.0))
    assert all(admission.admit(chat[3:7], 5000.0))
    assert not any(admission.admit(other, 5000.0)), "of this one nothing was written"
    assert all(admission.admit(chat[7:], 5010.0))


def test_what_a_chat_left_behind_is_refused() -> None:
    admission = learned()
    admission.observe(chain_of("a chat", 10), 4000.0)
    admission.observe([*chain_of("a chat", 8), *chain_of("edited", 3)], 4050.0)
    verdicts = admission.admit([*chain_of("a chat", 10), *chain_of("edited", 3)], 4060.0)
    assert verdicts == [True] * 8 + [False] * 2 + [True] * 3


def test_a_tier_that_is_soon_overwritten_is_not_worth_a_slow_use() -> None:
    """Chats go on after 100 seconds. A large tier keeps them so long, a small one does not."""
    for blocks_below, least, most in ((100_000, 600, 600), (60, 200, 500)):
        admission = learned(blocks_below)
        admitted = 0
        for now in range(4000, 4600, 10):
            chain = chain_of(f"chat at {now}", 10)
            admission.observe(chain, now)
            admitted += sum(admission.admit(chain, now + 5.0))
        assert least <= admitted <= most


def test_what_no_prompt_told_of_is_admitted() -> None:
    assert learned().admit([b"unknown"], 4000.0) == [True]


@pytest.mark.parametrize(("name", "limit"), [("reuse", MIN_BLOCKS), ("doorkeeper", MIN_NAMES)])
def test_memory_is_bounded(name: str, limit: int) -> None:
    admission = make_filter(name, 100)
    chains = [chain_of(str(i), 20) for i in range(2000)]
    before = [sys.getrefcount(key) for chain in chains for key in chain]
    for now, chain in enumerate(chains):
        admission.observe(chain, float(now))
        admission.admit(chain, float(now))
    del chain
    after = [sys.getrefcount(key) for chain in chains for key in chain]
    known = sum(new > old for old, new in zip(before, after, strict=True))
    assert 100 < known <= (2 if name == "reuse" else 1) * limit


def test_who_listens_to_prompts_says_so() -> None:
    """Nobody lists the keys of a prompt for those that do not."""
    for names, base in ((POLICIES, EvictionPolicy), (FILTERS, AdmissionFilter)):
        for name, make in names.items():
            made = make(64)
            assert made.learns == (type(made).observe is not base.observe), name
