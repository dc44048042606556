# SPDX-License-Identifier: Apache-2.0
"""The token masks of a step, made on a thread of their own beside the forward pass.

    begin(jobs) ──► the thread: each answer's new tokens are accepted, its rows filled
    collect()   ──► rows of all; a job that failed, or that took too long, says why

A job that hangs is given up alone: its thread is left behind, and another one does the rest.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .base import BITS, Grammar, GrammarError, Matcher, fill_drafts
from .limited_thread import Job, LeftBehind, Limit, LimitedThread

logger = logging.getLogger(__name__)

MASK_LIMIT = Limit(cpu_seconds=1.0)
_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 5.0
HANGS = "the grammar of this request takes too long to follow; make it simpler"
TOO_MANY_HANG = "too many grammars before it hang, so none is followed any more; restart the engine"


class Follower:
    """Where one answer is in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: Matcher | None = None
        self.num_taken = 0  # output tokens that have been accepted, or lie before the grammar

    @property
    def matcher(self) -> Matcher:
        """Made where it is first used, by the thread."""
        if self._matcher is None:
            self._matcher = self._grammar.matcher()
        return self._matcher


@dataclass(slots=True)
class MaskJob:
    """The rows of one answer: one for the place after its output, and one after each draft token.
    Rows behind a draft token that the grammar refuses allow every token; nobody gets there."""

    follower: Follower
    new_tokens: Sequence[int]  # of its output, since the last mask
    drafts: Sequence[int] = ()
    error: str = ""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.drafts)

    @property
    def may_end(self) -> bool:
        """Whether the grammar may end at the first row; of a job that is done, without an error."""
        return self.follower.matcher.may_end

    def run(self, rows: npt.NDArray[np.int32]) -> None:
        """Fill `rows` `[num_rows, words]`. Raises GrammarError."""
        matcher = self.follower.matcher
        for token in self.new_tokens:
            if not matcher.accept(token):
                raise GrammarError(f"it does not allow token {token} where that was chosen")
        if not self.drafts:
            matcher.fill(rows[0])
        else:
            filled = fill_drafts(matcher, self.drafts, rows)
            rows[filled:] = -1


class _Batch:
    """The jobs of one step, and how far the thread has come. Errors are the batch's until it is
    collected, so that a thread that was left behind with another batch tells nobody."""

    def __init__(self, jobs: Sequence[MaskJob], rows: npt.NDArray[np.int32]) -> None:
        self.jobs = jobs
        self.rows = rows
        self.errors: list[str] = [""] * len(jobs)
        self.at = self.row = 0  # of the job that is next, or under way
        self.is_done = threading.Event()

    def without_hung_one(self) -> _Batch:
        """What is behind the job at which a thread hangs, which fails. That thread may still write
        into its own rows and errors."""
        rest = _Batch(self.jobs, self.rows.copy())
        rest.errors = list(self.errors)
        rest.errors[self.at] = HANGS
        rest.at, rest.row = self.at + 1, self.row + self.jobs[self.at].num_rows
        return rest


class MaskMaker:
    """Masks for a vocabulary of `vocab_size` tokens. Called by one thread."""

    def __init__(self, vocab_size: int, limit: Limit = MASK_LIMIT) -> None:
        self._num_words = -(-vocab_size // BITS)
        self._limit = limit
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: LimitedThread | None = None
        self._left = LeftBehind()
        self._batch: _Batch | None = None

    @property
    def has_begun(self) -> bool:
        return self._batch is not None

    def begin(self, jobs: Sequence[MaskJob]) -> None:
        """Start on the jobs, at least one, of which none is under way."""
        num_rows = sum([job.num_rows for job in jobs])
        self._batch = _Batch(jobs, np.zeros((num_rows, self._num_words), np.int32))
        self._run(self._batch)

    def collect(self) -> tuple[Sequence[MaskJob], npt.NDArray[np.int32]]:
        """Wait for what was begun: the jobs, and the rows of all `[rows, words]` in their order,
        which mean nothing where a job has an error."""
        batch = self._batch
        assert batch is not None
        self._batch = None
        while not batch.is_done.wait(_POLL_SECONDS):
            if self._thread is not None and self._thread.leave(self._limit):
                self._left.add(self._thread)
                self._thread = None
                batch = batch.without_hung_one()
                self._run(batch)
        for job, error in zip(batch.jobs, batch.errors, strict=True):
            job.error = error
        return batch.jobs, batch.rows

    def close(self) -> None:
        """End the thread, unless it hangs. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def _run(self, batch: _Batch) -> None:
        if self._left.are_too_many:
            batch.errors[batch.at :] = [TOO_MANY_HANG] * (len(batch.jobs) - batch.at)
            batch.is_done.set()
            return
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = LimitedThread("stratakv-masks", self._jobs)
        self._jobs.put(lambda thread: _work(thread, batch))


def _work(thread: LimitedThread, batch: _Batch) -> None:
    """On the thread: one job after the other."""
    at, row = batch.at, batch.row

    def note() -> None:
        batch.at, batch.row = at, row

    for at in range(batch.at, len(batch.jobs)):
        if not thread.next_piece(note):
            return
        job = batch.jobs[at]
        end = row + job.num_rows
        try:
            job.run(batch.rows[row:end])
        except GrammarError as caught:
            batch.errors[at] = str(caught)
        except Exception as caught:
            logger.exception("a grammar's matcher failed")
            batch.errors[at] = f"{type(caught).__name__}: {caught}"
        row = end
    batch.is_done.set()
