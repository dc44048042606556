# SPDX-License-Identifier: Apache-2.0
"""SsdStore: keeps blocks in a slot file and their index in LMDB, and verifies every block read.

Look-ups use only the index in memory. A few threads read blocks and a few other threads write
blocks; `reader.py` and `writer.py` describe the guarantees of reads and writes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from ..base import Answer, ReadSample, Stored, TierStats
from ..block import KEY_BYTES, BlockLayout
from ..codecs.base import Codec
from ..errors import InvalidBlock, TierBusy, TierClosed, TierConfigError
from ..mac_key import MacKey
from ..policies.known_policies import DEFAULT_SSD_POLICY
from ..reopening_store import DiskStore
from ..tag import Proof, Proofs
from .folder.open_store import open_store
from .index.slot_index import LAST_GENERATION
from .reader import Part, Reader
from .state import Job
from .trial_read import TRIAL_BYTES, trial_read
from .writer import Writer

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 * 1024**2
DURABILITIES = ("sync", "async")


class SsdStore(DiskStore):
    """A store in the directory `path` that takes at most `capacity_bytes` of disk, index included.

    The store survives a restart, a kill and, by its order of writes (`writer.py`), a power cut. A
    damaged record is a miss; with a damaged index the store starts empty. Only one process can have
    the store open, with the store's layout and namespace. Thread-safe.

    `queue_bytes` bounds the blocks that wait to be written and, separately, the blocks that wait to
    be read. A call beyond the bound raises TierBusy, but an empty queue accepts a batch of any
    size. The default is 256 MiB, or four blocks if they are larger.

    `io_threads` threads read blocks and as many hash and write blocks, each with up to 16 disk
    requests at a time. `durability` says when a block counts as stored: with "sync" when its record
    and its index row are on the disk, with "async" when its record is written. With "async", a
    power cut or a kill may lose the blocks of the last two seconds. A load never returns wrong
    bytes in either case.

    A store of another format at `path` is moved aside (`folder/other_formats.py`) and kept while
    the disk has room, in addition to the capacity. The StrataKV version that made the old store can
    use it again.

    With a `codec`, blocks whose encoding saves a page are written encoded. Encoding reduces the
    bytes read and written, but no more blocks fit. A store written with a lossless codec may be
    opened without a codec, and the reverse. A lossy store opens only with its codec.

    With a `mac_key`, a record written without this key is a miss, which protects a directory to
    which other users can write. A store made with a key opens only with the same key.

    `policy` is the name of the eviction policy (`policies/known_policies.py`). A store of more than
    `MOST_POLICY_SLOTS` slots always uses "lru" and logs a warning if another policy was chosen.

    If `create` is false, only an existing store is opened.

    Raises TierConfigError if the path, the size or the files cannot be used, TierDown if the disk
    is the cause."""

    learns = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: BlockLayout,
        capacity_bytes: int,
        *,
        namespace: bytes = b"",
        io_threads: int = 4,
        queue_bytes: int | None = None,
        durability: str = "sync",
        codec: Codec | None = None,
        mac_key: MacKey | None = None,
        policy: str = DEFAULT_SSD_POLICY,
        scan_timeout_seconds: float = 30.0,
        create: bool = True,
    ) -> None:
        if queue_bytes is None:
            queue_bytes = max(QUEUE_BYTES, 4 * layout.slot_bytes)
        if io_threads < 1 or queue_bytes < 1:
            raise TierConfigError(
                "the SSD tier needs at least one I/O thread and a queue of one byte, not "
                f"{io_threads} and {queue_bytes}"
            )
        if durability not in DURABILITIES:
            raise TierConfigError(
                f"the SSD tier's durability is {' or '.join(DURABILITIES)}, not {durability!r}"
            )
        if codec is not None and codec.layout != layout:
            raise TierConfigError(
                f"the codec {codec.name} was made for {codec.layout} and the SSD tier is for "
                f"{layout}; make it for that layout"
            )
        self.name = "ssd"
        self.path = Path(path)
        self.layout = layout
        self._opened = open_store(
            self.path,
            layout,
            capacity_bytes,
            namespace,
            scan_timeout_seconds,
            codec,
            mac_key,
            policy,
            create=create,
        )
        self._state = self._opened.state
        self.learns = self._state.index.learns
        self._queue_blocks = queue_bytes // layout.page_bytes
        self._io_threads = io_threads
        with ExitStack() as undo:  # if no more threads can be started
            undo.callback(self._opened.close)
            self._reader = Reader(self._state, io_threads, codec)
            undo.callback(self._reader.close, 0.0)
            self._writer = Writer(
                self._state,
                self._opened.index_file,
                self._opened.epoch,
                io_threads=io_threads,
                durable=durability == "sync",
                codec=codec,
                cleared_up_to=self._opened.cleared_up_to,
                note_cleared=self._opened.note_cleared,
                forget_other_formats=self._opened.forget_other_formats,
            )
            undo.pop_all()
        self._closed = False
        self._has_open_files = True
        self._faults_seen = 0

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        with self._state.lock:
            known, coming = self._state.index.known(keys), self._writer.queue
            if not (known or coming.num_blocks):
                return [Answer.MISS] * len(keys)
            hits = frozenset(known)
            return [
                Answer.HIT if key in hits else Answer.PENDING if key in coming else Answer.MISS
                for key in keys
            ]

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        """See StoreTier. A block being stored is a miss. Raises TierBusy if the queue is full."""
        payloads = self._payloads(keys, buffers, writable=True)
        job: Job[Proof | None] = Job([None] * len(keys))
        with self._state.lock:
            self._check_open()
            self._check_queue(self._reader.queued_blocks, len(keys), "reads")
            parts = [
                Part(entry, payloads[position], job, position)
                for position, entry in enumerate(self._state.index.pin(keys))
                if entry is not None
            ]
            self._state.stats.misses += len(keys) - len(parts)
            job.waiting_for = len(parts)
            self._reader.submit(parts)
        if not parts:
            job.complete()
        return job.future

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        payloads = self._payloads(keys, buffers, writable=False)
        given = [None] * len(keys) if proofs is None else proofs
        if len(given) != len(keys):  # checked first, before buffers are in use
            raise InvalidBlock(f"every block takes a proof or None: {len(keys)}, not {len(given)}")
        job = Job([Stored.KEPT] * len(keys))
        with self._state.lock:
            self._check_open()
            index = self._state.index
            known = index.known(keys)
            missing: Sequence[int] = range(len(keys))
            if known:
                missing = [position for position, key in enumerate(keys) if key not in index]
            if missing:
                self._check_queue(self._writer.queue.num_blocks, len(missing), "writes")
            index.touch(known)
            job.waiting_for = len(missing)
            self._writer.add([(keys[i], payloads[i], given[i], i) for i in missing], job)
        if not missing:
            job.complete()
        return job.future

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._state.lock:
            self._state.index.touch(keys)

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        with self._state.lock:
            self._state.index.observe_chain(chain, now)

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        now = time.monotonic()
        with self._state.lock:
            self._check_open()
            num_held = self._state.index.retain_keys(keys, now + seconds, now)
        kept: Future[list[bool]] = Future()
        kept.set_result([index < num_held for index in range(len(keys))])
        return kept

    def trial_read(self, seconds: float) -> ReadSample | None:
        with self._state.lock:
            if self._closed:
                return None
            slots = self._state.index.coldest_slots(max(1, TRIAL_BYTES // self.layout.slot_bytes))
        return trial_read(self._state.slot_file, self.layout, slots, self._io_threads, seconds)

    def drop(self, keys: Sequence[bytes]) -> int:
        with self._state.lock:
            known = sum(self._drop_key(key) for key in keys)
            self._writer.wake()
        return known

    def clear(self) -> None:
        with self._state.lock:
            self._state.index.forget_up_to(LAST_GENERATION)
            self._writer.clear()

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        return self._writer.wait_forgotten(timeout_seconds)

    def stats(self) -> TierStats:
        with self._state.lock:
            stats = self._state.stats
            stats.blocks = len(self._state.index)
            stats.used_bytes = stats.blocks * self._state.slot_file.record_bytes
            return stats.copy()

    def has_lost_disk(self) -> bool:
        """See DiskStore. Each call checks the path, because removed files cause no I/O errors.
        Trial reads are made only if there were errors since the last call."""
        with self._state.lock:
            faults = sum(self._state.stats.errors.values())
            if self._closed:
                return False
        if not self._opened.is_in_place():
            return True
        if faults == self._faults_seen:
            return False
        self._faults_seen = faults
        return not self._state.slot_file.can_be_read()

    def not_yet_forgotten(self) -> tuple[list[bytes], bool]:
        with self._state.lock:
            keys, are_all = self._state.index.dropped_keys()
            keys += self._writer.queue.dropped_keys()
            return keys, self._writer.has_clear_to_note or not are_all

    @property
    def has_open_files(self) -> bool:
        return self._has_open_files

    def close(self, timeout_seconds: float) -> None:
        """See StoreTier. Queued blocks are written as far as the time allows. If the disk still
        blocks a thread at the end, the files stay open until a later call finds that the thread has
        ended."""
        deadline = time.monotonic() + timeout_seconds
        with self._state.lock:
            if not self._has_open_files:
                return
            is_first, self._closed = not self._closed, True
        # Readers and writers end together: the kernel takes 32 ms to free a thread's queue.
        self._reader.end_reads(deadline)
        writes_ended = self._writer.close(deadline)
        if self._reader.close(deadline) and writes_ended:
            self._opened.close()
            self._has_open_files = False
        elif is_first:
            # Files are not closed: a call in the kernel could then write to the next opened file.
            log.error("the SSD tier was closed while the disk did not answer; its files stay open")

    def _drop_key(self, key: bytes) -> bool:
        return self._state.index.forget_key(key) or self._writer.queue.cancel(key)

    def _payloads(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], *, writable: bool
    ) -> list[memoryview]:
        """Return flat views of the buffers, cut to a payload's length. Raises InvalidBlock."""
        size = self._state.page_bytes
        if len(keys) != len(buffers) or not {KEY_BYTES}.issuperset(map(len, keys)):
            raise InvalidBlock(
                f"every block takes a key of {KEY_BYTES} bytes and a buffer; {len(keys)} keys "
                f"came with {len(buffers)} buffers"
            )
        for buffer in buffers:
            if buffer.nbytes < size or (writable and buffer.readonly):
                raise InvalidBlock(
                    f"a block takes a {'writable ' * writable}buffer of {size} bytes, not one of "
                    f"{buffer.nbytes}{' that is read-only' * buffer.readonly}"
                )
        flat = [b if b.format == "B" and b.ndim == 1 else b.cast("B") for b in buffers]
        return [buffer[:size] for buffer in flat]  # new views: callers may release the others

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed("the SSD tier was closed")

    def _check_queue(self, queued: int, coming: int, what: str) -> None:
        if queued and queued + coming > self._queue_blocks:
            raise TierBusy(f"{queued} {what} of the SSD tier are queued; {coming} more do not fit")
