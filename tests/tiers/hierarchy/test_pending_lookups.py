# SPDX-License-Identifier: Apache-2.0
"""Stores that must ask elsewhere are asked once a prompt is queued, and a look-up says of its first
unknown block whether an answer is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierBusy, TierError
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.testing.memory_store import MemoryStore

from ..rig import LAYOUT, content, keys


class FarStore(MemoryStore):
    """Says PENDING of what it was asked for, until the test lets the question end."""

    is_shared = True

    def __init__(self, name: str = "remote") -> None:
        super().__init__(LAYOUT, 100 * LAYOUT.page_bytes, name=name)
        self.there: set[bytes] = set()
        self.known: set[bytes] = set()
        self.asked: list[tuple[list[bytes], Future[None]]] = []
        self.fails: Exception | None = None

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        open_now = {key for of, future in self.asked if not future.done() for key in of}
        return [
            Answer.HIT
            if key in self.known and key in self.there
            else Answer.PENDING
            if key in open_now
            else Answer.MISS
            for key in keys
        ]

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        if self.fails is not None:
            raise self.fails
        new = [key for key in keys if key not in self.known]
        if not new:
            return None
        self.asked.append((new, Future()))
        return self.asked[-1][1]

    def answer(self, error: Exception | None = None) -> None:
        """End the oldest open question."""
        of, future = next(each for each in self.asked if not each[1].done())
        if error is None:
            self.known.update(of)
            future.set_result(None)
        else:
            future.set_exception(error)


@pytest.fixture
def far() -> FarStore:
    return FarStore()


@pytest.fixture
def make() -> Iterator[Callable[..., Hierarchy]]:
    """A hierarchy over the given stores; `woken` counts wake-ups."""
    made: list[Hierarchy] = []

    def make(*stores: MemoryStore, woken: list[None] | None = None) -> Hierarchy:
        slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes)
        wakes = [] if woken is None else woken
        made.append(Hierarchy(slab, stores, wakeup=lambda: wakes.append(None)))
        return made[-1]

    yield make
    for hierarchy in made:
        assert hierarchy.close(1.0)


def test_a_look_up_says_that_an_answer_is_coming(
    far: FarStore, make: Callable[..., Hierarchy]
) -> None:
    woken: list[None] = []
    hierarchy = make(far, woken=woken)
    wanted = keys(1, 2, 3)
    far.there.update(wanted[:2])
    assert not hierarchy.find_prefix(wanted).asked, "nobody has asked"
    assert hierarchy.prefetch_lookup(wanted)
    prefix = hierarchy.find_prefix(wanted)
    assert (prefix.tiers, prefix.asked, prefix.pending) == ([], True, False)
    version = hierarchy.version
    far.answer()
    assert woken, "whoever waits for it is woken"
    assert hierarchy.poll()
    assert hierarchy.version != version
    prefix = hierarchy.find_prefix(wanted)
    assert (prefix.tiers, prefix.asked) == (["remote"] * 2, False)
    assert not hierarchy.prefetch_lookup(wanted), "it is known by now"


def test_only_the_first_unknown_block_counts(far: FarStore, make: Callable[..., Hierarchy]) -> None:
    hierarchy = make(far)
    far.asked.append((keys(3), Future()))
    hierarchy.prefetch_lookup(keys(9))
    assert not hierarchy.find_prefix(keys(1, 2, 3)).asked, (
        "the first is a miss, whatever comes later"
    )
    far.answer()
    far.answer()


def test_what_a_nearer_tier_has_is_not_waited_for(
    far: FarStore, make: Callable[..., Hierarchy]
) -> None:
    near = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    buffers = [memoryview(bytearray(content(key))) for key in keys(1)]
    near.store(keys(1), buffers).result(0)
    hierarchy = make(near, far)
    assert hierarchy.prefetch_lookup(keys(1, 2))
    prefix = hierarchy.find_prefix(keys(1, 2))
    assert (prefix.tiers, prefix.asked) == (["ssd"], True)
    far.answer()


def test_a_pending_of_nobodys_question_is_a_miss(
    far: FarStore, make: Callable[..., Hierarchy]
) -> None:
    """Such as of a block that is being stored there: nothing would wake whoever waited for it."""
    hierarchy = make(far)
    far.asked.append((keys(1), Future()))  # not asked through the hierarchy
    assert far.lookup(keys(1)) == [Answer.PENDING]
    prefix = hierarchy.find_prefix(keys(1))
    assert (prefix.tiers, prefix.asked) == ([], False)
    far.answer()


def test_a_question_that_fails_is_a_miss_and_counted(
    far: FarStore, make: Callable[..., Hierarchy]
) -> None:
    woken: list[None] = []
    hierarchy = make(far, woken=woken)
    assert hierarchy.prefetch_lookup(keys(1))
    far.answer(TierError("no answer in time"))
    assert woken
    hierarchy.poll()
    prefix = hierarchy.find_prefix(keys(1))
    assert (prefix.tiers, prefix.asked) == ([], False)
    assert sum(hierarchy.stats()["remote"].errors.values()) == 1


def test_a_question_that_was_given_up_ends_too(
    far: FarStore, make: Callable[..., Hierarchy]
) -> None:
    hierarchy = make(far)
    assert hierarchy.prefetch_lookup(keys(1))
    far.asked[0][1].cancel()
    hierarchy.poll()
    assert not hierarchy.find_prefix(keys(1)).asked


@pytest.mark.parametrize(
    "error", [TierBusy("full"), OSError("broken"), ValueError("a fault of ours")]
)
def test_a_store_that_cannot_ask_costs_nothing(
    far: FarStore, make: Callable[..., Hierarchy], error: Exception
) -> None:
    far.fails = error
    other = FarStore("other")
    hierarchy = make(far, other)
    assert hierarchy.prefetch_lookup(keys(1)), "the other is asked all the same"
    assert sum(hierarchy.stats()["remote"].errors.values()) == 1
    other.answer()


def test_several_questions_at_a_time(far: FarStore, make: Callable[..., Hierarchy]) -> None:
    hierarchy = make(far)
    far.there.update(keys(1, 2))
    assert hierarchy.prefetch_lookup(keys(1)) and hierarchy.prefetch_lookup(keys(2))
    far.answer()
    hierarchy.poll()
    assert hierarchy.find_prefix(keys(1)).tiers == ["remote"]
    assert hierarchy.find_prefix(keys(2)).asked, "its own is still open"
    far.answer()
    hierarchy.poll()
    assert hierarchy.find_prefix(keys(2)).tiers == ["remote"]


def test_an_answer_that_comes_when_all_is_closed(far: FarStore) -> None:
    slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes)
    hierarchy = Hierarchy(slab, [far], wakeup=lambda: None)
    assert hierarchy.prefetch_lookup(keys(1))
    assert hierarchy.close(1.0)
    far.answer()


def test_stores_that_know_all_are_asked_nothing(make: Callable[..., Hierarchy]) -> None:
    hierarchy = make(MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd"))
    assert not hierarchy.prefetch_lookup(keys(1, 2))
    assert not make().prefetch_lookup(keys(1))
