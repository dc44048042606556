# SPDX-License-Identifier: Apache-2.0
"""Who waits for a prompt that another engine computes, for how long, and how that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import UNMEASURED_SECONDS, Choice
from stratakv.connector.costs.rates import PrefillRate
from stratakv.connector.messages import ConnectorWorkerOutput, Elsewhere, MatchKind
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.parts import FirstSeen, Parts
from stratakv.connector.prefill_decode import followed_prompts as following
from stratakv.connector.prefill_decode import prefill_waits
from stratakv.connector.prefill_decode.prefill_waits import ALWAYS_SECONDS, MOST_WAITING
from stratakv.connector.prefill_decode.wait_limit import (
    GRACE_SECONDS,
    LOOK_UP_SECONDS,
    MOST_RATIO,
    MOST_SECONDS,
    End,
    WaitLimit,
)
from stratakv.engine.models.layer_attention import window
from stratakv.tiers.block import pack_key
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.slab.cpu_slab import CpuSlab

from ...tiers.hierarchy.prefetching_store import PrefetchingStore
from ..scheduler_rig import LAYOUT, WAIT_SECONDS, FakeRequest, digest, evicted, request

PRICE = 0.01  # seconds to compute a block here, in the tests of the rule
COUNT = 100  # blocks
WHOLE = COUNT * PRICE


def limit_of(price: float | None = PRICE, unknown: float = 0.5, **before: Any) -> WaitLimit:
    def compute_seconds(start: int, end: int) -> float | None:
        return None if price is None else (end - start) * price

    return WaitLimit(COUNT, 0.0, compute_seconds, unknown, **before)


def wait_for(limit: WaitLimit, arrivals: Sequence[tuple[float, int]]) -> tuple[End, float, int]:
    """How a wait ends and when, and the blocks that are there by then. `arrivals`: moments, and the
    leading blocks that are there from then on."""
    for moment, num_there in arrivals:
        if moment >= limit.ends_at():
            break
        limit.record_arrivals(num_there, moment)
        end = limit.decide_end(moment)
        if end is not None:
            return end, moment, limit.num_there
    now = limit.ends_at()
    end = limit.decide_end(now)
    assert end is not None
    return end, now, limit.num_there


def steps(seconds: float, num_blocks: int, start: float = 0.0) -> list[tuple[float, int]]:
    """Steps of an engine, so long and so large each, one after the other."""
    count = -(-COUNT // num_blocks)
    return [(start + i * seconds, min(COUNT, i * num_blocks)) for i in range(1, count + 1)]


@pytest.mark.parametrize("num_blocks", [1, 7, 50, 100])
def test_an_engine_as_quick_as_this_one_is_waited_for(num_blocks: int) -> None:
    arrivals = steps(1.1 * num_blocks * PRICE, num_blocks, start=0.03)
    end, now, _ = wait_for(limit_of(), arrivals)
    assert (end, now) == (End.WHOLE, arrivals[-1][0])


def test_a_quick_one_may_begin_late() -> None:
    """It has others to compute first."""
    assert wait_for(limit_of(), steps(0.1, 25, start=1.2 * WHOLE))[0] is End.WHOLE


def test_where_nothing_comes_the_wait_is_not_much_longer_than_computing() -> None:
    end, now, _ = wait_for(limit_of(), [])
    assert (end, now) == (End.STALLED, pytest.approx(MOST_RATIO * WHOLE + GRACE_SECONDS))


def test_a_slow_one_is_not_waited_for_once_that_is_known() -> None:
    arrivals = steps(2 * 25 * PRICE, 25)
    assert wait_for(limit_of(), arrivals) == (End.SLOW, arrivals[1][0], 50)


def test_one_that_stops_is_given_twice_its_longest_step() -> None:
    arrivals = steps(10 * PRICE, 10)[:2]
    end, now, num_there = wait_for(limit_of(), arrivals)
    assert (end, num_there) == (End.STALLED, 20)
    assert now == pytest.approx(arrivals[-1][0] + GRACE_SECONDS + 2 * 10 * PRICE)


def test_parts_of_one_step_do_not_make_the_next_one_late() -> None:
    """A step's blocks come in pieces, close together; then nothing comes for a step."""
    begun_before = [(0.001, 20), (0.002, 40), (0.003, 50), (0.45, 75), (0.451, 100)]
    assert wait_for(limit_of(), begun_before)[0] is End.WHOLE


