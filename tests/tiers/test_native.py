# SPDX-License-Identifier: Apache-2.0
"""The compiled library of the tiers against xxhash, and its twins in its place."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import threading
import time

import numpy as np
import pytest
import xxhash

from stratakv.tiers.native import native_library as native
from stratakv.tiers.native.native_library import LEAST_BYTES, PART_BYTES
from stratakv.tiers.record import PlainHeaders
from stratakv.tiers.ssd.disk.slot_file import Scratch

SIZES = [
    *range(LEAST_BYTES, LEAST_BYTES + 70), *range(1000, 1100), 2047, 2048, 2049, 65_536, 98_304,
    PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 1023,
]  # fmt: skip
WAIT_SECONDS = 60.0
needs_library = pytest.mark.skipif(not native.has_digests(), reason="needs the compiled library")


@pytest.fixture(params=["library", "twin"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the library, and without it."""
    if request.param == "twin":
        monkeypatch.setattr(native, "library", lambda: None)
    elif not native.has_digests():
        pytest.skip("needs the compiled library")
    return str(request.param)


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_a_copy_has_the_digest_of_its_bytes(either: str, shift: int) -> None:
    noise = os.urandom(max(SIZES) + 64)
    room = memoryview(bytearray(len(noise) + 64))
    for size in (0, 16, LEAST_BYTES - 1, *SIZES):
        room[:] = bytes(len(room))
        source = memoryview(bytearray(noise[shift : shift + size]))
        digest = native.copy_and_digest(room[shift : shift + size], source)
        assert digest == xxhash.xxh3_128_digest(source)
        assert room[shift : shift + size] == source
        assert not any(room[:shift]) and not any(room[shift + size : shift + size + 64])


def test_a_source_that_is_read_only_is_copied(either: str) -> None:
    source, target = memoryview(os.urandom(5000)), memoryview(bytearray(5000))
    assert native.copy_and_digest(target, source) == xxhash.xxh3_128_digest(source)
    assert target == source


def test_the_digest_is_of_what_was_written_though_writing_changes_the_source(either: str) -> None:
    """Its bytes are read once: what is written here is what is read next, or would be again."""
    size, distance = 2048 + 17, 32  # the last 17 bytes are copied at once, and overlap nothing
    room = memoryview(bytearray(os.urandom(size + distance)))
    before = bytes(room[:size])
    target = room[distance:]
    digest = native.copy_and_digest(target, room[:size])
    assert room[:size] != before
    assert digest == xxhash.xxh3_128_digest(target)


def test_other_lengths_are_refused(either: str) -> None:
    with pytest.raises(ValueError, match="400 bytes cannot be copied to 500"):
        native.copy_and_digest(memoryview(bytearray(500)), memoryview(bytearray(400)))


@needs_library
def test_records_are_those_of_python_and_damage_is_told() -> None:
    """A run in the middle; the digest of one payload is not the one that came with it."""
    size, count, run = 4096, 5, range(1, 4)
    payloads = [memoryview(bytearray(os.urandom(size))) for _ in range(count)]
    keys, tags = [os.urandom(40) for _ in payloads], [os.urandom(16) for _ in payloads]
    digests = [xxhash.xxh3_128_digest(payload) for payload in payloads]
    headers = PlainHeaders(os.urandom(16), size)
    generations = [2**64 - 1 - i for i in range(count)]
    payloads[2][7] ^= 1
    records = native.ProvenRecords(headers.shared, payloads, keys, generations, tags, digests)
    scratch = Scratch(len(run), size)
    assert records.make(run, scratch.address, scratch.laid.buffer_info()[0]) == [2]
    made = [bytes(header[:128]) for header in scratch.headers]
    fields = list(zip(keys, generations, tags, payloads, digests, strict=True))
    assert made == [
        headers.encode_headers(*fields[1]),
        bytes(128),
        headers.encode_headers(*fields[3]),
    ]
    assert list(scratch.laid[1::2]) == [4096, size] * len(run)
    for place, address in zip(run, scratch.laid[2::4], strict=True):
        assert ctypes.string_at(address, size) == payloads[place]
    assert list(scratch.laid[::4]) == [scratch.address + i * 4096 for i in range(len(run))]


@needs_library
@pytest.mark.parametrize(("key", "tag", "digest"), [(39, 16, 16), (40, 15, 16), (40, 16, 17)])
def test_what_would_be_taken_for_the_next_records_is_refused(
    key: int, tag: int, digest: int
) -> None:
    payloads = [memoryview(bytearray(4096)) for _ in range(2)]
    fields = [bytes(40), bytes(key)], [1, 2], [bytes(16), bytes(tag)], [bytes(16), bytes(digest)]
    with pytest.raises(ValueError, match="expected keys of 40 bytes, tags and digests of 16"):
        native.ProvenRecords(bytes(112), payloads, *fields)


