# SPDX-License-Identifier: Apache-2.0
"""The token masks of a step: by the caller where that is quick, else by a thread beside the forward
pass.

    begin(jobs) ──► each answer's new tokens are accepted, its rows filled: by the caller where that
                    is quick, else by the thread
    collect()   ──► rows of all; a job that failed says why

To hand a job over and to wake up again costs more than most jobs do, and takes the interpreter's
lock from the step in between. So the caller does those of grammars that cannot hang (`is_bounded`)
and that have been quick so far, at once: before a forward pass its caches still hold what that
works on.

What may hang is followed by a process (`followed_apart.py`), which is killed at a limit. A matcher
that hangs in the engine all the same is given up alone: its thread is left behind, another one does
the rest, and `on_hang` is told the grammar, no matcher of which is asked again.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from .base import BITS, Grammar, GrammarError, Matcher, Rows, Words, fill_drafts
from .fair_queue import FairQueue
from .limited_thread import Job, Limit, LimitedThread

logger = logging.getLogger(__name__)

MASK_LIMIT = Limit(cpu_seconds=1.0)
# What the caller does itself: jobs that take no longer than the first, together than the second.
# A hand-over costs the step 0.3 to 0.9 ms.
QUICK_SECONDS = 0.0003
MOST_QUICK_SECONDS = 0.001
# What takes longer is made between steps, which its request sits out.
SLOW_SECONDS = 0.001
_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 5.0
HANGS = "the grammar of this request takes too long to follow; make it simpler"


OnHang = Callable[[Grammar], None]


class Follower:
    """Where one answer is in its grammar. `first_words` is the row at its beginning, where somebody
    has made it already, and `first_seconds` what that took."""

    def __init__(
        self,
        grammar: Grammar,
        first_words: Words | None = None,
        first_seconds: float = 0.0,
        tenant: str = "",
    ) -> None:
        self.grammar = grammar
        self.tenant = tenant
        self._matcher: Matcher | None = None
        self.is_bounded = grammar.is_bounded  # it cannot hang
        self.first_words = first_words
        self.num_taken = 0  # output tokens that have been accepted, or lie before the grammar
        self.first_seconds = first_seconds
        # What a row of it has taken: the last one, or longer ones before; at first nobody knows.
        self.row_seconds = math.inf
        self.ahead: _Ahead | None = None  # its next row, while that is made between steps
        self.failed = ""  # why that could not be made
        self.num_white = 0  # tokens of white space up to here, where nothing else could come

    @property
    def matcher(self) -> Matcher:
        """Made where it is first used."""
        if self._matcher is None:
            self._matcher = self.grammar.matcher()
        return self._matcher

    def note_seconds(self, seconds: float) -> None:
        """A row took so long. One that was interrupted is forgotten after a few others. What a
        process makes is always made between steps, as what nobody knows."""
        if self.grammar.is_apart:
            return
        before = self.row_seconds
        self.row_seconds = seconds if before == math.inf else max(seconds, before / 2)


@dataclass(slots=True)
class MaskJob:
    """The rows of one answer: one for the place after its output, and one after each draft token.
    Rows behind a draft token that the grammar refuses allow every token; nobody gets there."""

    follower: Follower
    new_tokens: Sequence[int]  # of its output, since the last mask
    drafts: Sequence[int] = ()
    error: str = ""
    ends: Sequence[bool] = ()  # of a job with drafts, for each row that its grammar filled

    @property
    def num_rows(self) -> int:
        return 1 + len(self.drafts)

    @property
    def is_made(self) -> bool:
        """Whether its row is there, and only to be copied."""
        return self.follower.first_words is not None and not (self.new_tokens or self.drafts)

    def may_end(self, row: int = 0) -> bool:
        """Whether the grammar may end at this row; of a job that is done, without an error."""
        if not self.drafts:
            return self.follower.matcher.may_end
        return row < len(self.ends) and self.ends[row]

    def run(self, rows: Rows, first: int) -> None:
        """Fill `num_rows` of the rows from the first on. Raises GrammarError."""
        follower = self.follower
        if follower.first_words is not None:
            if not (self.new_tokens or self.drafts):  # it is there
                rows.words[first] = follower.first_words
                return
            follower.first_words = None
        if follower.failed or follower.grammar.hangs:
            raise GrammarError(follower.failed or HANGS)
        matcher = follower.matcher
        for token in self.new_tokens:
            if not matcher.accept(token):
                raise GrammarError(f"it does not allow token {token} where that was chosen")
        if not self.drafts:
            matcher.fill_row(rows, first)
        else:
            own = rows.words[first : first + self.num_rows]
            self.ends = fill_drafts(matcher, self.drafts, own)
            own[len(self.ends) :] = -1


class _Batch:
    """The jobs of one step, and how far the thread has come with those of them that are its own, in
    `places`. Errors are the batch's until it is collected, so that a thread that was left behind
    with another batch tells nobody."""

    def __init__(
        self, jobs: Sequence[MaskJob], rows: Rows, starts: Sequence[int], num_rows: int
    ) -> None:
        """So many of the rows are its own; the first of each job is at `starts`."""
        self.jobs = jobs
        self.num_rows = num_rows
        self.rows = rows
        self.starts = starts
        self.errors: dict[int, str] = {}  # by place
        self.places: Sequence[int] = ()
        self.at = 0  # in `places`: the job that is next, or under way
        self._is_done: threading.Event | None = None

    def give(self, places: Sequence[int]) -> None:
        """These are the thread's."""
        self.places, self._is_done = places, threading.Event()

    def wait(self, seconds: float) -> bool:
        """Whether the thread is done with its jobs."""
        return self._is_done is None or self._is_done.wait(seconds)

    def set_done(self) -> None:
        """The thread is."""
        assert self._is_done is not None
        self._is_done.set()

    def run(self, places: Sequence[int]) -> None:
        """Do these jobs, and note how long a row of each took. What one raises is its error."""
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
                if seconds > QUICK_SECONDS:  # or it was interrupted
                    seconds = min(seconds, time.thread_time() - cpu)
                job.follower.note_seconds(seconds / job.num_rows)
            began = ended

    def without_hung_one(self) -> _Batch:
        """What is behind the job at which a thread hangs, which fails. That thread may still write
        into its own rows and errors."""
        rows = Rows(*self.rows.words.shape)
        rows.words[:] = self.rows.words
        rest = _Batch(self.jobs, rows, self.starts, self.num_rows)
        rest.errors = {**self.errors, self.places[self.at]: HANGS}
        rest.give(self.places)
        rest.at = self.at + 1
        return rest