def test_before_the_end_the_wait_is_no_longer_than_computing_what_is_missing() -> None:
    end, now, _ = wait_for(limit_of(), [(1.0, 98)])
    assert (end, now) == (End.STALLED, pytest.approx(1.0 + GRACE_SECONDS + 2 * MOST_RATIO * PRICE))


def test_without_a_price_nothing_may_come_for_a_fixed_time() -> None:
    assert wait_for(limit_of(None), [])[:2] == (End.STALLED, 0.5)
    slow = [(0.4 * i, i) for i in range(1, COUNT)]
    assert wait_for(limit_of(None), slow)[:2] == (End.STALLED, pytest.approx(99 * 0.4 + 0.5))


def test_nobody_waits_for_ever() -> None:
    trickle = [(0.9 * i, i) for i in range(1, COUNT)]
    assert wait_for(limit_of(None, unknown=1.0), trickle)[:2] == (End.CAPPED, MOST_SECONDS)


def test_blocks_that_came_just_before_promise_as_many_more() -> None:
    end, now, _ = wait_for(limit_of(num_before=10, last=-0.05), [])
    assert (end, now) == (End.STALLED, pytest.approx(-0.05 + GRACE_SECONDS + 10 * PRICE))
    assert limit_of(num_before=10, last=-0.3).decide_end(0.0) is End.STALLED, "that is over"
    assert wait_for(limit_of(num_before=10, last=-0.05), steps(0.12, 10))[0] is End.WHOLE


@given(st.lists(st.tuples(st.floats(1e-3, 2.0), st.integers(1, COUNT)), max_size=40))
def test_whatever_comes_when_a_wait_is_bounded_by_what_computing_takes(
    lots: list[tuple[float, int]],
) -> None:
    arrivals, moment, num_there = [], 0.0, 0
    for seconds, num_blocks in lots:
        moment, num_there = moment + seconds, min(COUNT, num_there + num_blocks)
        arrivals.append((moment, num_there))
    end, now, num_there = wait_for(limit_of(), arrivals)
    assert now <= 2 * MOST_RATIO * WHOLE + 2 * GRACE_SECONDS + 1e-6
    assert (end is End.WHOLE) == (num_there == COUNT)


# The connector's side of it, over a slab and a store that others fill.


class WatchedStore(PrefetchingStore):
    """Tells what comes, and can be away."""

    is_away = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.news: list[Callable[[Sequence[bytes]], None]] = []

    @property
    def is_up(self) -> bool:
        return not self.is_away

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        self.news.append(news)
        return True


