# SPDX-License-Identifier: Apache-2.0
"""Linux asynchronous I/O: `io_setup`, `io_submit`, `io_getevents`, called without a library.

One system call begins any number of direct reads and writes, another waits for whichever ends
first; both release the interpreter. io_uring could do the same, but containers are commonly denied
it, and it needs memory barriers that Python has not. See io_submit(2) and <linux/aio_abi.h>.

Knows nothing of files but their descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple


class _Numbers(NamedTuple):
    """Of the system calls."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_NUMBERS = {"x86_64": _Numbers(206, 207, 209, 208), "aarch64": _Numbers(0, 1, 2, 4)}

# aio_data, aio_key, aio_rw_flags, aio_lio_opcode, aio_reqprio, aio_fildes, aio_buf, aio_nbytes,
# aio_offset, aio_reserved2, aio_flags, aio_resfd; both machines are little-endian.
_REQUEST = struct.Struct("<QIiHhIQQqQII")
_EVENT = struct.Struct("<QQqq")  # data, request, result, a second result
_PREADV, _PWRITEV = 7, 8

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class AioContext:
    """Room for `depth` requests, numbered 0 to `depth - 1`. Belongs to one thread.

    Raises OSError where the machine, the kernel or a limit (`/proc/sys/fs/aio-max-nr`) does not
    allow it.
    """

    def __init__(self, depth: int) -> None:
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or ctypes.sizeof(ctypes.c_void_p) != 8:
            raise OSError(errno.ENOSYS, f"no numbers of system calls for {platform.machine()}")
        self._numbers = numbers
        self._depth = depth
        self._requests = ctypes.create_string_buffer(_REQUEST.size * depth)
        self._first = ctypes.addressof(self._requests)
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._prepared = array("Q")  # addresses of requests
        self._pieces: dict[int, array[int]] = {}  # by number: address and length of each buffer
        self._refused: list[tuple[int, int]] = []
        self._context = ctypes.c_ulong(0)
        self._call(numbers.setup, ctypes.c_long(depth), ctypes.byref(self._context))

    def prepare(
        self,
        number: int,
        descriptor: int,
        is_write: bool,
        vector: Sequence[memoryview],
        offset: int,
    ) -> None:
        """A request for the next `submit`. The buffers are writable, and stay until it has ended;
        its number is not under way."""
        pieces = array("Q")
        for view in vector:
            pieces.append(ctypes.addressof(ctypes.c_char.from_buffer(view)))
            pieces.append(view.nbytes)
        self._pieces[number] = pieces
        place = _REQUEST.size * number
        address, count = pieces.buffer_info()[0], len(vector)
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
        """Begin what was prepared. What the kernel refuses ends with its reason."""
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
        """Wait for so many requests to end; number and result (bytes, or an errno below zero) of
        all that have."""
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
        """Nothing may be under way."""
        self._call(self._numbers.destroy, self._context)

    def _call(self, number: int, *arguments: object) -> int:
        result = int(_syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