@needs_library
def test_rows_are_copied_with_the_digests_of_their_bytes() -> None:
    size, of_step, to_step = 98_304 + 5, 98_400, 102_400
    source = np.frombuffer(os.urandom(4 * of_step), np.uint8).reshape(4, of_step)
    target = np.zeros((6, to_step), np.uint8)
    digests = native.copy_rows_and_digest(
        native.Rows(target.ctypes.data, to_step, size), [5, 0, 2],
        native.Rows(source.ctypes.data, of_step, size), [1, 3, 1],
    )  # fmt: skip
    rows = [source[i, :size].tobytes() for i in (1, 3, 1)]
    assert digests == [xxhash.xxh3_128_digest(row) for row in rows]
    assert [target[i, :size].tobytes() for i in (5, 0, 2)] == rows
    assert not target[[1, 3, 4]].any() and not target[:, size:].any()


@needs_library
@pytest.mark.parametrize("more", [0, 16, 32])
def test_what_is_received_has_the_digest_of_its_bytes(more: int, rng: random.Random) -> None:
    here, there = socket.socketpair()
    with here, there:
        for size in (LEAST_BYTES, 1024, 1025, 98_304, 2 * PART_BYTES + 77):
            parts = [os.urandom(size + more) for _ in range(3)]

            def send(sent: bytes = b"".join(parts)) -> None:
                place = 0
                while place < len(sent):  # in pieces of any length
                    piece = sent[place : place + rng.randrange(1, 70_000)]
                    there.sendall(piece)
                    place += len(piece)

            sender = threading.Thread(target=send)
            sender.start()
            payloads = [memoryview(bytearray(size)) for _ in parts]
            came = native.receive_and_digest(
                here.fileno(), payloads, more, time.monotonic() + WAIT_SECONDS
            )
            sender.join()
            assert came.lost is None
            assert came.digests == [xxhash.xxh3_128_digest(part[:size]) for part in parts]
            assert came.trailers == [part[size:] for part in parts]
            assert [bytes(payload) for payload in payloads] == [part[:size] for part in parts]


@needs_library
def test_of_a_peer_that_leaves_or_is_late_what_came_whole_is_told() -> None:
    payloads = [memoryview(bytearray(1000)) for _ in range(3)]
    block, tag = os.urandom(1000), os.urandom(16)
    digest = xxhash.xxh3_128_digest(block)
    here, there = socket.socketpair()
    with here, there:
        began = time.monotonic()
        there.sendall(block + tag + block)
        late = native.receive_and_digest(here.fileno(), payloads, 16, began + 0.05)
        assert time.monotonic() - began >= 0.05
        assert (late.digests, late.trailers) == ([digest], [tag])
        assert isinstance(late.lost, TimeoutError)
        late = native.receive_and_digest(here.fileno(), payloads, 16, began)
        assert late.digests == [] and isinstance(late.lost, TimeoutError)
        there.sendall(block + tag + block + tag + block + tag[1:])
        there.close()
        deadline = time.monotonic() + WAIT_SECONDS
        left = native.receive_and_digest(here.fileno(), payloads, 16, deadline)
        assert left.digests == [digest] * 2 and isinstance(left.lost, native.PeerLeft)
    closed = native.receive_and_digest(-1, payloads, 16, time.monotonic() + WAIT_SECONDS)
    assert closed.digests == [] and "descriptor" in str(closed.lost)


@needs_library
def test_a_peer_that_trickles_gets_no_more_time() -> None:
    payload = memoryview(bytearray(1000))
    here, there = socket.socketpair()
    ended = threading.Event()

    def trickle() -> None:
        for _ in range(1000):
            if ended.wait(0.01):
                return
            there.sendall(b"x")

    sender = threading.Thread(target=trickle)
    with here, there:
        sender.start()
        began = time.monotonic()
        late = native.receive_and_digest(here.fileno(), [payload], 16, began + 0.05)
        is_early = sender.is_alive()  # not only when nothing came any more
        ended.set()
        sender.join()
    assert isinstance(late.lost, TimeoutError) and is_early


