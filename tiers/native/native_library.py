# SPDX-License-Identifier: Apache-2.0
"""Loads the library compiled from `bytes.cpp` and `names.cpp`, and calls its functions.

The library is a plain shared library whose functions take addresses, so the library works with any
version of Python. Without the library, callers use Python code with the same results. The
environment variable STRATAKV_BYTES=none switches the library off."""

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

from ..block import KEY_BYTES

log = logging.getLogger(__name__)

FILE_NAME = "libstratakv_bytes.so"  # the name in setup.py
VARIABLE = "STRATAKV_BYTES"
ABI = 5
LEAST_BYTES = 241  # the shortest input; XXH3 hashes shorter inputs differently
PART_BYTES = 256 * 1024  # bytes that are copied, then hashed while they are in the CPU cache
_DIGEST_BYTES = 16
_NO_DIGEST = bytes(_DIGEST_BYTES)
MOST_NAME_BYTES = 112
_LEFT, _LATE = -1, -2  # instead of an errno: the peer left, the deadline passed


class PeerLeft(OSError):
    """The other end closed the connection."""


class Library:
    """The functions of the library. `runs`: whether this processor can run the functions."""

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
            "receive", size, address, size, size, address, size, size, address, address, size,
            address, address,
        )  # fmt: skip
        self.send = function("send", size, address, size, address, size, size, address, size, size)
        self.send_proven = function(
            "send_proven", size, address, size, size, address, size, address, address, size, address
        )
        self.make_records = function(
            "make_records", address, size, size, address, address, address, address, address,
            address, address, address,
        )  # fmt: skip
        self.names = function("names", address, address, address, address, size, size, address)


@functools.cache
def library() -> Library | None:
    """Return the library, loaded once; None if missing, switched off or (logged) unusable."""
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
    found = library()
    return found is not None and found.runs


def copy_and_digest(target: memoryview, source: memoryview) -> bytes:
    """Copy bytes to a buffer of the same length. The library bypasses the processor's cache. Return
    the 16-byte XXH3-128 digest of the bytes written, even if the source changes meanwhile."""
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
    # The ctypes objects keep the buffers alive until the call has ended.
    to, of = ctypes.c_char.from_buffer(target), ctypes.c_char.from_buffer(source)
    found.copy(ctypes.addressof(to), ctypes.addressof(of), size, True, ctypes.addressof(digest))
    return digest.raw


class Rows(NamedTuple):
    """Rows of `size` bytes: row i at `address + i * step`. The caller keeps the memory alive."""

    address: int
    step: int
    size: int


def copy_rows_and_digest(
    target: Rows, target_rows: Sequence[int], source: Rows, source_rows: Sequence[int]
) -> list[bytes]:
    """Copy row `source_rows[i]` to row `target_rows[i]` for each i, in one call without the
    interpreter's lock. Return the digests, as `copy_and_digest` does. The row numbers are not
    checked. `has_digests()` must be true, and a row have LEAST_BYTES or more."""
    found, count = library(), len(target_rows)
    assert found is not None and source.size == target.size >= LEAST_BYTES
    assert len(source_rows) == count
    to_rows, of_rows = array("q", target_rows), array("q", source_rows)
    digests = _Written(count * _DIGEST_BYTES)
    found.copy_rows(
        target.address, target.step, to_rows.buffer_info()[0],
        source.address, source.step, of_rows.buffer_info()[0],
        count, target.size, True, digests.address,
    )  # fmt: skip
    return _cut(digests, _DIGEST_BYTES, count)


class ProvenRecords:
    """Payloads of equal length, LEAST_BYTES or more, with the header fields of their records
    (`record.py`). `head` has the fields that all headers share. Addresses are not checked.
    `has_digests()` must be true, and the memory writable."""

    def __init__(
        self,
        head: bytes,
        payloads: Sequence[memoryview],
        keys: Sequence[bytes],
        generations: Sequence[int],
        tags: Sequence[bytes],
        digests: Sequence[bytes],
    ) -> None:
        self._head = head
        self._held = _Places(payloads)
        self._keys, self._generations = b"".join(keys), array("Q", generations)
        self._tags, self._digests = b"".join(tags), b"".join(digests)
        lengths = len(self._keys), len(self._tags), len(self._digests)
        expected = tuple(len(payloads) * size for size in (KEY_BYTES, _DIGEST_BYTES, _DIGEST_BYTES))
        if lengths != expected:  # the fields of other blocks would be read
            raise ValueError(
                f"expected keys of {KEY_BYTES} bytes, tags and digests of {_DIGEST_BYTES}, for "
                f"{len(payloads)} payloads {expected} in all, got {lengths}"
            )

    def make(self, run: range, pages: int, pieces: int) -> list[int]:
        """Hash the payloads of a run and write their headers to the pages at the address `pages`.
        Write address and length of each header page and payload to the address `pieces`. Return the
        positions of payloads with wrong digests; their headers are zeros. Releases the GIL."""
        found, count = library(), len(run)
        assert found is not None
        start, stop = run.start, run.stop
        marks = slice(start * _DIGEST_BYTES, stop * _DIGEST_BYTES)
        places, generations = self._held.slice_addresses(start, stop), self._generations[start:stop]
        damaged = _Written(count)
        found.make_records(
            places.buffer_info()[0], count, self._held.size, self._head,
            self._keys[start * KEY_BYTES : stop * KEY_BYTES], generations.buffer_info()[0],
            self._tags[marks], self._digests[marks], pages, pieces, damaged.address,
        )  # fmt: skip
        if not any(damaged.bytes):
            return []
        return [start + index for index, is_damaged in enumerate(damaged.bytes) if is_damaged]


