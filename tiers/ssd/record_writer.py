# SPDX-License-Identifier: Apache-2.0
"""RecordWriter: the queue of blocks to be written to the disk, and the writing of their records.

A run is a group of records in neighbouring slots. Several runs of a batch are written at the same
time. While the disk writes some runs, threads hash the blocks of the next runs; hashing releases
the GIL. A block whose bytes do not match its proof gets no header, and look-ups never find it.
`RecordWriter` makes a tag only for a block that came without a proof."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

from ..base import Stored
from ..codecs.base import Codec
from ..errors import TierClosed
from ..native.native_library import ProvenRecords, has_digests
from ..record import HEADER_BYTES
from ..tag import Proof, payload_digest
from .disk.disk_queue import DiskQueue, Result
from .disk.io_pool import Done, IoPool
from .disk.slot_file import Scratch
from .encoded_io import EncodingWriter
from .index.slot_index import Entry
from .state import Job, StoreState

# The most bytes that all threads write at a time, or one run of each thread if that is more. The
# share of one thread must keep a disk busy; a sync and a commit wait for all shares.
FLIGHT_BYTES = 32 * 1024**2
NO_HEADER = bytes(HEADER_BYTES)


@dataclass(slots=True, eq=False)
class Write:
    """A block that is queued or being written, and all `store` calls (jobs) that wait for it."""

    key: bytes
    payload: memoryview  # `page_bytes` long
    proof: Proof | None  # None: the block came without a proof
    waiters: list[tuple[Job[Stored], int]]
    dropped: bool = False  # removed after it was queued, so not kept
    is_damaged: bool = False  # the payload does not match its proof, so not kept


class WriteQueue:
    """A first-in, first-out queue of blocks to write. A block that is already queued or being
    written is not queued again. Every method is called under the state's lock."""

    def __init__(self) -> None:
        self.waiting: deque[Write] = deque()
        self._pending: dict[bytes, Write] = {}  # queued or being written
        self.num_blocks = 0  # queued or being written; the owner sets the limit

    def __contains__(self, key: object) -> bool:
        """Whether a block is queued or being written, and was not removed meanwhile."""
        write = self._pending.get(key)  # type: ignore[call-overload]
        return write is not None and not write.dropped

    def add(
        self,
        blocks: Iterable[tuple[bytes, memoryview, Proof | None, int]],
        job: Job[Stored],
    ) -> None:
        """Queue blocks (key, payload, proof, position in `job.answers`). For a block that is
        already queued or being written, the job waits for the earlier write."""
        pending, waiting = self._pending, self.waiting
        for key, payload, proof, position in blocks:
            write = pending.get(key)
            if write is not None and not write.dropped:
                write.waiters.append((job, position))
                continue
            write = pending[key] = Write(key, payload, proof, [(job, position)])
            waiting.append(write)
            self.num_blocks += 1

    def cancel(self, key: bytes) -> bool:
        """Remove a block that is queued or being written. Return False for any other block."""
        if key not in self:
            return False
        self._pending[key].dropped = True
        return True

    def cancel_all(self) -> None:
        for write in self._pending.values():
            write.dropped = True

    def dropped_keys(self) -> list[bytes]:
        """Return removed blocks that are queued or being written, whose rows may be on the disk."""
        return [key for key, write in self._pending.items() if write.dropped]

    def pop_writes(self, count: int) -> list[Write]:
        """Take up to `count` blocks to write, which the caller ends with `settle` or `abandon`."""
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]

    def settle(self, writes: Sequence[Write], kept: Set[int]) -> tuple[list[Job[Stored]], int]:
        """End writes and set their outcomes. A block is kept if the `id` of its `Write` is in
        `kept` and the block was not removed. Return the jobs that are now complete, and the number
        of blocks that were not kept."""
        done: list[Job[Stored]] = []
        num_lost = 0
        for write in writes:
            outcome = Stored.KEPT
            if id(write) not in kept or write.dropped:
                outcome = Stored.DAMAGED if write.is_damaged else Stored.REFUSED
                num_lost += 1
            for job, position in write.waiters:
                job.answers[position] = outcome
                job.waiting_for -= 1
                if not job.waiting_for:
                    done.append(job)
            self._leave(write)
        return done, num_lost

    def abandon(self, writes: Sequence[Write]) -> list[Job[Stored]]:
        """Fail writes because the store is closed. Return the jobs that are now complete."""
        done: list[Job[Stored]] = []
        for write in writes:
            for job, _position in write.waiters:
                job.abandon()
                if not job.waiting_for:
                    done.append(job)
            self._leave(write)
        return done

    def _leave(self, write: Write) -> None:
        self.num_blocks -= 1
        # A block that was dropped and stored again has a second write, which is in `_pending`.
        if self._pending.get(write.key) is write:
            del self._pending[write.key]


