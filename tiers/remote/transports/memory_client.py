# SPDX-License-Identifier: Apache-2.0
"""MemoryConnection: the client's end of shared memory, which copies blocks between slots of the
tenant store and buffers.

    load    PIN, copy and hash, UNPIN           store    RESERVE, hash and copy, COMMIT

One call copies and hashes a block and releases the GIL meanwhile; with a tag key, a block is copied
and hashed in parts. If a lease ends before a block is copied out, the block is a miss, because its
slot may hold another block then. The client reads the clock before each copy into a slot. If the
process is stopped during a copy into a slot, the server does not reuse the slot until the client
sends COMMIT or its connection ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...block import BlockLayout
from ...native.native_library import PART_BYTES, copy_and_digest
from ...slab.shared_memory import has_fixed_size
from ...tag import TAG_BYTES, Hashed, Proof, Proofs
from ...wire.frames import (
    MAX_LEASE_SECONDS,
    NO_PROOF,
    SLOT_BYTES,
    WELCOME,
    RequestFrame,
    State,
    Verb,
    Welcome,
    encode_greeting,
    encode_request,
    pack_keys,
    part_blocks,
)
from ...wire.sockets import Connection, ConnectionLost
from .socket_connection import SocketConnection, welcomed

LOAD_BYTES = 32 * 1024**2  # a part of a load: large, for few messages
STORE_BYTES = 8 * 1024**2  # a part of a store: small, for a short last check
FIRST_SHARE, GROWTH = 32, 4  # the first part is 1/32 of a full one, each next part 4 times larger
PINNED_SHARE = 4  # one load pins at most a quarter of the tenant store's slots
MOST_ASKED = 16  # parts of a load that the server pins at a time
PARTS_AHEAD = 2  # parts of a store that the server reserves at a time


class _Asked(NamedTuple):
    """A PIN or RESERVE request, and the end of the request's lease by this process's clock."""

    request: RequestFrame
    words: bytes
    lease_ends: float


class _Reserved(NamedTuple):
    """The slots to fill: `slots[i]` is for the block at position `wanted[i]` of a part."""

    lease: int
    lease_ends: float
    wanted: Sequence[int]
    slots: Sequence[int]


class MemoryConnection(SocketConnection):
    """A connection over a Unix socket, with the tenant store's memory mapped."""

    kind = "memory"

    def __init__(
        self,
        connection: Connection,
        layout: BlockLayout,
        welcome: Welcome,
        memory: mmap.mmap,
        tag_key: bytes | None = None,
        namespace: bytes = b"",
    ) -> None:
        super().__init__(connection, layout, welcome, tag_key, namespace)
        self._memory = memory
        self._num_slots = welcome.num_slots
        self._slot_bytes = welcome.slot_bytes
        self._view = memoryview(memory)
        size = self._page_bytes
        self._cuts = [(cut, min(cut + PART_BYTES, size)) for cut in range(0, size, PART_BYTES)]

    @classmethod
    def open(
        cls,
        path: str,
        ticket: bytes,
        layout: BlockLayout,
        deadline: float,
        *,
        tag_key: bytes | None = None,
        namespace: bytes = b"",
    ) -> MemoryConnection:
        """Connect, send the ticket and map the memory. Raises ConnectionLost."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fd: int | None = None
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(path)
            connection = Connection(sock)
            connection.send([encode_greeting(ticket)], deadline)
            raw, fd = connection.receive_fd(WELCOME.size, deadline)
            welcome = welcomed(raw, layout)
            size = welcome.num_slots * welcome.slot_bytes
            if fd is None or not size or welcome.slot_bytes < layout.page_bytes:
                raise ConnectionLost(f"the server at {path} handed out no memory")
            # Access to a mapping beyond the end of its file would kill this process.
            if os.fstat(fd).st_size < size:
                raise ConnectionLost(f"the server at {path} handed out too little memory")
            if not has_fixed_size(fd):
                raise ConnectionLost(
                    f"the server at {path} handed out memory that could be cut short (no seals)"
                )
            return cls(connection, layout, welcome, mmap.mmap(fd, size), tag_key, namespace)
        except OSError as error:
            sock.close()
            raise ConnectionLost(f"{path}: {error}") from error
        except BaseException:
            sock.close()
            raise
        finally:
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        super().close()
        # A copy under way keeps the mapping open until the copy's view is released.
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
    ) -> list[Proof | None]:
        # While one part is copied, the server pins later parts, up to a share of its slots. Several
        # requests share a message, because waking a sleeping server is slow.
        parts = self._parts(len(keys), LOAD_BYTES)
        most = max(1, self._num_slots // PINNED_SHARE)
        asked: deque[_Asked] = deque()
        self.corrupt_keys = []
        proofs: list[Proof | None] = []
        words, must_send = b"", False
        waiting = deque(parts)
        for part in parts:
            while waiting and len(asked) < MOST_ASKED:
                if asked and waiting[0].stop - part.start > most:
                    break
                asked.append(self._build_request(Verb.PIN, keys[waiting.popleft()], deadline))
                words += asked[-1].words
                must_send = True
            if must_send:
                self._connection.send([words], deadline)
                words, must_send = b"", False
            words += self._take_out(asked.popleft(), keys[part], buffers[part], proofs, deadline)
        if words:
            self._connection.send([words], deadline)
        return proofs

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        deadline: float,
    ) -> list[State | None]:
        # While one part is copied, the server reserves the next part and checks the last. Replies
        # have the order of requests: RESERVE 0, RESERVE 1, COMMIT 0, RESERVE 2, COMMIT 1, ...
        parts = self._parts(len(keys), STORE_BYTES)
        sizes = [part.stop - part.start for part in parts]
        asked: deque[_Asked] = deque()
        commits: deque[RequestFrame] = deque()
        states: list[State | None] = []
        damaged: list[int] = []
        words = b""
        for number, part in enumerate(parts):
            for ahead in parts[number + len(asked) : number + PARTS_AHEAD]:
                asked.append(self._build_request(Verb.RESERVE, keys[ahead], deadline))
                words += asked[-1].words
            self._connection.send([words], deadline)
            if len(commits) == PARTS_AHEAD:
                states += self._take_committed(
                    commits.popleft(), sizes[number - PARTS_AHEAD], deadline
                )
            reserved = self._take_reserved(asked.popleft(), sizes[number], deadline)
            brought = self._put_in(reserved, part.start, keys, buffers, proofs, damaged)
            commits.append(self._next_request(Verb.COMMIT, len(brought), reserved.lease))
            words = encode_request(commits[-1]) + b"".join(brought)
        if words:
            self._connection.send([words], deadline)
        for commit, size in zip(commits, sizes[-len(commits) :], strict=True):
            states += self._take_committed(commit, size, deadline)
        for index in damaged:
            states[index] = None
        return states

    def _parts(self, count: int, most_bytes: int) -> list[slice]:
        """Divide a batch into parts. The first parts are small, so that copying starts early."""
        most = part_blocks(self._page_bytes, self._num_slots, most_bytes)
        size = max(1, most // FIRST_SHARE)
        parts, start = [], 0
        while start < count:
            parts.append(slice(start, min(start + size, count)))
            start, size = start + size, min(GROWTH * size, most)
        return parts

    def _build_request(self, verb: Verb, keys: Sequence[bytes], deadline: float) -> _Asked:
        lease_ends, milliseconds = self._lease(deadline)
        request = self._next_request(verb, len(keys), milliseconds)
        return _Asked(request, encode_request(request) + pack_keys(keys), lease_ends)

    def _take_out(
        self,
        asked: _Asked,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        done: list[Proof | None],
        deadline: float,
    ) -> bytes:
        """Receive the reply to a PIN, copy the blocks, and return the UNPIN that ends the lease."""
        lease = self._lease_of(asked, len(keys), deadline)
        states = self._take_states(len(keys), deadline)
        hits = [index for index, state in enumerate(states) if state is State.HIT]
        raw = self._connection.receive(len(hits) * (SLOT_BYTES + TAG_BYTES), deadline)
        first = len(hits) * SLOT_BYTES
        slots = self._slots(raw[:first])
        tags = [raw[place : place + TAG_BYTES] for place in range(first, len(raw), TAG_BYTES)]
        copy_out, slot_at = self._copy_out, self._slot
        proofs: list[Proof | None] = [None] * len(keys)
        for index, slot, tag in zip(hits, slots, tags, strict=True):
            proof = copy_out(keys[index], slot_at(slot), buffers[index], tag)
            if time.monotonic() >= asked.lease_ends:
                continue
            proofs[index] = proof
            if proof is None:
                self.corrupt_blocks += 1
                self.corrupt_keys.append(keys[index])
        done += proofs
        return encode_request(self._next_request(Verb.UNPIN, 0, lease))

    def _take_reserved(self, asked: _Asked, count: int, deadline: float) -> _Reserved:
        """Receive the reply to a RESERVE request, which has the slots of the WANTED blocks."""
        lease = self._lease_of(asked, count, deadline)
        states = self._take_states(count, deadline)
        wanted = [index for index, state in enumerate(states) if state is State.WANTED]
        slots = self._slots(self._connection.receive(len(wanted) * SLOT_BYTES, deadline))
        return _Reserved(lease, asked.lease_ends, wanted, slots)

    def _put_in(
        self,
        reserved: _Reserved,
        first: int,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        damaged: list[int],
    ) -> list[bytes]:
        """Fill the slots of the part that begins at block `first`. Return the packed proof of each
        block, or NO_PROOF for a block that was not copied or is damaged."""
        packed = []
        for place, slot in zip(reserved.wanted, reserved.slots, strict=True):
            index = first + place
            key, target = keys[index], self._slot(slot)
            hasher = self._copy_in(key, buffers[index], target, reserved.lease_ends)
            proof = None if hasher is None else self._tags.sent(key, hasher, proofs[index])
            if hasher is not None and proof is None:
                damaged.append(index)
            packed.append(NO_PROOF if proof is None else proof.pack())
        return packed

    def _take_committed(self, commit: RequestFrame, count: int, deadline: float) -> list[State]:
        if self._take_reply(commit, deadline).blocks != count:
            raise ConnectionLost("the server answered for blocks that were not sent")
        return self._take_states(count, deadline)

    def _lease_of(self, asked: _Asked, count: int, deadline: float) -> int:
        reply = self._take_reply(asked.request, deadline)
        if reply.blocks != count:
            raise ConnectionLost("the server answered for blocks that were not asked for")
        return reply.argument

    def _lease(self, deadline: float) -> tuple[float, int]:
        """Return the end of a new lease by this process's clock, and its length in milliseconds. A
        lease ends earlier for the client than for the server, which receives the request later."""
        now = time.monotonic()
        seconds = min(max(0.001, deadline - now), MAX_LEASE_SECONDS)
        return now + seconds, max(1, int(seconds * 1000))

    def _slots(self, raw: bytes) -> Sequence[int]:
        slots = struct.unpack(f"<{len(raw) // SLOT_BYTES}I", raw)
        if slots and max(slots) >= self._num_slots:
            raise ConnectionLost("the server named a slot beyond the end of its memory")
        return slots

    def _slot(self, slot: int) -> memoryview:
        first = slot * self._slot_bytes
        return self._view[first : first + self._page_bytes]

    def _copy_out(
        self, key: bytes, source: memoryview, buffer: memoryview, tag: bytes
    ) -> Proof | None:
        """Copy a block to `buffer`. Return its proof, or None if the block does not match `tag`."""
        if not self._tags.are_keyed:
            digest = copy_and_digest(buffer[: self._page_bytes], source)
            return self._tags.received(key, Hashed(digest), tag)
        hasher = self._tags.begin_block(key)
        for start, end in self._cuts:
            part = buffer[start:end]
            part[:] = source[start:end]
            hasher.update(part)
        return self._tags.received(key, hasher, tag)

    def _copy_in(
        self, key: bytes, buffer: memoryview, target: memoryview, lease_ends: float
    ) -> Any | None:
        """Copy a block to `target` and hash it. Return the hasher, or None if the lease ended."""
        if time.monotonic() >= lease_ends:
            return None
        if not self._tags.are_keyed:
            return Hashed(copy_and_digest(target, buffer[: self._page_bytes]))
        hasher = self._tags.begin_block(key)
        for start, end in self._cuts:
            if time.monotonic() >= lease_ends:
                return None
            part = buffer[start:end]
            hasher.update(part)
            target[start:end] = part
        return hasher
