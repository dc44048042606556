# SPDX-License-Identifier: Apache-2.0
"""A life of StrataSpec and its tier with a host made of each recorded version of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.connector.vllm import tier_lookups as lookups
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.hierarchy.prefix_lookup import Prefix

from .fake_host import FakeHost, host
from .tier_life import CHUNK, Life, extra, host_keys, live, make_spec, model_fields, wait_for

__all__ = ["host", "live"]  # fixtures


def test_chunks_come_back_as_they_were(live: Any) -> None:
    engine = live(extra())
    keys = host_keys(9)
    assert engine.find(keys) == 0
    content = engine.fill(keys, seed=1)
    rows, result = engine.load(keys)
    assert result.success
    assert np.array_equal(rows, content)
    # A prompt that goes on elsewhere has the same beginning.
    assert engine.find(keys[:4] + host_keys(3, seed=9)) == 4
    # Another group's chunk of the same tokens is another one.
    assert engine.find([key[:-4] + (1).to_bytes(4, "big") for key in keys]) == 0


@pytest.mark.parametrize("disks", [1, 2])
def test_they_come_from_the_disk_after_a_restart(live: Any, tmp_path: Path, disks: int) -> None:
    named = ",".join(str(tmp_path / f"ssd{number}") for number in range(disks))
    given = extra(ssd_path=named, ssd_bytes="32MiB", ssd_admission="all")
    keys = host_keys(9)
    first = live(given)
    content = first.fill(keys, seed=1)
    first.stop()
    second = live(given)
    rows, result = second.load(keys)
    assert result.success
    assert np.array_equal(rows, content)
    assert all((tmp_path / f"ssd{number}" / "blocks").exists() for number in range(disks))


def test_what_is_stored_is_on_the_disk_before_any_stop(live: Any, tmp_path: Path) -> None:
    disk = {"ssd_bytes": "16MiB", "ssd_admission": "all"}
    engine = live(extra(ssd_path=str(tmp_path / "ssd"), **disk))
    other = live(extra(ssd_path=str(tmp_path / "other"), write_through=False, **disk))
    for each in (engine, other):
        each.fill(host_keys(5), seed=1)

    def on_disk(life: Life) -> int:
        tiers = life.tier._tiers
        with tiers.transfers.lock:
            return tiers.hierarchy.stats()["ssd"].blocks

    wait_for(lambda: on_disk(engine) == 5)
    assert on_disk(other) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 2},
        {"model": "another/model"},
        {"kv_cache_layout": "BLHNC"},
        {"salt": "theirs"},
        {"revision": "2"},
    ],
)
def test_a_store_of_another_identity_is_refused(
    host: FakeHost, live: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB"}
    first = live(extra(**settings))
    first.fill(host_keys(3), seed=1)
    first.stop()
    more = {name: changes.pop(name) for name in ("salt", "revision") if name in changes}
    if "model" in changes:
        fields = model_fields(host, "float32") | {"name": changes["model"]}
        changes["model"] = host.new("OffloadingModelConfig", **fields)
    spec = make_spec(host, extra(chunks=32, **settings, **more), **changes)
    with pytest.raises(TierConfigError):
        spec.get_manager()


@pytest.mark.parametrize("how", ["zero", "flip"])
def test_bytes_that_changed_in_the_slab_are_a_miss_from_then_on(live: Any, how: str) -> None:
    engine = live(extra())
    keys = host_keys(5)
    engine.fill(keys, seed=1)
    transfers = engine.tier._tiers.transfers
    slab = transfers._slab
    slots = np.frombuffer(slab.memory(), np.uint8).reshape(slab.num_slots, -1)
    if how == "zero":
        slots[:] = 0
    else:
        slots[:, 4000] ^= 1
    del slots
    _, result = engine.load(keys)
    assert not result.success
    assert result.successful_keys is None
    assert transfers.damaged == 5
    assert engine.find(keys) == 0
    engine.fill(keys, seed=2)  # computed anew
    assert engine.find(keys) == 5


def test_a_load_that_fails_is_not_offered_again(live: Any, tmp_path: Path) -> None:
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB", "ssd_admission": "all"}
    keys = host_keys(6)
    first = live(extra(**settings))
    first.fill(keys, seed=1)
    first.stop()
    engine = live(extra(**settings, faults="ssd:load:error=1"))
    _, result = engine.load(keys)
    assert not result.success
    assert engine.find(keys) == 0
    engine.manager.end_step()
    assert engine.find(keys) == 0  # nor another request
    assert engine.tier.has_pending_work() is False


def test_a_request_whose_load_found_no_room_is_not_offered_it_again(
    live: Any, tmp_path: Path
) -> None:
    """Nothing in the tiers changes by such a load, and vLLM asked for it for ever."""
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB", "ssd_admission": "all"}
    keys = host_keys(6)
    first = live(extra(**settings))
    first.fill(keys, seed=1)
    first.stop()
    engine = live(extra(**settings))
    slab = engine.tier._tiers.transfers._slab
    others = [bytes(36) + number.to_bytes(4, "big") for number in range(slab.num_slots)]
    assert None not in slab.reserve(others)  # as stores do whose copies take long
    context = engine.request(keys)
    assert engine.find(keys, context) == 6
    engine.manager.submit(keys, list(range(6)), context, is_load=True)
    [result] = engine.until_ended()
    assert not result.success
    assert engine.find(keys, context) == 0
    engine.tier.on_request_finished(context)
    slab.commit(others, [False] * len(others))


def test_a_store_whose_answers_never_come_is_not_waited_for_for_ever(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each answer of a server is damaged on its way, and each is asked for again."""
    monkeypatch.setattr(lookups, "MOST_RETRY_SECONDS", 0.1)
    engine, keys = live(extra()), host_keys(6)
    hierarchy = engine.tier._tiers.lookups._hierarchy
    monkeypatch.setattr(hierarchy, "find_prefix", lambda _keys: Prefix([], False, True))
    context = engine.request(keys)
    assert engine.tier.lookup(keys[0], context).name == "RETRY"
    assert engine.find(keys, context) == 0
    engine.tier.on_request_finished(context)


