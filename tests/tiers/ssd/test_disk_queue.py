# SPDX-License-Identifier: Apache-2.0
"""Many requests of one thread: the kernel's queue and the one that waits do the same."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratakv.tiers.block import ALIGNMENT
from stratakv.tiers.ssd.disk import disk_queue
from stratakv.tiers.ssd.disk.disk_queue import (
    DEPTH,
    AioContext,
    AioQueue,
    BlockingQueue,
    DiskQueue,
    Pieces,
    Result,
    open_queue,
)

PAGES = 64
SIZE = PAGES * ALIGNMENT


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A file of 64 pages, each full of its number: past the page cache, and through it."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([page]) * ALIGNMENT for page in range(PAGES)))
    direct, buffered = os.open(path, os.O_RDWR | os.O_DIRECT), os.open(path, os.O_RDWR)
    os.fsync(buffered)
    yield direct, buffered
    os.close(direct)
    os.close(buffered)


@pytest.fixture(params=["aio", "blocking"])
def queue(request: pytest.FixtureRequest, descriptors: tuple[int, int]) -> Iterator[DiskQueue]:
    made: DiskQueue
    if request.param == "aio":
        made = AioQueue(aio_context(), *descriptors)
    else:
        made = BlockingQueue(*descriptors)
    yield made
    made.close()


def aio_context() -> AioContext:
    try:
        return AioContext(DEPTH)
    except OSError as error:
        pytest.skip(f"the kernel has no asynchronous I/O: {error}")


def pages(count: int) -> memoryview:
    return memoryview(mmap.mmap(-1, count * ALIGNMENT))


def wait_for(queue: DiskQueue, count: int) -> dict[int, Result]:
    results: dict[int, Result] = {}
    while len(results) < count:
        found = queue.wait_completions()
        assert found, "a wait that brings nothing"
        assert not results.keys() & {number for number, _ in found}
        results |= dict(found)
    return results


def test_scattered_pages_come_into_scattered_buffers(queue: DiskQueue, rng: random.Random) -> None:
    """All numbers, used again and again, with one to five buffers each."""
    for _ in range(20):
        places = rng.sample(range(PAGES - 5), DEPTH)
        vectors = [[pages(1) for _ in range(rng.randint(1, 5))] for _ in places]
        for number, (place, vector) in enumerate(zip(places, vectors, strict=True)):
            queue.start(number, False, vector, place * ALIGNMENT)
            if rng.random() < 0.2:
                queue.submit()
        results = wait_for(queue, DEPTH)
        for number, (place, vector) in enumerate(zip(places, vectors, strict=True)):
            assert results[number] == len(vector) * ALIGNMENT
            for page, view in enumerate(vector, place):
                assert bytes(view) == bytes([page]) * ALIGNMENT


def test_what_was_written_is_in_the_file(queue: DiskQueue, descriptors: tuple[int, int]) -> None:
    vector = [pages(1), pages(2)]
    vector[0][:] = b"a" * ALIGNMENT
    vector[1][:] = b"b" * 2 * ALIGNMENT
    queue.start(3, True, vector, 7 * ALIGNMENT)
    assert wait_for(queue, 1) == {3: 3 * ALIGNMENT}
    found = os.pread(descriptors[1], 5 * ALIGNMENT, 6 * ALIGNMENT)
    a, b = b"a" * ALIGNMENT, b"b" * 2 * ALIGNMENT
    assert found == bytes([6]) * ALIGNMENT + a + b + bytes([10]) * ALIGNMENT


def test_buffers_that_are_not_aligned_or_not_writable(
    queue: DiskQueue, descriptors: tuple[int, int]
) -> None:
    """They are slower, and right."""
    odd = memoryview(bytearray(ALIGNMENT + 8))[3 : 3 + ALIGNMENT]
    constant = memoryview(b"x" * ALIGNMENT)
    queue.start(0, False, [odd], 5 * ALIGNMENT)
    queue.start(1, True, [constant], 9 * ALIGNMENT)
    assert wait_for(queue, 2) == {0: ALIGNMENT, 1: ALIGNMENT}
    assert bytes(odd) == bytes([5]) * ALIGNMENT
    assert os.pread(descriptors[1], ALIGNMENT, 9 * ALIGNMENT) == bytes(constant)


@pytest.mark.parametrize("shift", [0, 3], ids=["aligned", "odd"])
def test_buffers_whose_places_somebody_has_laid_down(
    queue: DiskQueue, descriptors: tuple[int, int], shift: int
) -> None:
    room = pages(3)
    views = [room[shift + i * ALIGNMENT : shift + (i + 1) * ALIGNMENT] for i in (1, 0)]
    for i, view in enumerate(views):
        view[:] = bytes([100 + i]) * ALIGNMENT
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views]
    laid = array("Q", [addresses[0], ALIGNMENT, addresses[1], ALIGNMENT, 0, 0])
    queue.start(0, True, Pieces(laid, 2, lambda: views), 7 * ALIGNMENT)
    assert wait_for(queue, 1) == {0: 2 * ALIGNMENT}
    written = os.pread(descriptors[1], 2 * ALIGNMENT, 7 * ALIGNMENT)
    assert written == bytes([100]) * ALIGNMENT + bytes([101]) * ALIGNMENT


def test_the_end_of_the_file_is_short(queue: DiskQueue) -> None:
    queue.start(0, False, [pages(4)], SIZE - ALIGNMENT)
    queue.start(1, False, [pages(1)], SIZE)
    assert wait_for(queue, 2) == {0: ALIGNMENT, 1: 0}


@pytest.mark.parametrize("kind", [AioQueue, BlockingQueue])
def test_a_refused_request_tells_why_and_harms_no_other(
    kind: type, descriptors: tuple[int, int], tmp_path: Path
) -> None:
    """A write through a descriptor that only reads; numbers go round all the same."""
    only_reads = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    given = (only_reads, descriptors[1])
    queue = AioQueue(aio_context(), *given) if kind is AioQueue else BlockingQueue(*given)
    page = pages(1)
    for _ in range(3):
        queue.start(0, False, [page], ALIGNMENT)
        queue.start(1, True, [page], ALIGNMENT)
        queue.start(2, False, [pages(1)], 2 * ALIGNMENT)
        results = wait_for(queue, 3)
        refused = results.pop(1)
        assert isinstance(refused, OSError) and refused.errno == errno.EBADF
        assert results == {0: ALIGNMENT, 2: ALIGNMENT}
    assert os.pread(descriptors[1], 1, ALIGNMENT) == b"\x01"
    queue.close()
    os.close(only_reads)


@pytest.mark.parametrize(
    "refusal", [OSError(errno.EAGAIN, "too many"), OSError(errno.EPERM, "not in a container")]
)
def test_without_asynchronous_io_the_threads_wait(
    descriptors: tuple[int, int], monkeypatch: pytest.MonkeyPatch, refusal: OSError
) -> None:
    def refuse(depth: int) -> AioContext:
        raise refusal

    monkeypatch.setattr(disk_queue, "AioContext", refuse)
    assert isinstance(open_queue(*descriptors, DEPTH), BlockingQueue)


def test_without_direct_io_the_threads_wait(descriptors: tuple[int, int]) -> None:
    """The kernel would wait in `submit` for a file that goes through the page cache."""
    assert isinstance(open_queue(None, descriptors[1], DEPTH), BlockingQueue)


def test_a_machine_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_queue.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        AioContext(DEPTH)


def test_a_context_is_given_back(descriptors: tuple[int, int]) -> None:
    """The kernel counts those of the whole machine, where others come and go; it knows one that was
    given back no more."""
    context = aio_context()
    queue = AioQueue(context, *descriptors)
    assert context.events(0) == []
    queue.close()
    with pytest.raises(OSError, match="Invalid argument"):
        context.events(0)


def test_a_wait_that_a_signal_interrupts_goes_on(
    descriptors: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = aio_context()
    queue = AioQueue(context, *descriptors)
    real: Callable[..., int] = context._call
    interruptions = iter([InterruptedError(errno.EINTR, "a signal")])

    def call(number: int, *arguments: object) -> int:
        if number == context._numbers.getevents:
            for interruption in interruptions:
                raise interruption
        return real(number, *arguments)

    monkeypatch.setattr(context, "_call", call)
    queue.start(0, False, [pages(1)], 0)
    assert wait_for(queue, 1) == {0: ALIGNMENT}
    queue.close()
