# SPDX-License-Identifier: Apache-2.0
"""Stores that are asked when a request is queued: who waits for the answer, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import Choice
from stratakv.connector.messages import ConnectorWorkerOutput, MatchKind
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.parts import Parts, StatePieces
from stratakv.tiers.base import Answer
from stratakv.tiers.block import key_suffix, pack_key
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.testing.memory_store import MemoryStore

from ..tiers.hierarchy.prefetching_store import PrefetchingStore
from .test_offload_scheduler import LAYOUT, WAIT_SECONDS, digest, evicted, request

NONE, LOAD, RETRY = MatchKind.NONE, MatchKind.LOAD, MatchKind.RETRY


class Rig:
    """A scheduler side over a slab and a store that asks; other stores may lie between."""

    def __init__(self, *between: MemoryStore, pieces: Sequence[StatePieces] = ()) -> None:
        self.slab = CpuSlab(LAYOUT, 16 * LAYOUT.slot_bytes, populate_threads=1)
        self.store = PrefetchingStore(LAYOUT, 1000 * LAYOUT.page_bytes, name="remote")
        self.signal = CopySignal()
        self.hierarchy = Hierarchy(self.slab, [*between, self.store], wakeup=self.signal.wake)
        self.side = OffloadScheduler(
            ConnectorContext(
                self.hierarchy,
                Parts(LAYOUT.block_size, (None, *pieces)),
                self.signal,
                choice=Choice.LOAD,
            )
        )
        self.woken = threading.Event()
        self.side.set_wakeup(self.woken.set)

    def share(self, *numbers: int) -> None:
        """Another engine has brought these blocks to the store."""
        buffer = memoryview(bytearray(LAYOUT.page_bytes))
        keys = [pack_key(digest(number)) for number in numbers]
        self.store.store(keys, [buffer] * len(keys)).result(0)

    def ask(self, asks: object) -> tuple[int, MatchKind]:
        match = self.side.get_matched_tokens(asks, 0)  # type: ignore[arg-type]
        return match.tokens, match.kind

    def wake(self) -> None:
        assert self.woken.wait(WAIT_SECONDS), "nobody woke the engine"
        self.woken.clear()
        assert self.side.has_pending_work()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    while rig.store.questions:
        rig.store.fail()
    for _ in range(2):  # what was let go ends when it is looked at
        rig.side.has_pending_work()
    assert rig.slab.stats().pinned_blocks == 0
    rig.side.shutdown(WAIT_SECONDS)
    assert not rig.side._lookups.unanswered


def test_a_request_waits_for_the_answer_and_then_loads(rig: Rig) -> None:
    rig.share(1, 2, 3)
    asks = request("a", 1, 2, 3)
    rig.side.request_queued(asks)
    assert [keys for keys, _ in rig.store.questions] == [[pack_key(digest(n)) for n in (1, 2, 3)]]
    assert rig.ask(asks) == (0, RETRY)
    assert not rig.side.has_pending_work(), "an engine that waits for an answer sleeps"
    rig.store.answer()
    rig.wake()
    assert rig.ask(asks) == (12, LOAD)
    rig.side.request_finished("a")


def test_what_was_found_is_read_while_the_request_still_waits(rig: Rig) -> None:
    rig.share(1, 2, 3)
    asks = request("a", 1, 2, 3)
    rig.side.request_queued(asks)
    assert rig.slab.lookup([pack_key(digest(1))]) == [Answer.MISS]
    rig.store.answer()
    assert rig.woken.wait(WAIT_SECONDS)
    assert not rig.side.has_pending_work(), "nobody was told to retry"
    rig.hierarchy.poll()
    assert rig.slab.lookup([pack_key(digest(1))]) == [Answer.HIT]
    assert not rig.side._lookups.unanswered
    rig.side.request_finished("a")


def test_pieces_that_are_asked_for_are_awaited_whatever_else_happens() -> None:
    """The first piece of states is asked for with the blocks, the others when it was found. A
    look-up that comes before their answer, for any other reason, does not take them for missing."""
    rig = Rig(pieces=[StatePieces(3)])
    keys = [digest(2) + key_suffix(1 + piece, 0, 1) for piece in range(3)]
    rig.store.store(keys, [memoryview(bytearray(LAYOUT.page_bytes))] * 3).result(0)
    rig.share(1, 2)
    asks = request("a", 1, 2)
    rig.side.request_queued(asks)
    assert rig.ask(asks) == (0, RETRY)
    rig.store.answer()
    rig.wake()
    assert rig.ask(asks) == (0, RETRY)
    assert [asked for asked, _ in rig.store.questions] == [keys[1:]]
    for _ in range(2):
        rig.hierarchy._mailbox.version += 1  # a block of another request has come
        assert rig.ask(asks) == (0, RETRY)
    rig.store.answer()
    rig.wake()
    assert rig.ask(asks) == (8, LOAD)
    rig.side.request_finished("a")
    rig.side.shutdown(WAIT_SECONDS)


def test_a_store_without_it_lets_the_request_compute(rig: Rig) -> None:
    asks = request("a", 1, 2)
    rig.side.request_queued(asks)
    assert rig.ask(asks) == (0, RETRY)
    rig.store.answer()
    rig.wake()
    assert rig.ask(asks) == (0, NONE)


def test_no_answer_is_a_counted_miss(rig: Rig) -> None:
    rig.share(1, 2)
    asks = request("a", 1, 2)
    rig.side.request_queued(asks)
    assert rig.ask(asks) == (0, RETRY)
    rig.store.fail()
    rig.wake()
    assert rig.ask(asks) == (0, NONE)
    assert sum(rig.hierarchy.stats()["remote"].errors.values()) == 1


def test_what_is_near_is_not_asked_for(rig: Rig) -> None:
    stores = rig.side.build_meta([evicted(2, 2), evicted(1, 1)])
    rig.signal.note_ended(rig.signal.ended + 1)
    rig.side.update_from_worker(ConnectorWorkerOutput([stores.stores[0].job_id]))
    rig.side.request_queued(request("a", 1, 2))
    assert rig.store.questions == []
    rig.side.request_queued(request("b", 1, 2, 3))
    assert [keys for keys, _ in rig.store.questions] == [[pack_key(digest(3))]]
    # What it has already it could load; but all of it at once is better, and the answer is near.
    assert rig.ask(request("b", 1, 2, 3)) == (0, RETRY)
    rig.store.answer()
    rig.wake()
    assert rig.ask(request("b", 1, 2, 3)) == (8, LOAD)
    rig.side.request_finished("b")


def test_two_who_ask_for_the_same_wait_for_one_answer(rig: Rig) -> None:
    rig.share(1, 2)
    first, second = request("a", 1, 2), request("b", 1, 2)
    rig.side.request_queued(first)
    rig.side.request_queued(second)
    assert len(rig.store.questions) == 1
    assert rig.ask(first) == rig.ask(second) == (0, RETRY)
    rig.store.answer()
    rig.wake()
    assert rig.ask(first) == rig.ask(second) == (8, LOAD)
    rig.side.request_finished("a")
    rig.side.request_finished("b")


def test_who_needs_more_asks_for_the_rest(rig: Rig) -> None:
    rig.share(1, 2, 3)
    first, second = request("a", 1), request("b", 1, 2, 3)
    rig.side.request_queued(first)
    rig.side.request_queued(second)
    assert [len(keys) for keys, _ in rig.store.questions] == [1, 2]
    assert rig.ask(first) == rig.ask(second) == (0, RETRY)
    rig.store.answer()
    rig.wake()
    assert rig.ask(first) == (4, LOAD)
    assert rig.ask(second) == (0, RETRY), "half of an answer"
    rig.store.answer()
    rig.wake()
    assert rig.ask(second) == (12, LOAD)
    rig.side.request_finished("a")
    rig.side.request_finished("b")


def test_a_request_that_is_gone_waits_for_nothing(rig: Rig) -> None:
    rig.share(1, 2)
    rig.side.request_queued(request("a", 1, 2))
    rig.side.request_finished("a")
    assert not rig.side._lookups.unanswered
    rig.store.answer()
    rig.hierarchy.poll()
    assert not rig.side.has_pending_work()
    assert rig.slab.lookup([pack_key(digest(1))]) == [Answer.MISS], "read for nobody"


def test_everything_is_forgotten_while_a_question_is_open(rig: Rig) -> None:
    rig.share(1)
    asks = request("a", 1)
    rig.side.request_queued(asks)
    rig.side.reset()
    assert not rig.side._lookups.unanswered
    rig.store.answer()
    rig.hierarchy.poll()
    assert rig.ask(asks) == (0, NONE)


def test_a_store_that_breaks_when_it_is_asked_is_passed_by(rig: Rig) -> None:
    def broken(_keys: object) -> None:
        raise RuntimeError("broken")

    rig.store.prefetch_lookup = broken  # type: ignore[assignment, method-assign]
    asks = request("a", 1, 2)
    rig.side.request_queued(asks)
    assert rig.ask(asks) == (0, NONE)
    assert sum(rig.hierarchy.stats()["remote"].errors.values()) == 1


def test_who_is_shared() -> None:
    rig = Rig(MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd"))
    assert rig.hierarchy.is_shared
    assert rig.side.wants_all
    rig.side.shutdown(WAIT_SECONDS)
    slab = CpuSlab(LAYOUT, 16 * LAYOUT.slot_bytes, populate_threads=1)
    store = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    alone = Hierarchy(slab, [store], wakeup=lambda: None)
    assert not alone.is_shared
    assert not alone.prefetch_lookup([pack_key(digest(1))]), "it knows without asking"
    assert alone.close(WAIT_SECONDS)


def test_only_what_a_nearer_store_lacks_is_waited_for() -> None:
    near = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    rig = Rig(near)
    buffer = memoryview(bytearray(LAYOUT.page_bytes))
    near.store([pack_key(digest(1))], [buffer]).result(0)
    asks = request("a", 1)
    rig.side.request_queued(asks)
    assert rig.store.questions == []
    assert rig.ask(asks)[1] is LOAD
    rig.side.request_finished("a")
    rig.side.shutdown(WAIT_SECONDS)