class Rig:
    """A scheduler side in the hands of a test, with a clock that stands still."""

    def __init__(
        self, choice: Choice, price: float | None, seen: Sequence[FirstSeen | None] = (None,)
    ) -> None:
        self.now = 1000.0
        self.slab = CpuSlab(LAYOUT, 64 * LAYOUT.slot_bytes, populate_threads=1)
        self.store = WatchedStore(LAYOUT, 1000 * LAYOUT.page_bytes, name="remote")
        self.signal = CopySignal()
        self.hierarchy = Hierarchy(self.slab, [self.store], wakeup=self.signal.wake)
        prefill = PrefillRate()
        if price is not None:
            prefill.record_prefill(1, 0, price)
        self.side = OffloadScheduler(
            ConnectorContext(
                self.hierarchy,
                Parts(LAYOUT.block_size, seen),
                self.signal,
                choice=choice,
                prefill=prefill,
            ),
        )
        self.side.prompts_elsewhere.expect_prompts()
        self.woken = threading.Event()
        self.side.set_wakeup(self.woken.set)

    def share(self, *numbers: int, tells: bool = True, group: int = 0) -> None:
        """Another engine has brought these blocks to the store."""
        buffer = memoryview(bytearray(LAYOUT.page_bytes))
        keys = [pack_key(digest(number), group) for number in numbers]
        self.store.store(keys, [buffer] * len(keys)).result(0)
        if tells:
            self.store._known.update(keys)
            for news in self.store.news:
                news(keys)

    def queue(self, asks: FakeRequest, elsewhere: Elsewhere) -> None:
        self.side.request_queued(asks)
        self.side.prompts_elsewhere.await_prefill(asks.request_id, elsewhere)
        self.answer()

    def answer(self) -> None:
        while self.store.questions:
            self.store.answer()
        self.side.has_pending_work()

    def ask(self, asks: FakeRequest) -> tuple[int, MatchKind]:
        match = self.side.get_matched_tokens(asks, 0)
        return match.tokens, match.kind

    def waits(self) -> dict[str, int]:
        """How many waits have ended in each way."""
        ended: dict[str, int] = self.side._counters.prefill_waits
        return {end: count for end, count in ended.items() if count}


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(choice: Choice = Choice.AUTO, price: float | None = 0.05, **fields: Any) -> Rig:
        rig = Rig(choice, price, **fields)
        clock = SimpleNamespace(monotonic=lambda: rig.now)
        for module in (prefill_waits, following):
            monkeypatch.setattr(module, "time", clock)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        while rig.store.questions:
            rig.store.fail()
        for _ in range(2):
            rig.side.has_pending_work()
        assert not rig.side.awaiting_prefill and not len(rig.side.prompts_elsewhere.follows.prompts)
        assert rig.slab.stats().pinned_blocks == 0
        rig.side.shutdown(WAIT_SECONDS)


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


ASKS = request("a", *range(1, 11))  # 10 blocks of 4 tokens, and a token
NONE, LOAD, RETRY = MatchKind.NONE, MatchKind.LOAD, MatchKind.RETRY


def test_a_request_waits_until_all_has_come_and_finds_it_in_the_slab(rig: Rig) -> None:
    rig.queue(ASKS, Elsewhere.TOLD)
    assert rig.ask(ASKS) == (0, RETRY)
    assert list(rig.side.awaiting_prefill) == ["a"]
    for numbers in (range(1, 5), range(5, 9), range(9, 11)):
        rig.now += 0.3
        assert list(rig.side.awaiting_prefill) == ["a"]
        rig.share(*numbers)
        assert rig.woken.wait(WAIT_SECONDS)
        is_due = rig.side.has_pending_work()
    assert is_due, "it is to be asked again"
    assert rig.waits() == {"whole": 1}
    assert rig.ask(ASKS) == (40, LOAD)
    rig.hierarchy.poll()  # the last ones have been read
    assert (
        rig.hierarchy.find_prefix([pack_key(digest(n)) for n in range(1, 11)]).tiers == ["cpu"] * 10
    )
    assert rig.side._counters.prefill_wait_seconds.total == pytest.approx(0.9)
    rig.side.request_finished("a")


def test_where_it_ends_early_what_has_come_is_loaded(rig: Rig) -> None:
    rig.queue(ASKS, Elsewhere.TOLD)
    rig.ask(ASKS)
    rig.share(1, 2, 3)
    rig.side.has_pending_work()
    assert list(rig.side.awaiting_prefill) == ["a"]
    rig.now += 10
    assert rig.side.has_pending_work()
    assert rig.waits() == {"stalled": 1}
    assert rig.ask(ASKS) == (12, LOAD)
    rig.side.request_finished("a")
    rig.share(4)
    assert rig.waits() == {"stalled": 1}


