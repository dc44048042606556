# SPDX-License-Identifier: Apache-2.0
"""The compiled library of `bytes.cpp`: where it is, whether it can be used here, its functions.

It is a plain shared library, called with addresses, and bound to no Python. Every function here has
a twin without it and gives the same answer. STRATAKV_BYTES=none leaves it alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

log = logging.getLogger(__name__)

FILE_NAME = "libstratakv_bytes.so"  # as in setup.py
VARIABLE = "STRATAKV_BYTES"
ABI = 2
LEAST_BYTES = 241  # XXH3 does something else with less
PART_BYTES = 256 * 1024  # copied, then hashed while it is in the cache
_DIGEST_BYTES = 16
_LEFT, _LATE = -1, -2  # in place of the number of an error


class PeerLeft(OSError):
    """The other end closed the connection."""


class Library:
    """Its functions. `runs`: whether this processor runs them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        size, address = ctypes.c_int64, ctypes.c_void_p

        def function(name: str, *arguments: Any) -> Any:
            found = getattr(library, f"stratakv_bytes_{name}")
            found.restype, found.argtypes = size, arguments
            return found

        self.abi: int = function("abi")()
        self.runs = bool(function("runs")())
        self.copy = function("copy", address, address, size, size, address)
        self.copy_rows = function(
            "copy_rows", address, size, address, address, size, address, size, size, size, address
        )
        self.receive = function(
            "receive", size, address, size, size, address, size, size, address, address
        )


@functools.cache
def library() -> Library | None:
    """Looked for once in a process; a file that cannot be used is told of."""
    path = Path(__file__).with_name(FILE_NAME)
    if os.environ.get(VARIABLE) == "none" or not path.exists():
        return None
    try:
        found = Library(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        log.warning("%s cannot be used (%s); install again where there is a compiler", path, error)
        return None
    if found.abi != ABI:
        log.warning("%s is of another version; install again where there is a compiler", path)
        return None
    return found


def has_digests() -> bool:
    """Whether digests are made in the library."""
    found = library()
    return found is not None and found.runs


def copy_and_digest(target: memoryview, source: memoryview) -> bytes:
    """Copy bytes to as many others, past the processor's cache; the 16 bytes of the XXH3-128 digest
    of what was written, whoever changes the source meanwhile."""
    size = target.nbytes
    if source.nbytes != size:
        raise ValueError(f"{source.nbytes} bytes cannot be copied to {size}")
    if size < LEAST_BYTES or target.readonly or source.readonly or not has_digests():
        hasher = xxhash.xxh3_128()
        for start in range(0, size, PART_BYTES):
            part = target[start : start + PART_BYTES]
            part[:] = source[start : start + PART_BYTES]
            hasher.update(part)
        return hasher.digest()
    found, digest = library(), ctypes.create_string_buffer(_DIGEST_BYTES)
    assert found is not None
    # What is made of a buffer keeps it alive until the call has ended.
    to, of = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
    found.copy(ctypes.addressof(to), ctypes.addressof(of), size, True, ctypes.addressof(digest))
    return digest.raw


class Rows(NamedTuple):
    """Bytes of one length that begin a number of bytes apart: row i at `address + i * step`. Who
    has one keeps the memory alive."""

    address: int
    step: int
    size: int


def copy_rows_and_digest(
    target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]
) -> list[bytes]:
    """`copy_and_digest` of row `source_rows[i]` to row `target_rows[i]` for each i, in one call
    without the interpreter. Nobody checks that there are such rows. Only where `has_digests`, and
    of LEAST_BYTES or more."""
    found, count = library(), len(target_rows)
    assert found is not None and source.size == target.size >= LEAST_BYTES
    assert len(source_rows) == count
    to_rows, of_rows = array("q", target_rows), array("q", source_rows)
    digests = ctypes.create_string_buffer(count * _DIGEST_BYTES)
    found.copy_rows(
        target.address, target.step, to_rows.buffer_info()[0],
        source.address, source.step, of_rows.buffer_info()[0],
        count, target.size, True, digests,
    )  # fmt: skip
    raw = digests.raw
    return [raw[start : start + _DIGEST_BYTES] for start in range(0, len(raw), _DIGEST_BYTES)]


class Received(NamedTuple):
    """Of payloads that came whole, in their order: the digest, and what came behind them."""

    digests: list[bytes]
    trailers: list[bytes]
    lost: OSError | None  # why the next one did not come


def receive_and_digest(
    descriptor: int, payloads: Sequence[memoryview], trailer_bytes: int, deadline: float
) -> Received:
    """Fill payloads, all of one length of LEAST_BYTES or more, from a socket that blocks, by
    `deadline` (monotonic seconds). Only where `has_digests`."""
    found, count = library(), len(payloads)
    assert found is not None
    # What is made of a buffer keeps it alive until the call has ended.
    held = [ctypes.c_char.from_buffer(payload) for payload in payloads]
    places = (ctypes.c_void_p * count)(*map(ctypes.addressof, held))
    trailers = ctypes.create_string_buffer(count * trailer_bytes)
    digests = ctypes.create_string_buffer(count * _DIGEST_BYTES)
    whole = ctypes.c_int64()
    size = payloads[0].nbytes if count else 0
    assert all(payload.nbytes == size >= LEAST_BYTES for payload in payloads)
    status = found.receive(
        descriptor, places, count, size, trailers, trailer_bytes, int(deadline * 1e6), digests,
        ctypes.byref(whole),
    )  # fmt: skip
    lost: OSError | None = None
    if status == _LEFT:
        lost = PeerLeft("the peer closed the connection")
    elif status == _LATE:
        lost = TimeoutError("the deadline passed")
    elif status:
        lost = OSError(status, os.strerror(status))

    def cut(buffer: ctypes.Array[ctypes.c_char], step: int) -> list[bytes]:
        raw = buffer.raw
        return [raw[i * step : (i + 1) * step] for i in range(whole.value)]

    return Received(cut(digests, _DIGEST_BYTES), cut(trailers, trailer_bytes), lost)
