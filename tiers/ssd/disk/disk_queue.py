# SPDX-License-Identifier: Apache-2.0
"""DiskQueue: queues with which one thread runs several reads and writes at the same time.

A thread that waits for each call gives the disk only one request at a time. Many waiting threads
would lose time on wake-ups and on the GIL for every record. So one thread submits many requests to
the kernel together and collects the finished requests (`AioQueue`). If the kernel has no
asynchronous I/O, `BlockingQueue` runs the requests one by one."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

log = logging.getLogger(__name__)
DEPTH = 16  # how many requests of one thread keep a disk busy

# Fields: aio_data, aio_key, aio_rw_flags, aio_lio_opcode, aio_reqprio, aio_fildes, aio_buf,
# aio_nbytes, aio_offset, aio_reserved2, aio_flags, aio_resfd (little-endian).
_REQUEST = struct.Struct("<QIiHhIQQqQII")
_EVENT = struct.Struct("<QQqq")  # fields: data, request, result, second result


class _Numbers(NamedTuple):
    """The system call numbers of asynchronous I/O on one processor architecture."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_NUMBERS = {"x86_64": _Numbers(206, 207, 209, 208), "aarch64": _Numbers(0, 1, 2, 4)}

_PREADV, _PWRITEV = 7, 8

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Pieces(NamedTuple):
    """The `num` writable buffers of a request. `laid` has the address and the length of each
    buffer; `views` returns the buffers as memoryviews, for `os.preadv` and `os.pwritev`."""

    laid: array[int]
    num: int
    views: Callable[[], Sequence[memoryview]]


Vector = Sequence[memoryview] | Pieces


