# SPDX-License-Identifier: Apache-2.0
"""A lane does one thing after the other in time; futures that follow on futures bring what they
should, also where some fail."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from stratakv.tiers.errors import TierBusy, TierClosed, TierError
from stratakv.tiers.remote.futures import all_of, then
from stratakv.tiers.remote.transfer_queue import RemoteError, RemoteLate, TransferQueue
from stratakv.tiers.remote.transfers import Transfer, Transfers
from stratakv.tiers.wire.sockets import ConnectionLost

WAIT = 10.0


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What only the collector would find stays."""
    gc.disable()
    yield
    gc.enable()


def soon(seconds: float = WAIT) -> float:
    return time.monotonic() + seconds


def test_one_after_the_other_in_their_order() -> None:
    queue = TransferQueue("lane", 1000)
    done: list[int] = []
    threads: set[threading.Thread] = set()

    def work(number: int) -> int:
        threads.add(threading.current_thread())
        done.append(number)
        return number

    futures = [queue.submit(lambda _, n=n: work(n), soon(), 1) for n in range(100)]
    assert [future.result(WAIT) for future in futures] == done == list(range(100))
    assert len(threads) == 1
    assert queue.close(soon())


def test_no_thread_before_there_is_something_to_do() -> None:
    before = threading.active_count()
    queue = TransferQueue("lane", 1000)
    assert threading.active_count() == before
    assert queue.close(soon(0))


def test_more_bytes_than_may_wait() -> None:
    queue = TransferQueue("lane", 100)
    go = threading.Event()
    held = queue.submit(lambda _: go.wait(WAIT), soon(), 60)
    queue.submit(lambda _: None, soon(), 40)
    with pytest.raises(TierBusy, match="100 bytes wait for the lane already"):
        queue.submit(lambda _: None, soon(), 1)
    queue.submit(lambda _: None, soon(), 0)  # what takes no bytes is always taken
    go.set()
    assert held.result(WAIT)
    assert queue.close(soon())


def test_what_is_too_large_for_any_lane_goes_alone() -> None:
    queue = TransferQueue("lane", 100)
    assert queue.submit(lambda _: "done", soon(), 1000).result(WAIT) == "done"
    assert queue.close(soon())


def test_places_are_free_when_a_future_ends() -> None:
    """Whoever is told of the end may submit at once."""
    queue = TransferQueue("lane", 100)
    results: list[Future[str]] = []

    def again(_future: Future[str]) -> None:
        results.append(queue.submit(lambda _: "second", soon(), 100))

    for work in (lambda _: "first", lambda _: 1 / 0):
        first = queue.submit(work, soon(), 100)
        first.add_done_callback(again)
        first.exception(WAIT)
        time.sleep(0.05)
        assert results.pop().result(WAIT) == "second"
    assert queue.close(soon())


def test_what_waited_beyond_its_deadline_is_not_begun() -> None:
    queue = TransferQueue("lane", 100)
    begun: list[str] = []
    slow = queue.submit(lambda _: time.sleep(0.2), soon(), 1)
    late = queue.submit(lambda _: begun.append("late"), soon(0.05), 1)
    good = queue.submit(lambda _: begun.append("good"), soon(), 1)
    with pytest.raises(RemoteLate, match="before the transfer began"):
        late.result(WAIT)
    slow.result(WAIT)
    good.result(WAIT)
    assert begun == ["good"]
    assert queue.close(soon())


def test_an_error_ends_one_future_and_nothing_else() -> None:
    queue = TransferQueue("lane", 100)
    known = TierBusy("as it was raised")

    def fail(error: Exception) -> None:
        raise error

    futures = [
        queue.submit(lambda _, e=e: fail(e), soon(), 1) for e in (known, ZeroDivisionError("x"))
    ]
    assert futures[0].exception(WAIT) is known
    foreseen = futures[1].exception(WAIT)
    assert isinstance(foreseen, RemoteError) and str(foreseen) == "ZeroDivisionError: x"
    assert queue.submit(lambda _: 1, soon(), 1).result(WAIT) == 1
    assert queue.close(soon())


def test_work_is_told_its_deadline() -> None:
    queue = TransferQueue("lane", 100)
    deadline = soon()
    assert queue.submit(lambda told: told, deadline, 1).result(WAIT) == deadline
    assert queue.close(soon())


def test_a_close_waits_for_what_was_taken_and_takes_no_more() -> None:
    queue = TransferQueue("lane", 100)
    futures = [queue.submit(lambda _: time.sleep(0.05), soon(), 1) for _ in range(3)]
    assert queue.close(soon())
    assert all(future.done() for future in futures)
    with pytest.raises(TierClosed, match="the lane was closed"):
        queue.submit(lambda _: None, soon(), 1)
    assert queue.close(soon())


def test_a_close_that_takes_too_long_says_so() -> None:
    queue = TransferQueue("lane", 100)
    go = threading.Event()
    queue.submit(lambda _: go.wait(WAIT), soon(), 1)
    assert not queue.close(soon(0.05))
    go.set()
    assert queue.close(soon())