class MaskMaker:
    """Masks for a vocabulary of `vocab_size` tokens. Called by one thread."""

    def __init__(
        self, vocab_size: int, limit: Limit = MASK_LIMIT, on_hang: OnHang | None = None
    ) -> None:
        self._num_words = -(-vocab_size // BITS)
        self._limit = limit
        self._on_hang = on_hang or _note_hang
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: LimitedThread | None = None
        self._batch: _Batch | None = None
        self._rows = Rows(0, self._num_words)  # for batches in which no thread has a part
        self.num_handed_over = 0  # jobs that a thread did

    @property
    def has_begun(self) -> bool:
        return self._batch is not None

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not have to wait."""
        return self._batch is None or self._batch.wait(0.0)

    def begin(self, jobs: Sequence[MaskJob]) -> None:
        """Do the quick ones of these jobs, at least one, of which none is under way, and have the
        thread start on the others."""
        starts: Sequence[int] = range(len(jobs))
        num_rows = len(jobs)
        if any(job.drafts for job in jobs):
            starts = [0, *accumulate([job.num_rows for job in jobs])]
            num_rows = starts[-1]
        quick, others = _divide(jobs)
        if others:  # a thread that is left behind may write into them for ever
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

    def collect(self) -> tuple[Sequence[MaskJob], Rows, int]:
        """Wait for the thread: the jobs, the rows of all in their order, and how many these are of
        those that there are. They mean nothing where a job has an error, and after the next
        `begin`."""
        batch = self._batch
        assert batch is not None
        self._batch = None
        while not batch.wait(_POLL_SECONDS):
            if self._thread is not None and self._thread.leave(self._limit):
                self._thread = None
                self._on_hang(batch.jobs[batch.places[batch.at]].follower.grammar)
                batch = batch.without_hung_one()
                self._run(batch)
        for place, error in batch.errors.items():
            batch.jobs[place].error = error
        return batch.jobs, batch.rows, batch.num_rows

    def close(self) -> None:
        """End the thread, unless it hangs. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None

    def _run(self, batch: _Batch) -> None:
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = LimitedThread("stratakv-masks", self._jobs)
        self._jobs.put(lambda thread: _work(thread, batch))


def _divide(jobs: Sequence[MaskJob]) -> tuple[list[int], list[int]]:
    """The places of those that the caller does, and of the others."""
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
    """On the thread: one job after the other."""
    at = batch.at

    def note() -> None:
        batch.at = at

    for at in range(batch.at, len(batch.places)):
        if not thread.next_piece(note):
            return
        batch.run([batch.places[at]])
    batch.set_done()


@dataclass(slots=True)
class _Ahead:
    """A row that is made between steps. What the thread writes is read once `is_done`."""

    job: MaskJob
    row: Rows  # one
    is_later: bool  # it is known to take long, and those of which nobody knows go before it
    error: str = ""
    is_done: bool = False

    @property
    def lane(self) -> Grammar | None:
        """The grammar whose process makes it; None: it is made here."""
        grammar = self.job.follower.grammar
        return grammar if grammar.is_apart else None


class _Turns:
    """Jobs for a thread, two queues of them, in each of which the tenant that has used least is
    next."""

    def __init__(self) -> None:
        self._first: FairQueue[Job] = FairQueue()
        self._later: FairQueue[Job] = FairQueue()
        self._count: queue.SimpleQueue[bool] = queue.SimpleQueue()  # an entry for each job
        self._has_ended = False

    def put(self, tenant: str, job: Job, *, is_later: bool) -> None:
        (self._later if is_later else self._first).put(tenant, job)
        self._count.put(True)

    def charge(self, tenant: str, seconds: float) -> None:
        """A job of this tenant has taken so long."""
        self._first.charge(tenant, seconds)
        self._later.charge(tenant, seconds)

    def end(self) -> None:
        """Whoever gets a job next is told to end, instead of the jobs that are left."""
        self._has_ended = True
        self._count.put(False)

    def get(self) -> Job | None:
        self._count.get()
        if self._has_ended:
            return None
        return (self._first if len(self._first) else self._later).get()


def _note_hang(grammar: Grammar) -> None:
    grammar.hangs = True


class _Lane:
    """A thread and its jobs: one for what is followed here, and one for each grammar that a process
    follows, which others do not wait for."""

    def __init__(self) -> None:
        self.jobs = _Turns()
        self.thread = LimitedThread("stratakv-masks-ahead", self.jobs)
        self.at: _Ahead | None = None  # at which the thread is, or was last
        self.num_open = 0


class AheadMaker:
    """Rows that may take long, made between steps: a step waits for none of them, and the request
    sits out until its row is there. Those that are known to take long come last, so that whoever
    asks for such a grammar again and again holds up no other's. Called by the step's thread;
    `wakeup` by its own."""

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
        self._on_hang = on_hang or _note_hang
        self._lanes: dict[Grammar | None, _Lane] = {}  # None: of those that are followed here
        self._open: list[_Ahead] = []
        self.num_made = 0

    @property
    def is_due(self) -> bool:
        """Whether a row has come, or can be given up, of which nobody has taken note."""
        return bool(self._open) and (any(each.is_done for each in self._open) or self._hangs())

    @property
    def num_open(self) -> int:
        return len(self._open)

    def is_ready(self, follower: Follower, output: Sequence[int], start: int) -> bool:
        """Whether a step need not wait for the row behind `output`, which begins at `start`: it is
        there, it cannot be made, or it is quick. Else it is made from now on."""
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
        follower.ahead = _Ahead(MaskJob(follower, new), Rows(1, self._num_words), is_later=is_known)
        self._begin(follower.ahead)
        return False

    def take_note(self) -> None:
        """Of what is made, whoever wanted it. A row that takes too long fails, and another thread
        makes the others."""
        if not self._open:
            return
        for each in self._open:
            if each.is_done:
                self._take_note(each)
        left = [each for each in self._open if not each.is_done]
        self.num_made += len(self._open) - len(left)
        self._open = left
        here = self._lanes.get(None)
        if left and here is not None and here.thread.leave(self._limit):
            del self._lanes[None]
            hung = here.at
            assert hung is not None
            hung.error, hung.is_done = HANGS, True
            self._on_hang(hung.job.follower.grammar)
            rest = [each for each in left if each is not hung and each.lane is None]
            self._open = [each for each in left if each.lane is not None]
            for ahead in rest:
                self._begin(ahead)

    def close(self) -> None:
        """End the threads, unless one hangs. Idempotent."""
        self._open.clear()
        lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.jobs.end()
        for lane in lanes:
            lane.thread.join(_CLOSE_SECONDS)

    def _begin(self, ahead: _Ahead) -> None:
        self._open.append(ahead)
        lane = self._lanes.get(ahead.lane)
        if lane is None:
            lane = self._lanes[ahead.lane] = _Lane()
        lane.num_open += 1
        tenant = ahead.job.follower.tenant
        lane.jobs.put(tenant, partial(self._make, lane, ahead), is_later=ahead.is_later)

    def _take_note(self, ahead: _Ahead) -> None:
        """Its lane is left where that was the last, unless it is the one of all others."""
        lane = self._lanes.get(ahead.lane)
        if lane is None:
            return
        lane.num_open -= 1
        if not lane.num_open and ahead.lane is not None:
            lane.jobs.end()
            del self._lanes[ahead.lane]

    def _make(self, lane: _Lane, ahead: _Ahead, thread: LimitedThread) -> None:
        """On the thread."""

        def begin() -> None:
            lane.at = ahead

        if ahead.lane is None:  # else it waits for a process, and not for a processor
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
