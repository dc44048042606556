# SPDX-License-Identifier: Apache-2.0
"""The store that fails on purpose: it keeps the promise of a store, and every fault is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import InvalidBlock, TierBusy, TierClosed, TierConfigError, TierError
from stratakv.tiers.testing.fault_plan import CALLS, KINDS, FaultPlan, Rule, parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore, InjectedFault
from stratakv.tiers.testing.memory_store import MemoryStore

from ..blocks import ODD, filled_buffers, make_buffers, make_keys
from ..store_contract import SECONDS, check_store, fetch, put

KEYS = make_keys(12)
Make = Callable[..., FaultyStore]


@pytest.fixture
def make() -> Iterator[Make]:
    """Stores with a plan, over one in memory that holds KEYS."""
    made: list[FaultyStore] = []

    def make(plan: str, **options: int) -> FaultyStore:
        inner = MemoryStore(ODD, 100 * ODD.page_bytes)
        assert put(inner, KEYS) == [True] * len(KEYS)
        made.append(FaultyStore(inner, parse_faults(plan), **options))
        return made[-1]

    yield make
    for store in made:
        store.close(SECONDS)


def injected(store: FaultyStore) -> dict[str, int]:
    return {name: times for name, times in store.stats().errors.items() if "injected" in name}


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", []),
        ("load:error=0.1", [Rule("load", "error", 0.1)]),
        ("lookup:every=7, drop:error=1", [Rule("lookup", "every", 7), Rule("drop", "error", 1.0)]),
        ("store:delay=0.05", [Rule("store", "delay", 0.05)]),
        ("store:delay=0.01..0.2", [Rule("store", "delay", 0.01, 0.2)]),
        ("load:delay=exp(.5)", [Rule("load", "delay", 0.5, None, True)]),
    ],
)
def test_a_plan_is_read_from_its_text(text: str, rules: list[Rule]) -> None:
    assert parse_faults(text) == FaultPlan(tuple(rules))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("load", "CALL:KIND=VALUE.*'load'"),
        ("load:error", "CALL:KIND=VALUE"),
        ("load:error=0.1,,", "CALL:KIND=VALUE.*''"),
        ("read:error=0.1", "no call 'read'"),
        ("load:explode=1", "not 'explode'"),
        ("lookup:hang=1", "hang can befall load, store, not lookup"),
        ("drop:miss=1", "not drop"),
        ("load:error=1.1", "probability from 0 to 1, not '1.1'"),
        ("load:error=nan", "not 'nan'"),
        ("load:error=-1", "not '-1'"),
        ("load:error=", "not ''"),
        ("load:every=0", "from 1 on, not '0'"),
        ("load:every=1.5", "not '1.5'"),
        ("load:every=\u0663", "from 1 on"),
        ("load:delay=2..1", "a range"),
        ("load:delay=exp(1..2)", "a mean"),
        ("load:delay=1e9", "not '1e9'"),
        ("load:delay=4000", "up to 3600"),
        ("load:error=0.1,load:error=0.2", "load:error stands twice"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(TierConfigError, match=says):
        parse_faults(text)


@pytest.mark.parametrize("plan", ["", "load:delay=0.001,store:reorder=0.5", "load:reorder=1"])
def test_it_keeps_the_promise_of_a_store(plan: str) -> None:
    check_store(FaultyStore(MemoryStore(ODD, 100 * ODD.page_bytes), parse_faults(plan)))


def test_every_nth_call_fails(make: Make) -> None:
    store = make("lookup:every=3,drop:every=2")
    failed = []
    for _ in range(9):
        try:
            store.lookup(KEYS)
            failed.append(False)
        except InjectedFault:
            failed.append(True)
    assert failed == [False, False, True] * 3
    assert store.drop(KEYS[:1]) == 1
    with pytest.raises(InjectedFault):
        store.drop(KEYS[:1])
    assert injected(store) == {"injected_lookup_every": 3, "injected_drop_every": 1}


def test_errors_come_from_the_call_or_from_its_future(make: Make) -> None:
    store = make("load:error=1,store:error=1")
    from_call = from_future = 0
    for _ in range(20):
        try:
            future = store.load(KEYS, make_buffers(len(KEYS), ODD))
        except InjectedFault:
            from_call += 1
        else:
            from_future += isinstance(future.exception(SECONDS), InjectedFault)
    assert from_call + from_future == 20
    assert min(from_call, from_future) > 0
    with pytest.raises(InjectedFault):
        put(store, make_keys(1, "new"))
    assert injected(store) == {"injected_load_error": 20, "injected_store_error": 1}
    store.plan = FaultPlan()
    assert store.lookup(make_keys(1, "new")) == [Answer.MISS]
    assert None not in fetch(store, KEYS)


def test_busy_takes_nothing(make: Make) -> None:
    store = make("store:busy=1")
    with pytest.raises(TierBusy):
        put(store, make_keys(1, "new"))
    assert store.lookup(make_keys(1, "new")) == [Answer.MISS]
    assert injected(store) == {"injected_store_busy": 1}


def test_a_delay_delays_the_work_and_not_the_caller(make: Make) -> None:
    store = make("load:delay=600..700")
    buffers = make_buffers(len(KEYS), ODD)
    began = time.monotonic()
    future = store.load(KEYS, buffers)
    assert time.monotonic() - began < 300.0
    assert not future.done()
    assert not any(bytes(buffer).strip(b"\0") for buffer in buffers)
    store.plan = parse_faults("load:delay=0.1..0.2")
    began = time.monotonic()
    assert None not in store.load(KEYS, buffers).result(SECONDS)
    assert time.monotonic() - began >= 0.1
    store.plan = parse_faults("load:delay=exp(0.001)")
    assert None not in fetch(store, KEYS)
    assert injected(store) == {"injected_load_delay": 3}


def test_an_error_after_a_delay_ends_the_future() -> None:
    def full(call: str, _keys: object) -> None:
        if call == "load":
            raise TierBusy("as asked")

    inner = MemoryStore(ODD, 100 * ODD.page_bytes, fault=full)
    store = FaultyStore(inner, parse_faults("load:delay=0.01"))
    future = store.load(KEYS, make_buffers(len(KEYS), ODD))
    assert isinstance(future.exception(SECONDS), TierBusy)
    store.close(SECONDS)


def test_what_cannot_be_right_is_refused_before_a_delay(make: Make) -> None:
    store = make("store:delay=60")
    with pytest.raises(InvalidBlock, match="1 keys came with buffers of \\[5\\]"):
        store.store(KEYS[:1], [memoryview(b"short")])


def test_a_hung_call_ends_when_the_store_is_closed(make: Make) -> None:
    store = make("load:hang=1,store:delay=60")
    hung = store.load(KEYS, make_buffers(len(KEYS), ODD))
    late = store.store(KEYS, filled_buffers(KEYS, ODD))
    time.sleep(0.02)
    assert not hung.done()
    began = time.monotonic()
    store.close(SECONDS)
    assert time.monotonic() - began < SECONDS, "nothing that hangs is waited for"
    for future in (hung, late):
        with pytest.raises(TierClosed):
            future.result(0)


def test_missing_blocks_are_misses_and_the_others_hits(make: Make) -> None:
    store = make("lookup:miss=0.5,load:miss=0.5,store:miss=0.5", seed=3)
    answers = store.lookup(KEYS)
    found = [payload is not None for payload in fetch(store, KEYS)]
    new = make_keys(12, "new")
    kept = put(store, new)
    counts = injected(store)
    assert counts["injected_lookup_miss"] == answers.count(Answer.MISS)
    assert counts["injected_load_miss"] == found.count(False)
    assert counts["injected_store_miss"] == kept.count(False)
    assert all(0 < times < 12 for times in counts.values())
    store.plan = FaultPlan()
    assert [answer is Answer.HIT for answer in store.lookup(new)] == kept


def test_a_partial_batch_is_a_leading_part(make: Make) -> None:
    store = make("load:partial=1,store:partial=1")
    lengths = set()
    for _ in range(10):
        found = [payload is not None for payload in fetch(store, KEYS)]
        assert found == sorted(found, reverse=True)
        lengths.add(found.count(True))
    assert len(lengths) > 3 and max(lengths) < len(KEYS)
    kept = put(store, make_keys(12, "new"))
    assert kept == sorted(kept, reverse=True)
    assert injected(store) == {"injected_load_partial": 10, "injected_store_partial": 1}


def test_a_later_completion_passes_one_that_stands_back(make: Make) -> None:
    store = make("load:reorder=1")
    order: list[str] = []
    first = store.load(KEYS[:1], make_buffers(1, ODD))
    first.add_done_callback(lambda _: order.append("first"))
    assert not first.done()
    store.plan = FaultPlan()
    second = store.load(KEYS[1:2], make_buffers(1, ODD))
    second.add_done_callback(lambda _: order.append("second"))
    assert None not in [*first.result(SECONDS), *second.result(SECONDS)]
    # The second had ended before anybody could ask to be told, and so it was told at once.
    assert sorted(order) == ["first", "second"]
    assert injected(store) == {"injected_load_reorder": 1}


def test_what_nothing_passes_does_not_stand_back_for_ever(make: Make) -> None:
    store = make("load:reorder=1")
    assert None not in fetch(store, KEYS)


def test_the_same_seed_gives_the_same_faults(make: Make) -> None:
    def history(seed: int) -> list[object]:
        store = make("lookup:error=0.3,load:miss=0.3,load:partial=0.3", seed=seed)
        seen: list[object] = []
        for _ in range(20):
            try:
                seen.append(store.lookup(KEYS))
            except TierError as error:
                seen.append(type(error))
            seen.append([payload is None for payload in fetch(store, KEYS)])
        return seen

    assert history(1) == history(1)
    assert history(1) != history(2)


def test_every_kind_names_calls_that_exist() -> None:
    assert all(set(calls) <= set(CALLS) for calls in KINDS.values())