class Received(NamedTuple):
    """The digests, trailers and (with `names`) tags of the payloads that arrived completely."""

    digests: list[bytes]
    trailers: list[bytes]
    tags: list[bytes]
    lost: OSError | None  # why the next payload did not arrive


def receive_and_digest(
    descriptor: int,
    payloads: Sequence[memoryview],
    trailer_bytes: int,
    deadline: float,
    names: bytes = b"",
) -> Received:
    """Fill payloads of equal length, LEAST_BYTES or more, from a blocking socket, until `deadline`
    (monotonic seconds). `names` is as in `send_proven`. `has_digests()` must be true."""
    found, count = library(), len(payloads)
    assert found is not None
    places = _Places(payloads)
    trailers, digests = _Written(count * trailer_bytes), _Written(count * _DIGEST_BYTES)
    tags = _Written(count * _DIGEST_BYTES if names else 0)
    came = ctypes.c_int64()
    status = found.receive(
        descriptor, places.addresses, count, places.size, trailers.address, trailer_bytes,
        int(deadline * 1e6), digests.address, names, _length_of_one(names, count), tags.address,
        ctypes.byref(came),
    )  # fmt: skip
    whole = came.value
    behind = _cut(trailers, trailer_bytes, whole) if trailer_bytes else [b""] * whole
    made = _cut(tags, _DIGEST_BYTES, whole) if names else []
    return Received(_cut(digests, _DIGEST_BYTES, whole), behind, made, _lost(status))


def send_payloads(
    descriptor: int, head: bytes, payloads: Sequence[memoryview], trailers: bytes, deadline: float
) -> None:
    """Send `head`, then payloads of equal length, to a blocking socket, until `deadline` (monotonic
    seconds). Each payload is followed by its equal share of `trailers`. `has_digests()` must be
    true, and the memory writable. Raises OSError."""
    found, count = library(), len(payloads)
    assert found is not None
    places = _Places(payloads)
    lost = _lost(
        found.send(
            descriptor, head, len(head), places.addresses, count, places.size, trailers,
            len(trailers) // max(1, count), int(deadline * 1e6),
        )
    )  # fmt: skip
    if lost is not None:
        raise lost


def send_proven(
    descriptor: int,
    payloads: Sequence[memoryview],
    names: bytes,
    digests: Sequence[bytes | None],
    deadline: float,
) -> list[int]:
    """Send payloads of equal length, LEAST_BYTES or more, each followed by its tag and digest.
    `names` joins a name (layout and key) for each payload, all of one length up to MOST_NAME_BYTES.
    A tag is the digest of a name and a payload's digest. `digests` are the expected digests, None
    if unknown. A payload with another digest is followed by zeros. Return the positions of payloads
    with another digest. Socket, deadline and memory are as in `send_payloads`. Raises OSError."""
    found, count = library(), len(payloads)
    assert found is not None
    name_bytes = _length_of_one(names, count)
    places = _Places(payloads)
    wanted = b"".join([_NO_DIGEST if digest is None else digest for digest in digests])
    is_wanted = bytes(digest is not None for digest in digests)
    damaged = _Written(count)
    lost = _lost(
        found.send_proven(
            descriptor, places.addresses, count, places.size, names, name_bytes, wanted, is_wanted,
            int(deadline * 1e6), damaged.address,
        )
    )  # fmt: skip
    if lost is not None:
        raise lost
    return [index for index, is_damaged in enumerate(damaged.bytes) if is_damaged]


class _Written:
    """A buffer to which the library writes. The buffer is no ctypes array, which needs a new type
    for each length; making a type takes longer than many calls."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self._held = ctypes.c_char.from_buffer(self.bytes) if size else None
        self.address = 0 if self._held is None else ctypes.addressof(self._held)


class _Places:
    """Addresses of payloads of equal length, which are valid while this object exists."""

    def __init__(self, payloads: Sequence[memoryview]) -> None:
        self._held = [ctypes.c_char.from_buffer(payload) for payload in payloads]
        self._addresses = array("Q", map(ctypes.addressof, self._held))
        self.addresses = self._addresses.buffer_info()[0]
        self.size = payloads[0].nbytes if payloads else 0
        assert all(payload.nbytes == self.size for payload in payloads)

    def slice_addresses(self, start: int, stop: int) -> array[int]:
        return self._addresses[start:stop]


def _cut(written: _Written, step: int, count: int) -> list[bytes]:
    raw = bytes(written.bytes)
    return [raw[start : start + step] for start in range(0, count * step, step)]


def _length_of_one(names: bytes, count: int) -> int:
    """Return the length of one name. Raises ValueError if it exceeds MOST_NAME_BYTES."""
    name_bytes = len(names) // max(1, count)
    if name_bytes > MOST_NAME_BYTES:
        raise ValueError(f"expected names of up to {MOST_NAME_BYTES} bytes, got {name_bytes}")
    return name_bytes


def _lost(status: int) -> OSError | None:
    if status == _LEFT:
        return PeerLeft("the peer closed the connection")
    if status == _LATE:
        return TimeoutError("the deadline passed")
    return OSError(status, os.strerror(status)) if status else None