# Transfers


class Waiting:
    """A connection whose transfers wait until it is aborted."""

    kind, is_fallback, corrupt_blocks = "waiting", False, 0

    def __init__(self) -> None:
        self.aborted, self.closed_by = threading.Event(), ""

    def abort_call(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed_by = threading.current_thread().name


@pytest.mark.parametrize("held", ["moving", "connecting"])
def test_a_close_ends_transfers_and_nothing_is_tried_again(held: str) -> None:
    """It was tried once more, on a connection that was then closed under it."""
    made: list[Waiting] = []
    connecting, moves = threading.Event(), threading.Semaphore(0)

    class Link:
        address = "here"

        def connect(self, _deadline: float) -> Waiting:
            connecting.set()
            deadline = soon()
            while held == "connecting" and not transfers._is_ending:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            made.append(Waiting())
            return made[-1]

        def count_error(self, _reason: str) -> None: ...

        def mark_lost(self) -> None: ...

    def move(connection: Waiting, batch: Transfer, _deadline: float) -> list[int]:
        if batch.keys == [b"first"]:
            return [1]
        moves.release()
        connection.aborted.wait(WAIT)
        raise ConnectionLost("aborted")

    transfers = Transfers(Link(), "load", move, size=1, seconds=60.0, most_bytes=100)  # type: ignore[arg-type]
    buffers = [memoryview(bytearray(1))]
    if held == "moving":  # by a connection that has served before
        assert transfers.submit(Transfer([b"first"], buffers, [None])).result(WAIT) == [1]
    futures = [transfers.submit(Transfer([b"k"], buffers, [None])) for _ in range(2)]
    assert connecting.wait(WAIT)
    if held == "moving":
        assert moves.acquire(timeout=WAIT)
    transfers.close(soon(0.01))
    assert all(isinstance(future.exception(WAIT), RemoteError) for future in futures)
    assert not moves.acquire(blocking=False)
    assert held == "connecting" or made[0].aborted.is_set()
    assert transfers._queue.close(soon())
    assert [each.closed_by for each in made] == ["stratakv-remote-load"]


def test_what_failed_keeps_no_view_of_a_buffer(no_collection: None) -> None:
    class Link:
        address = "here"

        def connect(self, _deadline: float) -> Waiting:
            return Waiting()

        def count_error(self, _reason: str) -> None: ...

        def mark_lost(self) -> None: ...

    def move(_connection: Waiting, batch: Transfer, _deadline: float) -> list[int]:
        assert batch.buffers
        raise ConnectionLost("gone")

    transfers = Transfers(Link(), "load", move, size=1, seconds=60.0, most_bytes=100)  # type: ignore[arg-type]
    memory = bytearray(1)
    failed = transfers.submit(Transfer([b"k"], [memoryview(memory)], [None]))
    assert isinstance(failed.exception(WAIT), RemoteError)
    deadline = soon()
    while True:  # until the thread has come to its next job
        with contextlib.suppress(BufferError):
            memory.append(0)  # where there is a view of it
            break
        assert time.monotonic() < deadline
        time.sleep(0.001)
    transfers.close(soon())


# Futures that follow on others


def ended(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


def failed(error: Exception) -> Future[int]:
    future: Future[int] = Future()
    future.set_exception(error)
    return future


def test_then() -> None:
    assert then(ended(2), lambda n: n + 1).result(0) == 3
    error = TierBusy("x")
    assert then(failed(error), lambda n: n + 1).exception(0) is error


def test_all_fail_only_where_all_failed() -> None:
    one, other = TierBusy("one"), TierClosed("other")
    assert all_of([], lambda: "nothing asked").result(0) == "nothing asked"
    assert all_of([ended(1), ended(2)], lambda: "both").result(0) == "both"
    assert all_of([failed(one), ended(2)], lambda: "one of them").result(0) == "one of them"
    assert all_of([failed(one), failed(other)], lambda: "none").exception(0) is one


def test_all_wait_for_the_last() -> None:
    last: Future[int] = Future()
    together = all_of([ended(1), last, failed(TierError("x"))], lambda: "done")
    assert not together.done()
    last.set_result(1)
    assert together.result(0) == "done"


def test_work_that_fails_ends_its_future_too() -> None:
    """It left a future for ever without an end."""
    for future in (then(ended(1), lambda n: n / 0), all_of([ended(1)], lambda: 1 / 0)):
        assert isinstance(future.exception(1.0), ZeroDivisionError)
    for other in (failed(ValueError("x")), failed(TierError("x"))):
        assert all_of([other], lambda: 1).exception(1.0) is not None


def test_many_threads_end_them_once() -> None:
    for _ in range(50):
        futures: list[Future[int]] = [Future() for _ in range(8)]
        calls: list[None] = []
        together = all_of(futures, lambda calls=calls: calls.append(None))
        threads = [threading.Thread(target=future.set_result, args=(1,)) for future in futures]
        for thread in threads:
            thread.start()
        together.result(WAIT)
        for thread in threads:
            thread.join(WAIT)
        assert len(calls) == 1
