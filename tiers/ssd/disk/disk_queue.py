# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of one thread that are under way at the same time.

A thread that waits for each call keeps the disk as busy as one request can, and many such threads
pay for every record with a thread that sleeps, wakes and waits for the interpreter. So one thread
hands the kernel many requests at once and takes what has come by then (`linux_aio.py`). Where the
kernel does not offer that, `BlockingQueue` does the same one by one.

Knows nothing of records.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from typing import Protocol

from .linux_aio import AioContext

log = logging.getLogger(__name__)

DEPTH = 16  # requests of one thread that keep a disk busy

# What a request brought: bytes moved, or why it failed.
Result = int | Exception


class DiskQueue(Protocol):
    """Belongs to one thread."""

    @property
    def is_blocking(self) -> bool:
        """Whether its thread waits for each request, so that only threads make several at once."""

    def start(self, number: int, is_write: bool, vector: Sequence[memoryview], offset: int) -> None:
        """Have the buffers filled from, or written to, the file at `offset`. Never waits for the
        disk where that can be helped; may begin as late as `submit`. The number is free again once
        `finished` has told it. The buffers must stay until then, and are held."""

    def submit(self) -> None:
        """Begin everything that was started."""

    def finished(self) -> list[tuple[int, Result]]:
        """Wait for at least one request; the numbers of those that have ended. There must be one
        under way."""

    def close(self) -> None:
        """Give back what the kernel has for it; nothing may be under way."""


def open_queue(direct: int | None, buffered: int, most: int) -> DiskQueue:
    """A queue of at most so many requests for a file that is open twice: past the page cache, which
    a request with odd buffers is refused, and through it. `direct` is None where the file system
    has no such thing."""
    if direct is not None:
        try:
            return AioQueue(AioContext(most), direct, buffered)
        except OSError as error:
            log.info("no asynchronous I/O (%s); the threads wait for each request", error)
    return BlockingQueue(direct, buffered)


class BlockingQueue:
    """A request is over when `start` returns."""

    is_blocking = True

    def __init__(self, direct: int | None, buffered: int) -> None:
        self._descriptors = [buffered] if direct is None else [direct, buffered]
        self._done: list[tuple[int, Result]] = []

    def start(self, number: int, is_write: bool, vector: Sequence[memoryview], offset: int) -> None:
        self._done.append((number, _move(self._descriptors, is_write, vector, offset)))

    def submit(self) -> None:
        """Nothing waits."""

    def finished(self) -> list[tuple[int, Result]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Nothing to give back."""


class AioQueue:
    """Requests are with the kernel until `finished`."""

    is_blocking = False

    def __init__(self, context: AioContext, direct: int, buffered: int) -> None:
        self._context = context
        self._direct = direct
        self._buffered = buffered
        self._flying: dict[int, tuple[bool, Sequence[memoryview], int]] = {}
        self._done: list[tuple[int, Result]] = []

    def start(self, number: int, is_write: bool, vector: Sequence[memoryview], offset: int) -> None:
        if any(view.readonly for view in vector):  # whose address nobody is told
            descriptors = [self._direct, self._buffered]
            self._done.append((number, _move(descriptors, is_write, vector, offset)))
            return
        self._flying[number] = (is_write, vector, offset)
        self._context.prepare(number, self._direct, is_write, vector, offset)

    def submit(self) -> None:
        self._context.submit()

    def finished(self) -> list[tuple[int, Result]]:
        self._context.submit()
        done, self._done = self._done, []
        for number, result in self._context.events(0 if done else 1):
            is_write, vector, offset = self._flying.pop(number)
            if result == -errno.EINVAL:
                # A buffer that is not aligned is slow, but no reason to fail.
                done.append((number, _move([self._buffered], is_write, vector, offset)))
            elif result < 0:
                done.append((number, OSError(-result, os.strerror(-result))))
            else:
                done.append((number, result))
        return done

    def close(self) -> None:
        self._context.close()


def _move(
    descriptors: Sequence[int], is_write: bool, vector: Sequence[memoryview], offset: int
) -> Result:
    """One call on the first descriptor that takes the buffers."""
    call = os.pwritev if is_write else os.preadv
    result: Result = 0
    for descriptor in descriptors:
        try:
            return call(descriptor, vector, offset)
        except OSError as error:
            result = error
            if error.errno != errno.EINVAL:
                break
    return result