class AioContext:
    """Linux asynchronous I/O by system calls (`io_setup`, `io_submit`, `io_getevents`), without a
    library, for `depth` requests, numbered 0 to `depth - 1`. Used by one thread only.

    One system call starts any number of direct reads and writes; another waits until requests have
    ended. Both calls release the GIL. io_uring could do the same, but many containers forbid it,
    and Python lacks the memory barriers for it. See io_submit(2) and <linux/aio_abi.h>.

    Raises OSError if processor, kernel or the limit `/proc/sys/fs/aio-max-nr` allow no context."""

    def __init__(self, depth: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(errno.ENOSYS, f"no numbers of system calls for {platform.machine()}")
        self._numbers = numbers
        self._depth = depth
        self._requests = ctypes.create_string_buffer(_REQUEST.size * depth)
        self._first = ctypes.addressof(self._requests)
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._prepared = array("Q")  # addresses of prepared requests
        self._pieces: dict[int, array[int]] = {}  # request → address and length of each buffer
        self._refused: list[tuple[int, int]] = []
        self._context = ctypes.c_ulong(0)
        self._call(numbers.setup, ctypes.c_long(depth), ctypes.byref(self._context))

    def prepare_request(
        self, number: int, descriptor: int, is_write: bool, vector: Vector, offset: int
    ) -> None:
        """Prepare a request for the next `submit`. The buffers must be writable and must stay
        allocated until the request has ended. No running request may have the same number."""
        if isinstance(vector, Pieces):
            pieces, count = vector.laid, vector.num
        else:
            pieces, count = array("Q"), len(vector)
            for view in vector:
                pieces.append(ctypes.addressof(ctypes.c_char.from_buffer(view)))
                pieces.append(view.nbytes)
        self._pieces[number] = pieces
        place = _REQUEST.size * number
        address = pieces.buffer_info()[0]
        opcode = _PWRITEV if is_write else _PREADV
        _REQUEST.pack_into(
            self._requests,
            place,
            number,
            0,
            0,
            opcode,
            0,
            descriptor,
            address,
            count,
            offset,
            0,
            0,
            0,
        )
        self._prepared.append(self._first + place)

    def submit(self) -> None:
        """Start the prepared requests. A request that the kernel refuses ends with an error."""
        prepared, done = self._prepared, 0
        while done < len(prepared):
            first = prepared.buffer_info()[0] + done * prepared.itemsize
            count = ctypes.c_long(len(prepared) - done)
            try:
                done += self._call(
                    self._numbers.submit, self._context, count, ctypes.c_void_p(first)
                )
            except OSError as error:
                number = (prepared[done] - self._first) // _REQUEST.size
                self._refused.append((number, -(error.errno or errno.EIO)))
                done += 1
        del prepared[:]

    def events(self, at_least: int) -> list[tuple[int, int]]:
        """Wait until `at_least` requests end. Return each number and result (bytes or -errno)."""
        ended, self._refused = self._refused, []
        wanted = max(0, at_least - len(ended))
        while True:
            try:
                count = self._call(
                    self._numbers.getevents,
                    self._context,
                    ctypes.c_long(wanted),
                    ctypes.c_long(self._depth),
                    self._events,
                    None,
                )
                break
            except InterruptedError:
                continue
        raw = memoryview(self._events)[: _EVENT.size * count]
        ended += [(number, result) for number, _, result, _ in _EVENT.iter_unpack(raw)]
        for number, _ in ended:
            del self._pieces[number]
        return ended

    def close(self) -> None:
        """Free the kernel's context (`io_destroy`). No request may be running."""
        self._call(self._numbers.destroy, self._context)

    def _call(self, number: int, *arguments: object) -> int:
        result = int(_syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result


# The result of a request: the number of bytes moved, or the error.
Result = int | Exception


class DiskQueue(Protocol):
    """A queue of one thread's read and write requests to one file."""

    @property
    def is_blocking(self) -> bool:
        """Whether `start` waits for the disk, so that one thread has one request at a time."""

    def start(self, number: int, is_write: bool, vector: Vector, offset: int) -> None:
        """Read the file at `offset` into the buffers, or write the buffers to the file at `offset`.
        Unless `is_blocking`, the call normally does not wait for the disk, and the request may
        start only at `submit`. The request number may be used again when `wait_completions` has
        returned it; until its return the queue holds references to the buffers."""

    def submit(self) -> None:
        """Start all requests that `start` has queued."""

    def wait_completions(self) -> list[tuple[int, Result]]:
        """Wait until a running request has ended. Return the numbers and results of all ended."""

    def close(self) -> None:
        """Free the kernel's resources for this queue. No request may be running."""


def open_queue(direct: int | None, buffered: int, most: int) -> DiskQueue:
    """Return a queue of at most `most` requests for a file with two descriptors. `direct` bypasses
    the page cache and refuses unaligned buffers; it is None if the file system has no direct I/O.
    `buffered` goes through the page cache."""
    if direct is not None:
        try:
            return AioQueue(AioContext(most), direct, buffered)
        except OSError as error:
            log.info("no asynchronous I/O (%s); the threads wait for each request", error)
    return BlockingQueue(direct, buffered)


class BlockingQueue:
    """A queue whose `start` runs the whole request before returning."""

    is_blocking = True

    def __init__(self, direct: int | None, buffered: int) -> None:
        self._descriptors = [buffered] if direct is None else [direct, buffered]
        self._done: list[tuple[int, Result]] = []

    def start(self, number: int, is_write: bool, vector: Vector, offset: int) -> None:
        self._done.append((number, _move(self._descriptors, is_write, vector, offset)))

    def submit(self) -> None:
        """Do nothing: `start` has run every request."""

    def wait_completions(self) -> list[tuple[int, Result]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Do nothing: the kernel holds nothing for this queue."""


class AioQueue:
    """Submits requests to the kernel, and collects finished ones in `wait_completions`."""

    is_blocking = False

    def __init__(self, context: AioContext, direct: int, buffered: int) -> None:
        self._context = context
        self._direct = direct
        self._buffered = buffered
        self._flying: dict[int, tuple[bool, Vector, int]] = {}
        self._done: list[tuple[int, Result]] = []

    def start(self, number: int, is_write: bool, vector: Vector, offset: int) -> None:
        # ctypes gives no address of a read-only buffer, so this request runs at once.
        if not isinstance(vector, Pieces) and any(view.readonly for view in vector):
            descriptors = [self._direct, self._buffered]
            self._done.append((number, _move(descriptors, is_write, vector, offset)))
            return
        self._flying[number] = (is_write, vector, offset)
        self._context.prepare_request(number, self._direct, is_write, vector, offset)

    def submit(self) -> None:
        self._context.submit()

    def wait_completions(self) -> list[tuple[int, Result]]:
        self._context.submit()
        done, self._done = self._done, []
        for number, result in self._context.events(0 if done else 1):
            is_write, vector, offset = self._flying.pop(number)
            if result == -errno.EINVAL:
                # The direct descriptor refuses unaligned buffers; the buffered one accepts them.
                done.append((number, _move([self._buffered], is_write, vector, offset)))
            elif result < 0:
                done.append((number, OSError(-result, os.strerror(-result))))
            else:
                done.append((number, result))
        return done

    def close(self) -> None:
        self._context.close()


def _move(descriptors: Sequence[int], is_write: bool, vector: Vector, offset: int) -> Result:
    """Read or write with one call, on the first descriptor that accepts the buffers."""
    if isinstance(vector, Pieces):
        vector = vector.views()
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
