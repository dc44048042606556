# SPDX-License-Identifier: Apache-2.0
"""Rows that are made between steps: in which order, and what becomes of one that hangs."""

from __future__ import annotations

import math
import os
import threading

from stratakv.engine.structured.base import Grammar, Matcher, Words
from stratakv.engine.structured.mask_jobs import HANGS, SLOW_SECONDS, Follower
from stratakv.engine.structured.masks import MASK_LIMIT
from stratakv.engine.structured.masks_ahead import AheadMaker
from stratakv.engine.structured.processes.limited_thread import _may_come_back

from .waiting import SHORT, WAIT_SECONDS, wait_for


class OrderlyGrammar(Grammar):
    """Its rows are noted in `made`; that of `gate` waits for it, and that of `spin` never ends."""

    num_bytes, is_bounded = 10, True

    def __init__(self, name: str, made: list[str], gate: threading.Event) -> None:
        self.name, self.made, self.gate = name, made, gate
        self.policy: int | None = None  # of the thread that made one

    def matcher(self) -> Matcher:
        return OrderlyMatcher(self)


class OrderlyMatcher(Matcher):
    may_end = False

    def __init__(self, grammar: OrderlyGrammar) -> None:
        self._grammar = grammar

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill(self, words: Words) -> None:
        grammar = self._grammar
        if hasattr(os, "SCHED_IDLE"):
            grammar.policy = os.sched_getscheduler(0)
        if grammar.name == "gate":
            assert grammar.gate.wait(WAIT_SECONDS)
        while grammar.name == "spin" and not grammar.gate.is_set():
            pass
        grammar.made.append(grammar.name)
        words[:] = 9


def test_rows_that_are_known_to_take_long_come_last(threads_end: None) -> None:
    maker, made, gate = AheadMaker(40, MASK_LIMIT, lambda: None), [], threading.Event()
    grammars: list[OrderlyGrammar] = []

    def begin(name: str, first_seconds: float) -> Follower:
        grammars.append(OrderlyGrammar(name, made, gate))
        follower = Follower(grammars[-1], None, first_seconds)
        assert not maker.is_ready(follower, [1], 0)
        return follower

    try:
        followers = [begin("gate", 0.0)]  # while it is made the others come
        wait_for(lambda: maker._lanes[None].at is not None)
        followers += [begin(f"long {number}", 2 * SLOW_SECONDS) for number in range(3)]
        followers += [begin("new", 0.0), begin("another", SLOW_SECONDS / 2)]
        gate.set()
        wait_for(lambda: all(each.ahead is not None and each.ahead.is_done for each in followers))
        assert made == ["gate", "new", "another", "long 0", "long 1", "long 2"]
        maker.take_note()
        assert (maker.num_open, maker.num_made) == (0, 6)
        assert all(maker.is_ready(each, [1], 0) for each in followers)
        assert [each.first_words.tolist() for each in followers] == [[9, 9]] * 6
        if _may_come_back():  # their thread gives way to steps
            assert {each.policy for each in grammars} == {os.SCHED_IDLE}
    finally:
        maker.close()


def test_a_row_that_hangs_fails_alone_whatever_was_asked_for_first(threads_end: None) -> None:
    made: list[str] = []
    gate, stop = threading.Event(), threading.Event()
    maker = AheadMaker(40, SHORT, lambda: None)
    try:
        followers = {}
        for name, seconds in (("gate", 0.0), ("long", 1.0), ("spin", 0.0), ("new", 0.0)):
            grammar = OrderlyGrammar(name, made, gate if name == "gate" else stop)
            followers[name] = Follower(grammar, None, seconds)
            assert not maker.is_ready(followers[name], [1], 0)
        gate.set()
        wait_for(lambda: (maker.take_note(), not maker.num_open)[1])
        for name, follower in followers.items():
            assert maker.is_ready(follower, [1], 0)
            assert follower.failed == (HANGS if name == "spin" else "")
        assert made == ["gate", "new", "long"]
    finally:
        stop.set()
        maker.close()


