# SPDX-License-Identifier: Apache-2.0
"""StoreState: the lock of a store, its writer and its reader, and the data that the lock guards.
Futures are completed without the lock, because completing a future runs callbacks of the caller."""

from __future__ import annotations

import errno
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import lmdb

from ..base import TierStats
from ..block import BlockLayout
from ..errors import TierClosed, TierError
from ..record import PlainHeaders, RecordHeader, Seal
from ..tag import NO_TAG, Tagger
from .disk.slot_file import SlotFile
from .index.slot_index import Entry, SlotIndex

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass
class StoreState:
    """The state of a store. `lock` guards `index`, `stats` and jobs; other fields never change."""

    layout: BlockLayout
    slot_file: SlotFile
    index: SlotIndex
    stats: TierStats
    seal: Seal | None = None  # of every record; None: plain checksums
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.layout_id = self.layout.layout_id()
        self.page_bytes = self.layout.page_bytes
        self.tagger = Tagger(self.layout_id, self.page_bytes)
        self.headers = PlainHeaders(self.layout_id, self.page_bytes, self.seal)

    def header_of(self, entry: Entry) -> RecordHeader:
        """Return the expected header of the record of an entry that was written without a codec."""
        return RecordHeader(
            entry.key, self.layout_id, self.page_bytes, entry.generation, seal=self.seal
        )

    def encoded_header_of(self, entry: Entry, codec: int, tag: bytes = NO_TAG) -> RecordHeader:
        """Return the expected header of the record of an entry that was written with `codec`."""
        return RecordHeader(
            entry.key,
            self.layout_id,
            entry.encoded_bytes,
            entry.generation,
            codec,
            self.layout.page_bytes,
            tag,
            self.seal,
        )

    def count_fault(self, error: Exception) -> None:
        """Count an error of disk or index in `stats.errors`. Log the first error of each kind."""
        code = error.errno if isinstance(error, OSError) else None
        kind = errno.errorcode.get(code or 0, type(error).__name__)
        with self.lock:
            first = kind not in self.stats.errors
            self.stats.errors[kind] = self.stats.errors.get(kind, 0) + 1
        if first:
            # Another exception is a programming error, so its traceback is logged.
            trace = None if isinstance(error, OSError | lmdb.Error) else error
            log.warning(
                "the SSD tier met a fault, and counts further ones: %s", error, exc_info=trace
            )


def _uncancelable_future() -> Future[Any]:
    # A caller that could cancel would reuse buffers to which the disk still writes.
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True, eq=False)
class Job(Generic[_T]):
    """A running `load` or `store` call: its future and its answers, which arrive in any order. Each
    answer changes `answers` and `waiting_for` together, under the lock."""

    answers: list[_T]
    waiting_for: int = 0  # answers still missing
    future: Future[list[_T]] = field(default_factory=_uncancelable_future)
    error: TierError | None = None

    def abandon(self) -> None:
        """End one key without an answer; its call fails with TierClosed. Called under the lock."""
        self.error = TierClosed("the SSD tier was closed before this call was done")
        self.waiting_for -= 1

    def complete(self) -> None:
        """Complete the future, without the lock. Called by the thread that made `waiting_for` 0."""
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.answers)