def test_what_a_window_left_behind_is_not_waited_for(make_rig: Callable[..., Rig]) -> None:
    """Whoever computes found the beginning in its pool, where only the end of its window was."""
    rig = make_rig(seen=(None, window(6).first_seen))
    rig.queue(ASKS, Elsewhere.TOLD)
    assert rig.ask(ASKS) == (0, RETRY)
    for numbers, in_window in ((range(1, 6), [4, 5]), (range(6, 11), [8, 9, 10])):
        assert list(rig.side.awaiting_prefill) == ["a"]
        rig.now += 0.3
        rig.share(*in_window, group=1)
        rig.share(*numbers)
        rig.answer()
    assert rig.waits() == {"whole": 1}
    assert rig.ask(ASKS) == (40, LOAD)
    rig.side.request_finished("a")


def test_a_request_waits_once(rig: Rig) -> None:
    rig.queue(ASKS, Elsewhere.TOLD)
    rig.ask(ASKS)
    rig.now += 10
    rig.side.has_pending_work()
    assert [rig.ask(ASKS) for _ in range(3)] == [(0, NONE)] * 3
    rig.side.request_finished("a")


@pytest.mark.parametrize("elsewhere", [Elsewhere.NO, Elsewhere.PERHAPS])
def test_without_evidence_nobody_waits(rig: Rig, elsewhere: Elsewhere) -> None:
    rig.share(1, 2, 3, tells=False)  # long ago
    rig.queue(ASKS, elsewhere)
    assert rig.ask(ASKS) == (12, LOAD)
    rig.side.request_finished("a")


def test_nobody_waits_for_what_is_there(rig: Rig) -> None:
    rig.share(*range(1, 11))
    rig.queue(ASKS, Elsewhere.TOLD)
    assert rig.ask(ASKS) == (40, LOAD)
    rig.side.request_finished("a")


def test_blocks_of_the_prompt_that_have_just_come_are_evidence(rig: Rig) -> None:
    rig.share(1, 2, 3, 4)
    rig.side.has_pending_work()
    rig.now += 0.2
    rig.queue(ASKS, Elsewhere.PERHAPS)
    assert rig.ask(ASKS) == (0, RETRY)
    rig.share(*range(5, 11))
    assert rig.side.has_pending_work()
    assert rig.waits() == {"whole": 1}
    assert rig.ask(ASKS) == (40, LOAD)
    rig.side.request_finished("a")


def test_blocks_that_came_a_while_ago_are_none(rig: Rig) -> None:
    rig.share(1, 2, 3, 4)
    rig.side.has_pending_work()
    rig.now += 4 * 0.05 * 4 + 2 * GRACE_SECONDS  # as long as computing them takes
    rig.queue(ASKS, Elsewhere.PERHAPS)
    assert rig.ask(ASKS) == (16, LOAD)
    rig.side.request_finished("a")


def test_blocks_that_came_one_by_one_are_an_answer_and_not_a_prompt(rig: Rig) -> None:
    for number in (1, 2, 3, 4):
        rig.share(number)
        rig.side.has_pending_work()
        rig.now += 0.5
    rig.queue(ASKS, Elsewhere.PERHAPS)
    assert rig.ask(ASKS) == (16, LOAD)
    rig.side.request_finished("a")


def test_blocks_that_this_engine_stored_are_none(rig: Rig) -> None:
    stores = rig.side.build_meta([evicted(number, number) for number in (4, 3, 2, 1)]).stores
    rig.signal.note_ended(rig.signal.ended + len(stores))
    rig.side.update_from_worker(ConnectorWorkerOutput([job.job_id for job in stores]))
    rig.share(1, 2, 3, 4)  # as the store tells everybody
    rig.queue(ASKS, Elsewhere.PERHAPS)
    assert rig.ask(ASKS) == (16, LOAD)
    rig.side.request_finished("a")


@pytest.mark.parametrize("choice", [Choice.LOAD, Choice.OVERLAP])
def test_always_loading_needs_no_estimates(make_rig: Callable[..., Rig], choice: Choice) -> None:
    rig = make_rig(choice, 1e-6)
    rig.queue(ASKS, Elsewhere.TOLD)
    assert rig.ask(ASKS) == (0, RETRY)
    rig.now += ALWAYS_SECONDS - 0.01
    assert not rig.side.has_pending_work()
    rig.now += 0.01
    assert rig.side.has_pending_work()
    assert rig.waits() == {"stalled": 1}
    rig.side.request_finished("a")