def test_y03_rows_behind_many_that_hang_are_made(threads_end: None) -> None:
    """However many hang: each of these grammars is asked once, and nobody else is refused."""
    stop, made = threading.Event(), list[str]()
    maker = AheadMaker(40, SHORT, lambda: None)
    spinning = [OrderlyGrammar("spin", [], stop) for _ in range(5)]
    followers = [Follower(each) for each in (*spinning, spinning[0])]
    followers.append(Follower(OrderlyGrammar("honest", made, stop)))
    try:
        assert not any(maker.is_ready(each, [1], 0) for each in followers)
        wait_for(lambda: (maker.take_note(), not maker.num_open)[1])
        assert all(maker.is_ready(each, [1], 0) for each in followers)
        assert [each.failed for each in followers] == [HANGS] * 6 + [""] and made == ["honest"]
    finally:
        stop.set()
        maker.close()


class ApartGrammar(OrderlyGrammar):
    """As one that a process follows."""

    is_apart = True


def test_y03_rows_of_a_process_hold_up_no_others(threads_end: None) -> None:
    gate, made = threading.Event(), list[str]()
    maker = AheadMaker(40, MASK_LIMIT, lambda: None)
    apart = ApartGrammar("gate", made, gate)
    slow = [Follower(each) for each in (apart, apart, ApartGrammar("gate", made, gate))]
    other = Follower(OrderlyGrammar("other", made, gate))
    try:
        assert not any(maker.is_ready(each, [1], 0) for each in (*slow, other))
        wait_for(lambda: other.ahead is not None and other.ahead.is_done)
        assert made == ["other"]
        gate.set()
        wait_for(lambda: (maker.take_note(), not maker.num_open)[1])
        assert all(maker.is_ready(each, [1], 0) for each in slow)
        assert list(maker._lanes) == [None]  # threads of the others end with their rows
        assert all(each.row_seconds == math.inf for each in slow)  # never made in a step
    finally:
        gate.set()
        maker.close()


def test_y03_tenants_have_their_turns_with_rows(threads_end: None) -> None:
    maker, made, gate = AheadMaker(40, MASK_LIMIT, lambda: None), list[str](), threading.Event()
    try:
        assert not maker.is_ready(Follower(OrderlyGrammar("gate", made, gate)), [1], 0)
        wait_for(lambda: maker._lanes[None].at is not None)
        for name in ("a0", "a1", "a2", "b0"):
            follower = Follower(OrderlyGrammar(name, made, gate), tenant=name[0])
            assert not maker.is_ready(follower, [1], 0)
        gate.set()
        wait_for(lambda: (maker.take_note(), not maker.num_open)[1])
        assert made == ["gate", "a0", "b0", "a1", "a2"]
    finally:
        maker.close()


def test_y03_rows_of_the_tenant_that_has_used_least_are_next(threads_end: None) -> None:
    maker, made, gate = AheadMaker(40, MASK_LIMIT, lambda: None), list[str](), threading.Event()

    def ask(name: str, tenant: str, first_seconds: float = 0.0) -> None:
        grammar = OrderlyGrammar(name, made, gate)
        assert not maker.is_ready(Follower(grammar, None, first_seconds, tenant=tenant), [1], 0)

    try:
        ask("gate", "greedy")
        wait_for(lambda: maker._lanes[None].at is not None)
        for tenant in ("greedy", "honest"):
            ask(f"{tenant}'s", tenant)
            ask(f"{tenant}'s long", tenant, 1.0)
        gate.set()
        wait_for(lambda: (maker.take_note(), not maker.num_open)[1])
        assert made == ["gate", "honest's", "greedy's", "honest's long", "greedy's long"]
    finally:
        maker.close()


def test_rows_that_nobody_wants_are_not_made_at_the_end(threads_end: None) -> None:
    made: list[str] = []
    gate = threading.Event()
    maker = AheadMaker(40, MASK_LIMIT, lambda: None)
    for name in ("gate", "new", "newer"):
        maker.is_ready(Follower(OrderlyGrammar(name, made, gate)), [1], 0)
    wait_for(lambda: maker._lanes[None].at is not None)
    closer = threading.Thread(target=maker.close)
    closer.start()
    wait_for(lambda: not maker._lanes)
    gate.set()
    closer.join(WAIT_SECONDS)
    assert made == ["gate"]
