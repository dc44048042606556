# SPDX-License-Identifier: Apache-2.0
"""TenantStore: the blocks of one tenant, in a separate slab and stores, under salted keys.

Any thread may call a tenant store. Only one thread at a time may use its hierarchy, so each call
takes a lock. The lock is not held while bytes are read, copied or hashed.

    begin_load → wait_loaded → (bytes go out) → end_load   blocks stay pinned in between
    begin_store → (bytes come in, checked) → end_store     every later look-up finds them
                └ (the writer is late) → abandon_store     slots stay unused until the writer ends

Callers copy blocks into and out of `buffer(slot)`. Methods take the keys of clients; blocks are
stored under salted keys. Only engines make and compare tags; the store keeps a block's tag with the
block, in memory and on the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence

from ..admission import AdmissionFilter, AdmitAll
from ..base import Answer, StoreTier, TierStats
from ..errors import TierClosed
from ..hierarchy.hierarchy import Hierarchy
from ..hierarchy.hierarchy_options import HierarchyOptions
from ..slab.cpu_slab import CpuSlab
from ..tag import Proof, Proofs, payload_digest
from ..wire.frames import State
from ..wire.status import TooMuch
from .key_salt import KeySalt
from .leases import MAX_LEASES, Lease, Leases, PinnedBlocks, ReadLease, WriteLease
from .served_store import Listener, ServedStore

log = logging.getLogger(__name__)

# The time for a disk to record deletions. The time is shorter than a client's wait for the answer
# (`RemoteSettings.store_seconds`), after which the client marks the server as down.
FORGET_SECONDS = 3.0
# The share of the slab that leases by gRPC may hold; other slots are left to stores and loads.
LEASED_SHARE = 0.5
KEEPER_FAILED = "keeper"  # the key in the slab's `TierStats.errors`
_KEEPER_PAUSES = (0.01, 0.1, 1.0)  # seconds, by the keeper's failures in a row

SWEPT_BLOCKS = 1024  # removed blocks whose slots are freed at once, under the lock


def _states_of(answers: Sequence[Answer]) -> list[State]:
    """Convert answers to states, by comparisons, which are faster than hashing each Answer."""
    hit, miss = Answer.HIT, Answer.MISS
    here, none, coming = State.HIT, State.MISS, State.PENDING
    return [here if each is hit else none if each is miss else coming for each in answers]


class TenantStore(ServedStore):
    """The slab of one tenant and the stores below it. `close` closes them."""

    def __init__(
        self,
        slab: CpuSlab,
        stores: Sequence[StoreTier],
        salt: KeySalt,
        *,
        admission: AdmissionFilter | None = None,
        max_leases: int = MAX_LEASES,
    ) -> None:
        self.layout = slab.layout
        self.num_slots = slab.num_slots
        self._slab = slab
        self._stores = list(stores)
        self._salt = salt
        self._changed = threading.Condition()
        self._woken = threading.Event()
        admission = AdmitAll() if admission is None else admission
        options = HierarchyOptions(admission=admission)
        self._hierarchy = Hierarchy(slab, stores, wakeup=self._woken.set, options=options)
        # A server gets no prompts, so a filter that learns from prompts gets look-ups instead.
        self._observes = admission.learns
        self._pins = PinnedBlocks(slab)
        self._leases = Leases[list[bytes]](self._lease_expired, max_leases)
        self._listening = threading.Lock()  # held to replace `_listeners`
        self._listeners: list[Listener] = []
        self._corrupt_blocks = 0
        self._keeper_failures = 0
        self._closed = False
        self._keeper = threading.Thread(
            target=self._keep, name="stratakv-tenant-store", daemon=True
        )
        self._keeper.start()

    @property
    def corrupt_blocks(self) -> int:
        return self._corrupt_blocks

    @property
    def memory_fd(self) -> int:
        return self._slab.fd

    def try_hold(self) -> bool:
        return self._changed.acquire(blocking=False)

    def let_go(self) -> None:
        self._changed.release()

    def buffer(self, slot: int) -> memoryview:
        return self._slab.buffer(slot)[: self.page_bytes]

    def buffers(self, slots: Sequence[int]) -> list[memoryview]:
        memory, size, page_bytes = self._slab.memory(), self.layout.slot_bytes, self.page_bytes
        starts = [slot * size for slot in slots]
        return [memory[start : start + page_bytes] for start in starts]

    def lookup(self, keys: Sequence[bytes], *, asked: bool = False) -> list[State]:
        stored = self._salt.salt_keys(keys)
        with self._changed:
            self._check_open()
            if asked and self._observes:
                self._hierarchy.announce_prompt(stored)
            answers = self._hierarchy.lookup(stored)
        return _states_of(answers)

    def begin_load(self, keys: Sequence[bytes]) -> ReadLease:
        stored = self._salt.salt_keys(keys)
        with self._changed:
            self._check_open()
            known = [
                key
                for key, answer in zip(stored, self._hierarchy.lookup(stored), strict=True)
                if answer is Answer.HIT
            ]
            # A repeated key is read once.
            ticket = self._hierarchy.begin_load(list(dict.fromkeys(known)))
            self._hierarchy.poll()
        return ReadLease(list(keys), [None] * len(keys), stored, ticket)

    def wait_loaded(self, read_lease: ReadLease, deadline: float) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not read_lease.ticket.waiting or self._closed, deadline - time.monotonic()
            )
            if read_lease.ticket.waiting:
                return
            places = dict(zip(read_lease.ticket.keys, read_lease.ticket.slots, strict=True))
            read_lease.slots = [places.get(key) for key in read_lease.stored]

    def end_load(self, read_lease: ReadLease) -> None:
        with self._changed:
            if not self._closed:
                self._hierarchy.end_load(read_lease.ticket)
                self._hierarchy.poll()

    def proofs(self, read_lease: ReadLease) -> list[Proof | None]:
        proofs = self._slab.proofs(read_lease.stored)  # the slots are pinned
        return [
            None if slot is None else proof
            for slot, proof in zip(read_lease.slots, proofs, strict=True)
        ]

    def begin_store(self, keys: Sequence[bytes]) -> WriteLease:
        stored = self._salt.salt_keys(keys)
        with self._changed:
            self._check_open()
            answers = dict(zip(stored, self._hierarchy.lookup(stored), strict=True))
            missing = [key for key, answer in answers.items() if answer is Answer.MISS]
            ticket = self._hierarchy.begin_store(missing)
            self._hierarchy.poll()
        slot_of = dict(zip(ticket.keys, ticket.slots, strict=True))
        states, slots = [], []
        for key in stored:
            slot = slot_of.pop(key, None)
            slots.append(slot)
            if slot is not None:
                states.append(State.WANTED)
                answers[key] = Answer.PENDING  # for a repetition of the key
            elif answers[key] is Answer.HIT:
                states.append(State.KEPT)
            else:
                pending = answers[key] is Answer.PENDING
                states.append(State.PENDING if pending else State.NO_ROOM)
        return WriteLease(list(keys), states, slots, stored, ticket)

    def end_store(
        self, write_lease: WriteLease, proofs: Proofs, aborted: Collection[int] = ()
    ) -> list[State]:
        by_key = {
            key: proof
            for key, slot, proof in zip(write_lease.stored, write_lease.slots, proofs, strict=True)
            if slot is not None and proof is not None
        }
        verdicts = [key in by_key for key in write_lease.ticket.keys]
        with self._changed:
            if self._closed:
                return [State.NO_ROOM] * len(write_lease.keys)
            given = [by_key.get(key) for key in write_lease.ticket.keys]
            self._hierarchy.end_store(write_lease.ticket, verdicts, given)
            self._hierarchy.poll()
            answers = self._hierarchy.lookup(write_lease.stored)
            states = []
            broken_off = frozenset(aborted)
            for index, (stored, state, answer) in enumerate(
                zip(write_lease.stored, write_lease.states, answers, strict=True)
            ):
                if answer is Answer.HIT:
                    states.append(State.KEPT)
                elif state is State.WANTED and stored not in by_key:
                    is_aborted = index in broken_off
                    self.aborted_blocks += is_aborted
                    states.append(State.MISS if is_aborted else State.CORRUPT)
                else:
                    states.append(State.NO_ROOM if state is State.NO_ROOM else State.MISS)
            kept = [
                key
                for key, slot, state in zip(
                    write_lease.keys, write_lease.slots, states, strict=True
                )
                if slot is not None and state is State.KEPT
            ]
            self._corrupt_blocks += states.count(State.CORRUPT)
            for listener in self._listeners:
                listener.stored(kept)
            self._changed.notify_all()
        return states

    def count_expired_lease(self) -> None:
        with self._changed:
            self.expired_leases += 1

    def _lease_expired(self, lease: Lease[list[bytes]]) -> None:
        self.expired_leases += 1
        self._pins.unpin(lease.held)

    def abandon_store(self, write_lease: WriteLease) -> list[int]:
        with self._changed:
            if self._closed:
                return []
            self.late_writers += 1
            slots = self._hierarchy.withhold(write_lease.ticket)
            self._changed.notify_all()
            return slots

    def restore_slots(self, slots: Sequence[int]) -> None:
        with self._changed:
            if not self._closed:
                self._hierarchy.restore(slots)

    def check_digests(self, write_lease: WriteLease, proofs: Proofs) -> list[Proof | None]:
        return [
            proof
            if slot is not None
            and proof is not None
            and proof.digest == payload_digest(self.buffer(slot))
            else None
            for slot, proof in zip(write_lease.slots, proofs, strict=True)
        ]

    def pin(
        self, keys: Sequence[bytes], seconds: float, deadline: float, owner: str = ""
    ) -> Lease[list[bytes]]:
        """See ServedStore. Leases may hold up to LEASED_SHARE of the slab."""
        with self._changed:
            self._check_open()
            self._leases.check_room(owner)
            new = sum(key not in self._pins for key in self._salt.salt_keys(keys))
            if len(self._pins) + new > LEASED_SHARE * self._slab.num_slots:
                raise TooMuch(
                    f"leases hold {len(self._pins)} of {self._slab.num_slots} blocks already, and "
                    f"{new} more would leave too few for others; load them instead"
                )
        read_lease = self.begin_load(keys)
        try:
            self.wait_loaded(read_lease, deadline)
            with self._changed:
                self._check_open()
                lease = self._leases.grant_lease([], seconds, owner)
                lease.held += self._pins.pin(read_lease.stored)
                if not lease.held:
                    self._leases.end_lease(lease)
                self._woken.set()  # the keeper must read the new deadline
                return lease
        finally:
            self.end_load(read_lease)

    def unpin(self, number: int, owner: str = "") -> bool:
        with self._changed:
            lease = None if self._closed else self._leases.find_lease(number, owner)
            if lease is not None:
                self._leases.end_lease(lease)
                self._pins.unpin(lease.held)
            return lease is not None

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def touch(self, keys: Sequence[bytes]) -> None:
        stored = self._salt.salt_keys(keys)
        with self._changed:
            self._check_open()
            self._slab.touch(stored)
            for store in self._stores:
                store.touch(stored)

    def drop(self, keys: Sequence[bytes]) -> int:
        stored = self._salt.salt_keys(keys)
        with self._changed:
            self._check_open()
            self._leases.expire()
            before = self._hierarchy.lookup(stored)
            self._hierarchy.forget_blocks([key for key in stored if key not in self._pins])
            self._hierarchy.poll()
            after = self._hierarchy.lookup(stored)
            gone = [
                key
                for key, was, now in zip(keys, before, after, strict=True)
                if was is not Answer.MISS and now is Answer.MISS
            ]
            for listener in self._listeners:
                listener.removed(gone)
        self._wait_forgotten()
        return len(set(gone))

    def clear(self) -> None:
        """See ServedStore. Slots are freed in groups, so that other calls do not wait long."""
        with self._changed:
            self._check_open()
            self._hierarchy.clear(sweep=False)
            for listener in self._listeners:
                listener.cleared()
        while self._sweep():
            time.sleep(0)  # lets a waiting call take the lock
        self._wait_forgotten()

    def _sweep(self) -> bool:
        """Free up to SWEPT_BLOCKS slots of removed blocks. Return whether more may be left."""
        with self._changed:
            return not self._closed and self._hierarchy.sweep(SWEPT_BLOCKS) == SWEPT_BLOCKS

    def subscribe(self, listener: Listener) -> None:
        with self._listening:
            self._listeners = [*self._listeners, listener]

    def unsubscribe(self, listener: Listener) -> None:
        with self._listening:
            self._listeners = [other for other in self._listeners if other is not listener]

    def stats(self) -> dict[str, TierStats]:
        with self._changed:
            stats = self._hierarchy.stats()
        if self._keeper_failures:
            stats[self._slab.name].errors[KEEPER_FAILED] = self._keeper_failures
        return stats

    def close(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            if self._closed:
                return True
            self._hierarchy.flush(max(0.0, timeout_seconds / 2))
            self._closed = True
            self._changed.notify_all()
        self._woken.set()
        self._keeper.join(max(0.0, deadline - time.monotonic()))
        return self._hierarchy.close(max(0.0, deadline - time.monotonic()))

    def _wait_forgotten(self) -> None:
        for store in self._stores:
            if not store.wait_forgotten(FORGET_SECONDS):
                log.warning("what was deleted may come back from the %s tier", store.name)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosed("the tenant store was closed")

    def _keep(self) -> None:
        """Process completions of the stores, and end expired leases. Runs on the keeper thread."""
        failures = 0  # failures in a row
        while not self._closed:
            try:
                self._keep_once()
                failures = 0
            except Exception:  # the keeper must go on: without it no load would end
                log.exception("the keeper of a tenant's blocks failed and goes on")
                self._keeper_failures += 1
                self._woken.set()  # the failed work must be tried again
                time.sleep(_KEEPER_PAUSES[min(failures, len(_KEEPER_PAUSES) - 1)])
                failures += 1

    def _keep_once(self) -> None:
        with self._changed:
            next_deadline = self._leases.next_deadline()
        wait = None if next_deadline is None else max(0.0, next_deadline - time.monotonic())
        self._woken.wait(wait)
        self._woken.clear()
        with self._changed:
            if self._closed:
                return
            self._leases.expire()
            self._hierarchy.poll()
            self._changed.notify_all()
