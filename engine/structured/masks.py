# SPDX-License-Identifier: Apache-2.0
"""The token masks of a step. The calling thread makes the fast masks; a second thread makes the
slow masks during the forward pass.

    start_jobs(jobs)  ──► accept each answer's new tokens, fill its rows
    wait_for_masks()  ──► all rows; a failed job has its error

Passing a job to the second thread costs more than most jobs, and takes the interpreter's lock from
the step. So the calling thread does the jobs of grammars that cannot hang (`is_bounded`) and were
fast so far, before the forward pass, while the CPU caches still hold their data.

A grammar that may hang runs in a process of its own, which is killed at a time limit
(`processes/followed_apart.py`). If a matcher in the engine process hangs nevertheless, only the
matcher's job fails. The hanging thread is abandoned, and a new thread does the other jobs.
`on_hang` is called with the grammar, whose matchers are not used again."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from itertools import accumulate

from .base import BITS, GrammarError, Rows
from .mask_jobs import CLOSE_SECONDS, HANGS, MaskJob, OnHang, note_hang
from .processes.limited_thread import Job, Limit, LimitedThread

logger = logging.getLogger(__name__)

MASK_LIMIT = Limit(cpu_seconds=1.0)
# Limits of the calling thread's jobs: each, and all. The second thread costs 0.3 to 0.9 ms a step.
QUICK_SECONDS = 0.0003
MOST_QUICK_SECONDS = 0.001
_POLL_SECONDS = 0.02


class MaskMaker:
    """Makes masks for a vocabulary of `vocab_size` tokens. One thread makes all calls."""

    def __init__(
        self, vocab_size: int, limit: Limit = MASK_LIMIT, on_hang: OnHang | None = None
    ) -> None:
        self._num_words = -(-vocab_size // BITS)
        self._limit = limit
        self._on_hang = on_hang or note_hang
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: LimitedThread | None = None
        self._batch: _Batch | None = None
        self._rows = Rows(0, self._num_words)  # for batches that need no thread
        self.num_handed_over = 0  # jobs that the second thread did

    @property
    def has_begun(self) -> bool:
        return self._batch is not None

    @property
    def is_done(self) -> bool:
        return self._batch is None or self._batch.wait(0.0)

    def start_jobs(self, jobs: Sequence[MaskJob]) -> None:
        """Do the fast jobs, and start the second thread on all other jobs. `jobs` must not be
        empty, and `wait_for_masks` must have returned the jobs of the previous call."""
        starts: Sequence[int] = range(len(jobs))
        num_rows = len(jobs)
        if any(job.drafts for job in jobs):
            starts = [0, *accumulate([job.num_rows for job in jobs])]
            num_rows = starts[-1]
        quick, others = _divide(jobs)
        if others:  # new rows, since an abandoned thread may write to the old rows
            rows = Rows(num_rows, self._num_words)
        else:
            if num_rows > len(self._rows.words):
                self._rows = Rows(2 * num_rows, self._num_words)
            rows = self._rows
        self._batch = batch = _Batch(jobs, rows, starts, num_rows)
        if others:
            batch.give(others)
            self.num_handed_over += len(others)
            self._run(batch)
        batch.run(quick)

    def wait_for_masks(self) -> tuple[Sequence[MaskJob], Rows, int]:
        """Wait for the second thread. Return the jobs, `Rows`, and the number of rows of the jobs,
        which are the first rows of `Rows`, in job order. The rows of a job with an error are
        invalid. All rows are valid until the next `start_jobs`."""
        batch = self._batch
        assert batch is not None
        self._batch = None
        while not batch.wait(_POLL_SECONDS):
            if self._thread is not None and self._thread.abandon_if_over(self._limit):
                self._thread = None
                self._on_hang(batch.jobs[batch.places[batch.at]].follower.grammar)
                batch = batch.without_hung_one()
                self._run(batch)
        for place, error in batch.errors.items():
            batch.jobs[place].error = error
        return batch.jobs, batch.rows, batch.num_rows

    def close(self) -> None:
        """End the thread, unless it hangs. A second call does nothing."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(CLOSE_SECONDS)
            self._thread = None

    def _run(self, batch: _Batch) -> None:
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = LimitedThread("stratakv-masks", self._jobs)
        self._jobs.put(lambda thread: _work(thread, batch))


def _divide(jobs: Sequence[MaskJob]) -> tuple[list[int], list[int]]:
    """Return the indices of the jobs for the calling thread, and of those for the second thread."""
    quick: list[int] = []
    others: list[int] = []
    left = MOST_QUICK_SECONDS
    for place, job in enumerate(jobs):
        follower = job.follower
        if job.is_made:
            quick.append(place)
            continue
        seconds = follower.row_seconds * (1 + len(job.drafts))
        if seconds <= QUICK_SECONDS and seconds <= left and follower.is_bounded:
            left -= seconds
            quick.append(place)
        else:
            others.append(place)
    return quick, others


def _work(thread: LimitedThread, batch: _Batch) -> None:
    """Do the second thread's jobs of the batch, one after another. Runs on that thread."""
    at = batch.at

    def note() -> None:
        batch.at = at

    for at in range(batch.at, len(batch.places)):
        if not thread.next_piece(note):
            return
        batch.run([batch.places[at]])
    batch.set_done()


class _Batch:
    """The jobs of one step, and the second thread's progress. `places` are the indices of that
    thread's jobs. A batch keeps its errors until it is collected, so an abandoned thread with an
    older batch has no effect."""

    def __init__(
        self, jobs: Sequence[MaskJob], rows: Rows, starts: Sequence[int], num_rows: int
    ) -> None:
        """The first `num_rows` rows of `rows` belong to the jobs. The rows of job i begin at
        `starts[i]`."""
        self.jobs = jobs
        self.num_rows = num_rows
        self.rows = rows
        self.starts = starts
        self.errors: dict[int, str] = {}  # index in `jobs` → error
        self.places: Sequence[int] = ()
        self.at = 0  # index in `places` of the current or next job
        self._is_done: threading.Event | None = None

    def give(self, places: Sequence[int]) -> None:
        self.places, self._is_done = places, threading.Event()

    def wait(self, seconds: float) -> bool:
        return self._is_done is None or self._is_done.wait(seconds)

    def set_done(self) -> None:
        assert self._is_done is not None
        self._is_done.set()

    def run(self, places: Sequence[int]) -> None:
        """Do the jobs at `places`, and record each job's seconds per row. An exception becomes the
        job's error."""
        cpu, began = time.thread_time(), time.perf_counter()
        for place in places:
            job, is_made = self.jobs[place], self.jobs[place].is_made
            try:
                job.run(self.rows, self.starts[place])
            except GrammarError as caught:
                self.errors[place] = str(caught)
            except Exception as caught:
                logger.exception("a grammar's matcher failed")
                self.errors[place] = f"{type(caught).__name__}: {caught}"
            ended = time.perf_counter()
            if not is_made:
                seconds = ended - began
                if seconds > QUICK_SECONDS:  # a slow job, or an interrupted one
                    seconds = min(seconds, time.thread_time() - cpu)
                job.follower.note_seconds(seconds / job.num_rows)
            began = ended

    def without_hung_one(self) -> _Batch:
        """Return a batch of the jobs after the hanging job, which fails. The hanging thread may
        still write to the rows and errors of the old batch."""
        rows = Rows(*self.rows.words.shape)
        rows.words[:] = self.rows.words
        rest = _Batch(self.jobs, rows, self.starts, self.num_rows)
        rest.errors = {**self.errors, self.places[self.at]: HANGS}
        rest.give(self.places)
        rest.at = self.at + 1
        return rest
