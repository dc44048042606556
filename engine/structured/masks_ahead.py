# SPDX-License-Identifier: Apache-2.0
"""AheadMaker: mask rows that threads compute between steps."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Sequence
from functools import partial

from .base import BITS, Grammar, GrammarError, Rows
from .mask_jobs import (
    CLOSE_SECONDS,
    HANGS,
    SLOW_SECONDS,
    AheadRow,
    Follower,
    MaskJob,
    OnHang,
    note_hang,
)
from .processes.fair_queue import FairQueue
from .processes.limited_thread import Job, Limit, LimitedThread

logger = logging.getLogger(__name__)


class AheadMaker:
    """Makes slow mask rows between steps. No step waits for these rows: a request is left out of
    steps until its row is made. Rows that are known to be slow are made last, so a client with many
    slow grammars does not delay other rows. The step's thread calls the methods; the maker's own
    threads call `wakeup`."""

    def __init__(
        self,
        vocab_size: int,
        limit: Limit,
        wakeup: Callable[[], None],
        on_hang: OnHang | None = None,
    ) -> None:
        self._num_words = -(-vocab_size // BITS)
        self._limit = limit
        self._wakeup = wakeup
        self._on_hang = on_hang or note_hang
        self._lanes: dict[Grammar | None, _Lane] = {}  # by grammar in a process; None: all others
        self._open: list[AheadRow] = []
        self.num_made = 0

    @property
    def is_due(self) -> bool:
        """Whether `take_note` has a finished row to process, or a hanging row to fail."""
        return bool(self._open) and (any(each.is_done for each in self._open) or self._hangs())

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_ready(self, follower: Follower, output: Sequence[int], start: int) -> bool:
        """Whether a step has the row after `output` without a long wait: the row is made, cannot be
        made, or is fast to make. If not, a thread starts to make the row. The grammar applies to
        `output` from index `start` on."""
        ahead = follower.ahead
        if ahead is not None:
            if not ahead.is_done:
                return False
            follower.ahead = None
            if ahead.error:
                follower.failed = ahead.error
            else:
                follower.first_words = ahead.row.words[0]
        if follower.failed or follower.row_seconds <= SLOW_SECONDS:
            return True
        new = output[max(start, follower.num_taken) :]
        if not new and follower.first_words is not None:
            return True
        follower.first_words = None
        follower.num_taken = len(output)
        is_known = follower.row_seconds != math.inf or follower.first_seconds > SLOW_SECONDS
        follower.ahead = AheadRow(
            MaskJob(follower, new), Rows(1, self._num_words), is_later=is_known
        )
        self._enqueue_row(follower.ahead)
        return False

    def take_note(self) -> None:
        """Process all finished rows. A row over the time limit fails, and a new thread makes the
        other rows."""
        if not self._open:
            return
        for each in self._open:
            if each.is_done:
                self._take_note(each)
        left = [each for each in self._open if not each.is_done]
        self.num_made += len(self._open) - len(left)
        self._open = left
        here = self._lanes.get(None)
        if left and here is not None and here.thread.abandon_if_over(self._limit):
            del self._lanes[None]
            hung = here.at
            assert hung is not None
            hung.error, hung.is_done = HANGS, True
            self._on_hang(hung.job.follower.grammar)
            rest = [each for each in left if each is not hung and each.lane is None]
            self._open = [each for each in left if each.lane is not None]
            for ahead in rest:
                self._enqueue_row(ahead)

    def close(self) -> None:
        """End the threads, unless one hangs. A second call does nothing."""
        self._open.clear()
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.jobs.stop_next()
        for lane in lanes:
            lane.thread.join(CLOSE_SECONDS)

    def _enqueue_row(self, ahead: AheadRow) -> None:
        self._open.append(ahead)
        lane = self._lanes.get(ahead.lane)
        if lane is None:
            lane = self._lanes[ahead.lane] = _Lane()
        lane.num_open += 1
        tenant = ahead.job.follower.tenant
        lane.jobs.put(tenant, partial(self._make, lane, ahead), is_later=ahead.is_later)

    def _take_note(self, ahead: AheadRow) -> None:
        """Count a finished row. After the last open row of a grammar with its own process, end the
        lane of that grammar. The shared lane stays."""
        lane = self._lanes.get(ahead.lane)
        if lane is None:
            return
        lane.num_open -= 1
        if not lane.num_open and ahead.lane is not None:
            lane.jobs.stop_next()
            del self._lanes[ahead.lane]

    def _make(self, lane: _Lane, ahead: AheadRow, thread: LimitedThread) -> None:
        """Make a row. Runs on the lane's thread."""

        def begin() -> None:
            lane.at = ahead

        if ahead.lane is None:  # a thread of a process's lane only waits
            thread.give_way()
        if not thread.next_piece(begin):
            return
        began, cpu, error = time.monotonic(), time.thread_time(), ""
        try:
            ahead.job.run(ahead.row, 0)
        except GrammarError as caught:
            error = str(caught)
        except Exception as caught:
            logger.exception("a grammar's matcher failed")
            error = f"{type(caught).__name__}: {caught}"

        lane.jobs.charge(ahead.job.follower.tenant, time.monotonic() - began)

        def note() -> None:
            ahead.job.follower.note_seconds(time.thread_time() - cpu)
            ahead.error = error
            ahead.is_done = True

        if thread.next_piece(note):
            self._wakeup()

    def _hangs(self) -> bool:
        here = self._lanes.get(None)
        return here is not None and here.thread.is_over(self._limit)


class _Turns:
    """Two job queues for one thread. The second queue is served only while the first is empty. In
    each queue, the tenant that has used the least time is served next."""

    def __init__(self) -> None:
        self._first: FairQueue[Job] = FairQueue()
        self._later: FairQueue[Job] = FairQueue()
        self._count: queue.SimpleQueue[bool] = queue.SimpleQueue()  # has an entry for each job
        self._has_ended = False

    def put(self, tenant: str, job: Job, *, is_later: bool) -> None:
        (self._later if is_later else self._first).put(tenant, job)
        self._count.put(True)

    def charge(self, tenant: str, seconds: float) -> None:
        self._first.charge(tenant, seconds)
        self._later.charge(tenant, seconds)

    def stop_next(self) -> None:
        """Make the thread end at its next `get`; the remaining jobs are dropped."""
        self._has_ended = True
        self._count.put(False)

    def get(self) -> Job | None:
        self._count.get()
        if self._has_ended:
            return None
        return (self._first if len(self._first) else self._later).get()


class _Lane:
    """A thread and its jobs. One lane serves all grammars that run in the engine process. Each
    grammar in a separate process has its own lane, so that no other row waits for this process."""

    def __init__(self) -> None:
        self.jobs = _Turns()
        self.thread = LimitedThread("stratakv-masks-ahead", self.jobs)
        self.at: AheadRow | None = None  # the row that the thread makes, or made last
        self.num_open = 0