Placed = tuple[Write, Entry]


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks that are written, synced and committed together."""

    writes: list[Write]
    began: float
    placed: list[Placed] = field(default_factory=list)
    failed_syncs: int = 0  # failed syncs before the first write
    unsure: set[int] = field(default_factory=set)  # slots whose rows may be on the disk
    # Fields that the writing threads change under the lock.
    blocks_left: int = 0  # blocks whose writes have not returned
    written: list[int] = field(default_factory=list)  # positions in `placed`


class RecordWriter:
    """Writes the records of batches. Calls `notify`, under the lock, when a batch is written."""

    def __init__(
        self,
        state: StoreState,
        io_threads: int,
        codec: Codec | None,
        notify: Callable[[], None],
    ) -> None:
        self.state = state
        self.encoder = None if codec is None else EncodingWriter(state, codec)  # of all payloads
        self._notify = notify
        self._is_over = False
        flight_bytes = max(FLIGHT_BYTES, io_threads * state.slot_file.run_bytes)
        self._pool = IoPool(state.slot_file, io_threads, "stratakv-ssd-write", flight_bytes)

    def start(self, batch: Batch) -> None:
        """Start to write blocks to their slots. Never waits. Raises TierClosed after `close`."""
        slots, encodes = [entry.slot for _, entry in batch.placed], self.encoder is not None
        with self.state.lock:  # so that runs are counted before they end
            if self._is_over:
                raise TierClosed("the SSD tier was closed before this batch was begun")
            # With a codec each slot is a run: lengths are known only after encoding.
            self._pool.start(
                slots,
                _Writing(self, batch),
                singly=encodes,
                spread=encodes or self.state.seal is not None,
            )
            batch.blocks_left = len(slots)

    def close(self, deadline: float) -> bool:
        """End the threads. Return False if a thread runs at `deadline` (monotonic seconds)."""
        with self.state.lock:
            self._is_over = True
        return self._pool.close(deadline)

    def settle_blocks(self, batch: Batch, ended: int, written: Sequence[int]) -> None:
        """Record that writes of `ended` more blocks have returned; those at `written` succeeded."""
        with self.state.lock:
            batch.written += written
            batch.blocks_left -= ended
            if not batch.blocks_left:
                self._notify()


class _Writing:
    """Writes the runs of one batch, as a `Work` of the `IoPool`."""

    def __init__(self, writer: RecordWriter, batch: Batch) -> None:
        self._writer = writer
        self._batch = batch
        self._slot_file = writer.state.slot_file
        self._records = self._proven_records()

    def prepare_run(self, run: range, scratch: Scratch) -> None:
        placed, encoder = self._batch.placed[run.start : run.stop], self._writer.encoder
        if encoder is not None:
            [(write, entry)] = placed
            tagged = self._tagged(write)
            if tagged is None:
                scratch.headers[0][:HEADER_BYTES] = NO_HEADER
                return
            entry = encoder.encode(entry, write.payload, scratch, *tagged)
            self._batch.placed[run.start] = (write, entry)  # the entry has the encoded length
            return
        scratch.num_laid = 0
        if self._records is not None:
            pieces = scratch.laid.buffer_info()[0]
            for position in self._records.make(run, scratch.address, pieces):
                self._batch.placed[position][0].is_damaged = True
            scratch.num_laid = len(run)
            return
        encode = self._writer.state.headers.encode_headers
        for (write, entry), header in zip(placed, scratch.headers, strict=False):
            tagged = self._tagged(write)
            if tagged is None:
                header[:HEADER_BYTES] = NO_HEADER
                continue
            key, _, generation, _ = entry
            tag, digest = tagged
            header[:HEADER_BYTES] = encode(key, generation, tag, write.payload, digest)

    def _proven_records(self) -> ProvenRecords | None:
        """Prepare the batch for the native library, which hashes blocks and makes headers one run
        at a time. None if the library cannot be used for this batch."""
        state, placed = self._writer.state, self._batch.placed
        is_plain = self._writer.encoder is None and state.seal is None
        if not (placed and is_plain and self._slot_file.can_be_laid and has_digests()):
            return None
        payloads = [write.payload for write, _ in placed]
        proofs = [write.proof for write, _ in placed if write.proof is not None]
        if len(proofs) < len(placed) or any(payload.readonly for payload in payloads):
            return None
        return ProvenRecords(
            state.headers.shared,
            payloads,
            [entry.key for _, entry in placed],
            [entry.generation for _, entry in placed],
            [proof.tag for proof in proofs],
            [proof.digest for proof in proofs],
        )

    def _tagged(self, write: Write) -> Proof | None:
        """Return the proof of a block; None if the block's bytes do not match its proof."""
        digest = payload_digest(write.payload)
        if write.proof is None:
            return Proof(self._writer.state.tagger.tag(write.key, digest), digest)
        if write.proof.digest != digest:
            write.is_damaged = True
            return None
        return write.proof

    def start(self, run: range, scratch: Scratch, disk: DiskQueue, number: int) -> None:
        placed = self._batch.placed[run.start : run.stop]
        entry = placed[0][1]
        if entry.encoded_bytes:
            size = entry.encoded_bytes
            self._slot_file.start_write_encoded(disk, number, entry.slot, size, scratch)
            return
        payloads = [write.payload for write, _ in placed]
        self._slot_file.start_write(disk, number, entry.slot, payloads, scratch)

    def complete_runs(self, done: Sequence[Done]) -> tuple[()]:
        written: list[int] = []
        for run, _, result in done:
            fault = self._fault(run, result)
            if fault is None:
                written += [i for i in run if not self._batch.placed[i][0].is_damaged]
            else:
                self._writer.state.count_fault(fault)
        self._writer.settle_blocks(self._batch, sum(len(run) for run, _, _ in done), written)
        return ()

    def _fault(self, run: range, result: Result) -> Exception | None:
        if isinstance(result, Exception):
            return result
        encoded_bytes = self._batch.placed[run.start][1].encoded_bytes
        if encoded_bytes:
            wanted = self._slot_file.encoded_record_bytes(encoded_bytes)
        else:
            wanted = len(run) * self._slot_file.record_bytes
        if result != wanted:
            return OSError(errno.EIO, f"{result} of {wanted} bytes of a run were written")
        return None