def test_while_nothing_is_measured_the_wait_is_short(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(price=None)
    rig.queue(ASKS, Elsewhere.TOLD)
    assert rig.ask(ASKS) == (0, RETRY)
    rig.now += UNMEASURED_SECONDS
    assert rig.side.has_pending_work()
    assert rig.waits() == {"stalled": 1}
    rig.side.request_finished("a")


def test_short_prompts_are_computed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(price=0.002)
    rig.queue(ASKS, Elsewhere.TOLD)
    assert rig.ask(ASKS) == (0, NONE)
    rig.side.request_finished("a")


def test_what_is_slower_to_load_than_to_compute_is_computed(rig: Rig) -> None:
    rig.side._economics.links["remote"].believe(LAYOUT.page_bytes, 10.0)
    rig.queue(ASKS, Elsewhere.TOLD)
    assert rig.ask(ASKS) == (0, NONE)
    rig.side.request_finished("a")


def test_a_store_that_goes_away_ends_the_wait_at_once(rig: Rig) -> None:
    rig.queue(ASKS, Elsewhere.TOLD)
    rig.ask(ASKS)
    rig.store.is_away = True
    assert rig.side.has_pending_work()
    assert rig.waits() == {"lost": 1}
    later = request("b", *range(1, 11))
    rig.queue(later, Elsewhere.TOLD)
    assert rig.ask(later) == (0, NONE), "nothing is waited for from a store that is away"
    for name in ("a", "b"):
        rig.side.request_finished(name)


def test_a_request_that_goes_leaves_nothing(rig: Rig) -> None:
    rig.queue(ASKS, Elsewhere.TOLD)
    rig.ask(ASKS)
    rig.share(1, 2)
    rig.side.request_finished("a")
    assert rig.waits() == {"gone": 1}
    rig.queue(request("b", *range(21, 31)), Elsewhere.TOLD)
    rig.side.request_finished("b")
    assert rig.waits() == {"gone": 1}, "it was never asked"


def test_when_all_is_forgotten_nobody_waits(rig: Rig) -> None:
    rig.queue(ASKS, Elsewhere.TOLD)
    rig.ask(ASKS)
    rig.side.reset()
    assert rig.waits() == {"lost": 1}
    assert rig.ask(ASKS) == (0, NONE)
    rig.side.request_finished("a")


def test_news_that_were_lost_are_asked_for(rig: Rig) -> None:
    """The stream broke, or was not there yet."""
    rig.queue(ASKS, Elsewhere.TOLD)
    rig.ask(ASKS)
    rig.answer()
    rig.share(*range(1, 11), tells=False)
    rig.store._known.clear()  # it does not know better by itself
    rig.now += LOOK_UP_SECONDS
    rig.side.has_pending_work()
    assert rig.store.questions
    rig.answer()
    assert rig.waits() == {"whole": 1}
    rig.side.request_finished("a")


def test_so_many_wait_at_once_and_no_more(rig: Rig) -> None:
    names = [f"r{number}" for number in range(MOST_WAITING + 3)]
    for name in names:
        asks = request(name, *range(1, 11))
        rig.queue(asks, Elsewhere.TOLD)
        rig.ask(asks)
    assert list(rig.side.awaiting_prefill) == names[:MOST_WAITING]
    for name in names:
        rig.side.request_finished(name)


def test_the_engine_is_woken_when_a_wait_is_over() -> None:
    """With a clock that runs."""
    rig = Rig(Choice.AUTO, None)
    rig.queue(ASKS, Elsewhere.TOLD)
    rig.woken.clear()
    assert rig.ask(ASKS) == (0, RETRY)
    while not rig.side.has_pending_work():
        assert rig.woken.wait(WAIT_SECONDS), "nobody woke the engine"
        rig.woken.clear()
    assert rig.waits() == {"stalled": 1}
    rig.side.request_finished("a")
    rig.side.shutdown(WAIT_SECONDS)
