# SPDX-License-Identifier: Apache-2.0
"""The masks of a step: who makes which row, and what a grammar that hangs leaves to the others."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

from stratakv.engine.structured.base import Grammar, Matcher, Words
from stratakv.engine.structured.mask_jobs import HANGS, Follower, MaskJob
from stratakv.engine.structured.masks import QUICK_SECONDS, MaskMaker

from .test_limits import Spinner, spec
from .waiting import SHORT


def test_one_that_does_not_stop_in_a_step_fails_alone(threads_end: None) -> None:
    """And its grammar is not followed again, so that each leaves one thread behind at the most."""
    backend, hung = Spinner(compiles=True), []

    def on_hang(grammar: Grammar) -> None:
        grammar.hangs = True
        hung.append(grammar)

    maker = MaskMaker(40, SHORT, on_hang)
    spinning = backend.compile(spec("spin"))
    try:
        for count in (1, 1):
            rows_of = (("a", ()), ("spin", ()), ("b", (1,)), ("spin", (2,)), ("c", ()))
            maker.start_jobs([
                MaskJob(
                    Follower(spinning if text == "spin" else backend.compile(spec(text))),
                    [1, 2], drafts,
                )
                for text, drafts in rows_of
            ])  # fmt: skip
            done, rows = collected(maker)
            assert [job.error for job in done] == ["", HANGS, "", HANGS, ""]
            assert rows.shape == (7, 2) and (rows[[0, 2, 3, 6]] == 7).all()
            assert hung == [spinning] * count
    finally:
        backend.stop.set()
        maker.close()


def collected(maker: MaskMaker) -> tuple[Sequence[MaskJob], Words]:
    jobs, rows, num_rows = maker.wait_for_masks()
    return jobs, rows.words[:num_rows]


class Noting(Matcher):
    """Notes which thread makes its rows."""

    may_end = False

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def accept(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill(self, words: Words) -> None:
        self.threads.append(threading.current_thread())
        words[:] = 7


class NotingGrammar(Grammar):
    num_bytes = 1

    def __init__(self, *, is_bounded: bool) -> None:
        self.is_bounded = is_bounded
        self.made = Noting()

    def matcher(self) -> Matcher:
        return self.made


def test_quick_rows_are_made_by_the_caller_and_others_by_the_thread(threads_end: None) -> None:
    maker = MaskMaker(40)
    bounded, free = NotingGrammar(is_bounded=True), NotingGrammar(is_bounded=False)
    first = np.full(2, 5, np.int32)
    followers = [Follower(bounded, first), Follower(free)]
    made = [each.made.threads for each in (bounded, free)]

    def rows(new: list[int], *, costs: float) -> list[list[int]]:
        for follower in followers:
            if new:
                follower.row_seconds = costs
        maker.start_jobs([MaskJob(follower, new) for follower in followers])
        jobs, rows = collected(maker)
        assert [job.error for job in jobs] == ["", ""]
        return rows.tolist()

    def by_caller() -> list[bool]:
        return [by_caller_of(threads) for threads in made]

    try:
        assert rows([], costs=0.0) == [[5, 5], [7, 7]]  # the first one was there
        assert not made[0] and not by_caller_of(made[1])
        assert rows([1], costs=math.inf) == [[7, 7]] * 2  # nobody knows yet
        assert by_caller() == [False, False]
        rows([1], costs=0.0)
        assert by_caller() == [True, False]  # what may hang never is the caller's
        rows([1], costs=1.0)
        assert by_caller() == [False, False]
        followers[:] = [Follower(bounded) for _ in range(12)]
        rows_of_all = len(made[0])
        for follower in followers:
            follower.row_seconds = 0.0002
        maker.start_jobs([MaskJob(follower, [1]) for follower in followers])
        maker.wait_for_masks()
        callers = [thread is threading.current_thread() for thread in made[0][rows_of_all:]]
        assert callers.count(True) == 5  # a millisecond's worth
    finally:
        maker.close()


def by_caller_of(threads: list[threading.Thread]) -> bool:
    return threads[-1] is threading.current_thread()


def test_rows_behind_a_draft_that_is_refused_allow_everything(threads_end: None) -> None:
    maker = MaskMaker(40)
    try:
        follower = Follower(NotingGrammar(is_bounded=True))
        maker.start_jobs([MaskJob(follower, [], drafts=(2, 9, 1))])  # 0 to 2 are allowed
        [job], rows = collected(maker)
        assert job.error == "" and rows.tolist() == [[7, 7], [7, 7], [-1, -1], [-1, -1]]
    finally:
        maker.close()


def test_a_row_that_was_interrupted_is_forgotten() -> None:
    follower = Follower(NotingGrammar(is_bounded=True))
    follower.note_seconds(1e-5)
    follower.note_seconds(4e-3)
    assert follower.row_seconds == 4e-3
    for _ in range(4):
        follower.note_seconds(1e-5)
    assert follower.row_seconds <= QUICK_SECONDS
