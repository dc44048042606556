# SPDX-License-Identifier: Apache-2.0
"""Gives records their headers and writes them, the runs of a batch several at a time.

Hashing and writing release the interpreter, so while some threads wait for the disk others hash
what it gets next. Knows nothing of rows, of syncs, or of who may be offered when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..codecs.base import Codec
from ..record import HEADER_BYTES, encode_header
from .encoded_io import EncodingWriter
from .io_pool import IoPool
from .slot_file import Scratch
from .slot_index import Entry
from .state import StoreState
from .write_queue import Write

# Handed to the disk at once. It keeps a disk busy, and a sync or a commit, which waits behind it,
# is soon over: with 40 MiB instead, blocks of 5 MiB came to the disk at two thirds of the speed.
IN_FLIGHT_BYTES = 8 * 1024**2

Placed = tuple[Write, Entry]


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks that are written, synced and committed together."""

    writes: list[Write]
    began: float
    placed: list[Placed] = field(default_factory=list)
    failed_syncs: int = 0  # before its writing began
    # Changed under the lock by the threads that write it.
    shares_left: int = 0
    written: list[int] = field(default_factory=list)  # positions in `placed`

    def is_written(self) -> bool:
        """Whether all writes have returned, with or without an error."""
        return not self.shares_left


class RecordWriter:
    """`notify` is called under the lock when a batch is written."""

    def __init__(
        self,
        state: StoreState,
        io_threads: int,
        codec: Codec | None,
        notify: Callable[[], None],
    ) -> None:
        self._state = state
        self._notify = notify
        self._encoder = None if codec is None else EncodingWriter(state, codec)
        self._disk = threading.Semaphore(max(2, IN_FLIGHT_BYTES // state.slot_file.run_bytes))
        self._pool = IoPool(state.slot_file, io_threads, "stratakv-ssd-write")

    @property
    def encodes(self) -> bool:
        """Whether payloads go through a codec."""
        return self._encoder is not None

    def start(self, batch: Batch) -> None:
        """Have what is placed written. Never waits."""
        slots = [entry.slot for _, entry in batch.placed]
        with self._state.lock:  # or a share could end before it is counted
            batch.shares_left = self._pool.start(
                slots, lambda runs, scratch: self._write_share(batch, runs, scratch)
            )

    def close(self, deadline: float) -> bool:
        """False if a thread has not ended by `deadline` (monotonic). No `start` may follow."""
        return self._pool.close(deadline)

    def _write_share(self, batch: Batch, runs: Sequence[range], scratch: Scratch) -> None:
        """On a thread of the pool: write some runs, one after the other."""
        written: list[int] = []
        try:
            for run in runs:
                try:
                    self._write_run(batch, run, scratch)
                    written += run
                except Exception as error:  # noqa: BLE001 - the thread must go on
                    self._state.count_fault(error)
        finally:
            with self._state.lock:
                batch.written += written
                batch.shares_left -= 1
                if batch.is_written():
                    self._notify()

    def _write_run(self, batch: Batch, run: range, scratch: Scratch) -> None:
        state, placed = self._state, batch.placed[run.start : run.stop]
        if self._encoder is not None:
            # Only now is it known how long a block becomes, and its entry says it.
            for position, (write, entry) in zip(run, placed, strict=True):
                entry = self._encoder.write(entry, write.payload, scratch)
                batch.placed[position] = (write, entry)
            return
        for (write, entry), header in zip(placed, scratch.headers, strict=False):
            header[:HEADER_BYTES] = encode_header(state.header_of(entry), write.payload)
        payloads = [write.payload for write, _ in placed]
        with self._disk:
            state.slot_file.write(placed[0][1].slot, payloads, scratch)
