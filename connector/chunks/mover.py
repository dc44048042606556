# SPDX-License-Identifier: Apache-2.0
"""The base class of tiers below other engines: a thread that calls the hierarchy, the copies
between the host's memory and the slab, and an orderly shutdown.

    store   host's bytes ──digest, copy──► slot of the slab ──► SSD, cache servers
    load    SSD, cache servers ──► slot of the slab ──copy, digest──► host's bytes

A subclass defines and begins the jobs. In `vllm/tier_transfers.py` each call begins its job at
once, because vLLM's scheduler must not wait. In `tiers.py` stores wait for room in the slab, and
answers are futures."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import ClassVar, NamedTuple

import numpy as np

from ...tiers.hierarchy.hierarchy import Hierarchy, StoreTicket
from ...tiers.hierarchy.promotions import LoadTicket
from ...tiers.slab.cpu_slab import CpuSlab
from ...tiers.tag import Proof, Tagger
from .failed import FailedChunks

log = logging.getLogger(__name__)

# The longest delay of work for which the hierarchy has set an alarm, if the alarm is missed.
LOOK_SECONDS = 0.25
CLOSE_SECONDS = 2.0
# How many threads copy a load, and the least bytes that each thread copies.
COPY_THREADS = 2
SHARE_BYTES = 8 * 1024**2

# The pieces of one chunk in the host's memory, in order.
Parts = Sequence[memoryview]


class Assembly(NamedTuple):
    """The built tiers. The event `wakeup` is set when the hierarchy may have work to do."""

    hierarchy: Hierarchy
    slab: CpuSlab
    tagger: Tagger
    wakeup: threading.Event


class _Arrived(NamedTuple):
    """A chunk in the slab, and the host's memory for its bytes."""

    key: bytes
    slot: int
    proof: Proof
    parts: Parts


class Copied(NamedTuple):
    """The result of a load: the keys of missing chunks, and of chunks with wrong bytes."""

    missing: list[bytes]
    damaged: list[bytes]


class ChunkMover(ABC):
    """Owns the tiers of an `Assembly`. `lock` guards the hierarchy, `failed` and the jobs, and is
    never held during a copy. If the thread fails, every chunk is a miss."""

    THREAD: ClassVar[str]
    THEN: ClassVar[str]  # text for the log: what happens to chunks after the thread fails

    def __init__(self, assembly: Assembly, failed: FailedChunks) -> None:
        self.lock = threading.Lock()
        self.damaged = 0  # chunks whose bytes in the slab had changed
        self.is_broken = False
        self._hierarchy, self._slab, self._tagger, self._wakeup = assembly
        self._failed = failed
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=self.THREAD, daemon=True)
        self._helpers = ThreadPoolExecutor(COPY_THREADS - 1, thread_name_prefix=self.THREAD)

    def close(self, seconds: float) -> None:
        """Fail waiting jobs, write unwritten chunks within `seconds`, release all. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.set()
        deadline = time.monotonic() + seconds
        self._thread.join(timeout=seconds + CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("a copy has not ended within %.1f s; the tiers stay open", seconds)
            return
        self._helpers.shutdown(wait=True, cancel_futures=True)
        with self.lock:
            if not self.is_broken:
                self._give_back()
            self._end_jobs()
            if not self.is_broken:
                self._write_down(deadline - time.monotonic())
            if not self._hierarchy.close(CLOSE_SECONDS):
                log.error("a tier still uses memory that it should have given back")

    @abstractmethod
    def _turn(self) -> bool:
        """Do due work, one copy at most. Return whether work was due. The caller does not hold the
        lock."""

    @abstractmethod
    def _give_back(self) -> None:
        """End the tickets of all jobs. No copy runs during the call."""

    @abstractmethod
    def _end_jobs(self) -> None:
        """End every job with its results so far. The hierarchy may have failed."""

    def _wait_seconds(self) -> float:
        return LOOK_SECONDS

    @property
    def _is_over(self) -> bool:
        return self._closed or self.is_broken

    def _copy_in(self, ticket: StoreTicket, chunks: Iterable[Parts]) -> list[bytes]:
        """Copy the ticket's chunks to their slots. Return the digests of the host's bytes."""
        digests = []
        for key, slot, parts in zip(ticket.keys, ticket.slots, chunks, strict=True):
            target, at = self._slab.buffer(slot), 0
            hasher = self._tagger.create_hasher(key)
            for part in parts:
                hasher.update(part)
                _copy(part, target[at : at + part.nbytes])
                at += part.nbytes
            digests.append(hasher.digest())
        return digests

    def _end_store(self, ticket: StoreTicket, digests: Sequence[bytes]) -> None:
        """End a store whose bytes are in the slab. Must be called under the lock."""
        self._hierarchy.end_store(ticket, True, digests=digests)

    def _copy_out(
        self, ticket: LoadTicket, proofs: Sequence[Proof | None], chunks: Iterable[Parts]
    ) -> Copied:
        """Copy chunks to the host and check the bytes. Chunks without slots are missing."""
        copied = Copied([], [])
        wanted = []
        for key, slot, proof, parts in zip(ticket.keys, ticket.slots, proofs, chunks, strict=True):
            if slot is None or proof is None:
                copied.missing.append(key)
            else:
                wanted.append(_Arrived(key, slot, proof, parts))
        # The host waits for these bytes, and a single thread cannot use the full memory bandwidth.
        num_shares = min(COPY_THREADS, len(wanted) * self._hierarchy.block_bytes // SHARE_BYTES)
        if num_shares < 2:
            copied.damaged.extend(self._bring_some(wanted))
            return copied
        shares = [wanted[i::num_shares] for i in range(num_shares)]
        others = [self._helpers.submit(self._bring_some, share) for share in shares[1:]]
        try:
            copied.damaged.extend(self._bring_some(shares[0]))
        finally:
            # The host may reuse its memory after an error, so all copies must have ended.
            wait(others)
        for other in others:
            copied.damaged.extend(other.result())
        return copied

    def _bring_some(self, arrived: Iterable[_Arrived]) -> list[bytes]:
        """Copy chunks to the host. Return the keys of chunks whose bytes have another digest."""
        damaged = []
        for key, slot, proof, parts in arrived:
            source, at = self._slab.buffer(slot), 0
            hasher = self._tagger.create_hasher(key)
            for part in parts:
                _copy(source[at : at + part.nbytes], part)
                hasher.update(part)
                at += part.nbytes
            if hasher.digest() != proof.digest:
                damaged.append(key)
        return damaged

    def _end_load(self, ticket: LoadTicket, copied: Copied) -> None:
        """End a load after its copy. Must be called under the lock."""
        self._hierarchy.end_load(ticket)
        damaged = copied.damaged
        if damaged:
            log.error("%d chunks were damaged in memory; they are misses", len(damaged))
            self.damaged += len(damaged)
            self._hierarchy.forget_blocks(damaged)
        self._failed.add([*copied.missing, *damaged])

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wakeup.wait(self._wait_seconds())
                self._wakeup.clear()
                while not self._closed and self._turn():
                    pass
        except Exception:
            log.exception("StrataKV's tiers stop; everything is %s from now on", self.THEN)
            with self.lock:
                self.is_broken = True
                self._end_jobs()

    def _write_down(self, seconds: float) -> None:
        if not self._hierarchy.flush(max(0.0, seconds)):
            log.warning("not every chunk could be written down in time; those are lost")


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes without the interpreter's lock; a slice assignment would hold it."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