@needs_library
def test_a_signal_ends_no_receiving() -> None:
    block, tag = os.urandom(1000), os.urandom(16)
    here, there = socket.socketpair()
    receiver = threading.get_ident()

    def disturb() -> None:
        for piece in (b"", block[:300], block[300:] + tag[:7], tag[7:]):
            there.sendall(piece)
            time.sleep(0.005)
            signal.pthread_kill(receiver, signal.SIGUSR1)

    told: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    sender = threading.Thread(target=disturb)
    try:
        with here, there:
            sender.start()
            payloads = [memoryview(bytearray(1000))]
            came = native.receive_and_digest(
                here.fileno(), payloads, 16, time.monotonic() + WAIT_SECONDS
            )
            sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came.lost is None and payloads[0] == block
    assert came.trailers == [tag] and told


@needs_library
@pytest.mark.parametrize("name_bytes", [1, 16, 72, native.MOST_NAME_BYTES])
@pytest.mark.parametrize("size", [LEAST_BYTES, 1024, PART_BYTES, PART_BYTES + 77])
def test_what_is_sent_comes_with_its_proof(size: int, name_bytes: int) -> None:
    """Tag and digest behind each, as xxhash makes them; zeros behind one that is not what it must
    be. Who receives by name makes the same tags."""
    payloads = [memoryview(bytearray(os.urandom(size))) for _ in range(20)]
    names = [os.urandom(name_bytes) for _ in payloads]
    digests = [xxhash.xxh3_128_digest(payload) for payload in payloads]
    tags = [xxhash.xxh3_128_digest(n + d) for n, d in zip(names, digests, strict=True)]
    wanted = [None, bytes(16), *digests[2:]]
    deadline = time.monotonic() + WAIT_SECONDS
    found: list[list[int]] = []
    here, there = socket.socketpair()

    def send() -> None:
        whole = b"".join(names)
        found.append(native.send_proven(there.fileno(), payloads, whole, wanted, deadline))

    sender = threading.Thread(target=send)
    with here, there:
        sender.start()
        copies = [memoryview(bytearray(size)) for _ in payloads]
        came = native.receive_and_digest(here.fileno(), copies, 32, deadline, b"".join(names))
        sender.join()
    assert found == [[1]] and copies == payloads
    assert (came.digests, came.tags, came.lost) == (digests, tags, None)
    proofs = [tag + digest for tag, digest in zip(tags, digests, strict=True)]
    assert came.trailers == [proofs[0], bytes(32), *proofs[2:]]


@needs_library
@pytest.mark.parametrize("count", [0, 1, 600])
def test_payloads_are_sent_with_what_goes_behind_them(count: int) -> None:
    payloads = [memoryview(bytearray(os.urandom(5))) for _ in range(count)]
    here, there = socket.socketpair()
    with here, there:
        trailers = os.urandom(3 * count)
        deadline = time.monotonic() + WAIT_SECONDS
        native.send_payloads(there.fileno(), b"head", payloads, trailers, deadline)
        there.close()
        whole = b"".join(iter(lambda: here.recv(65536), b""))
    pieces = [bytes(payload) + trailers[3 * i : 3 * i + 3] for i, payload in enumerate(payloads)]
    assert whole == b"head" + b"".join(pieces)


@needs_library
@pytest.mark.parametrize("proven", [False, True])
def test_a_peer_that_takes_nothing_or_has_left_ends_a_send(proven: bool) -> None:
    payloads = [memoryview(bytearray(8 * 1024**2))]  # more than the kernel's buffers take

    def send(until: float) -> None:
        if proven:
            native.send_proven(there.fileno(), payloads, bytes(16), [None], until)
        else:
            native.send_payloads(there.fileno(), b"", payloads, b"", until)

    here, there = socket.socketpair()
    with here, there:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            send(began + 0.05)
        assert time.monotonic() - began >= 0.05
        here.close()
        with pytest.raises(BrokenPipeError):
            send(time.monotonic() + WAIT_SECONDS)


def test_names_that_the_library_has_no_room_for_are_refused() -> None:
    payloads, until = [memoryview(bytearray(LEAST_BYTES))], time.monotonic() + WAIT_SECONDS
    here, there = socket.socketpair()
    with here, there:
        with pytest.raises(ValueError, match="up to 112 bytes, got 113"):
            native.send_proven(there.fileno(), payloads, bytes(113), [None], until)
        with pytest.raises(ValueError, match="up to 112 bytes, got 113"):
            native.receive_and_digest(here.fileno(), payloads, 16, until, bytes(113))


def test_a_library_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(native, "ABI", native.ABI + 1)
        assert native.library() is None
        native.library.cache_clear()
        patch.undo()
        patch.setenv(native.VARIABLE, "none")
        assert native.library() is None
    native.library.cache_clear()