def test_a_hung_disk_holds_up_nobody(live: Any, tmp_path: Path) -> None:
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB", "ssd_admission": "all"}
    keys = host_keys(6)
    first = live(extra(**settings))
    first.fill(keys, seed=1)
    first.stop()
    engine = live(extra(**settings, read_seconds=0.3, faults="ssd:load:hang=1"))
    _, result = engine.load(keys)
    assert not result.success
    assert engine.find(keys) == 0
    engine.manager.submit(keys, list(range(6)), engine.request(keys), is_load=True)
    engine.tier.drain_jobs()  # a reset of vLLM's waits for the same
    assert [each.success for each in engine.manager.ended()] == [False]


def test_no_more_is_promised_than_the_region_holds(live: Any) -> None:
    engine = live(extra(chunks=16))
    long = host_keys(32)
    for start in (0, 16):
        engine.fill(long[start : start + 16], seed=start)
    context = engine.request(long)
    assert engine.find(long, context) == 12
    other = engine.request(long)
    assert engine.find(long, other) == 0  # what waits has the room
    engine.manager.end_step((context.req_id,))
    assert engine.find(long, other) == 12
    engine.tier.on_request_finished(other)


def test_chunks_that_are_quicker_to_compute_are_not_loaded(live: Any) -> None:
    engine = live(extra(load="auto"))
    keys = host_keys(8)
    engine.fill(keys, seed=1)
    assert engine.find(keys) == 8  # nothing is known of computing yet
    tiers = engine.tier._tiers
    tiers.prefill.record_prefill(10_000, 0, 1e-4)
    assert engine.find(keys) == 0
    # Without positions a tier is asked key by key, and vLLM stops at the first miss.
    declined = 8 if engine.knows_positions else 1
    assert tiers.economics.declined_tokens == {"cpu": declined * 32}
    tiers.prefill.record_prefill(100_000_000, 0, 1e6)
    assert engine.find(keys) == 8


def test_what_computing_costs_is_learned_from_steps(live: Any) -> None:
    engine = live(extra(load="auto"))
    keys = host_keys(8)
    context = engine.request(keys)
    engine.manager.end_step((context.req_id,))
    engine.region[:8] = 1
    engine.manager.submit(keys, list(range(8)), context, is_load=False)
    engine.until_ended()
    engine.manager.end_step()
    known = engine.tier._tiers.prefill.seconds_per_token
    assert (known is not None) == engine.knows_positions


def test_metrics_have_names_and_grow_by_what_happened(live: Any) -> None:
    engine = live(extra())
    keys = host_keys(4)
    engine.fill(keys, seed=1)
    data = engine.tier.get_stats().data
    assert data["stratakv:tier_blocks", ("cpu",)] == 4
    assert data["stratakv:tier_stored_bytes", ("cpu",)] == 4 * CHUNK
    assert engine.tier.get_stats() is None  # too soon
    engine.tier._metrics._next = 0.0
    assert ("stratakv:tier_stored_bytes", ("cpu",)) not in engine.tier.get_stats().data
    defined = type(engine.spec).build_metric_definitions(engine.spec.extra_config)
    assert {name for name, _ in data} <= defined.keys()
    assert "vllm:its_own" in defined


@pytest.mark.parametrize("part", ["transfers", "hierarchy"])
def test_the_thread_that_fails_leaves_misses(
    live: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    engine = live(extra())
    keys = host_keys(4)
    engine.fill(keys, seed=1)
    transfers = engine.tier._tiers.transfers
    if part == "transfers":
        monkeypatch.setattr(transfers, "_copy_out", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(transfers._hierarchy, "end_load", lambda *_: 1 / 0)
    context = engine.request(keys)
    assert engine.find(keys, context) == 4
    engine.manager.submit(keys, [0, 1, 2, 3], context, is_load=True)
    wait_for(lambda: transfers.is_broken)
    [result] = engine.until_ended()
    assert not result.success
    assert engine.find(keys) == 0
    engine.manager.submit(keys, [0, 1, 2, 3], context, is_load=False)
    assert len(engine.until_ended()) == 1
    assert "everything is computed from now on" in caplog.text
