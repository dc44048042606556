# SPDX-License-Identifier: Apache-2.0
"""StrataConnector in a host that is made of vLLM's recorded signatures: what a request meets, and
what goes wrong on the way."""

from __future__ import annotations

import inspect
import json
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from stratakv.engine.cli.main import main
from stratakv.tiers.settings.values import ConfigError

from ...tiers.cache_server.rig import server_process
from .fake_connector_host import BASE, ConnectorHost, host, kv_cache_config, newest, vllm_config
from .fake_host import signature_of
from .fake_pool import BLOCK
from .fake_scheduler import Vllm

__all__ = ["host", "newest"]

WAIT_SECONDS = 20.0
SLAB = {"cpu_bytes": "4MiB", "load": "always"}
SMALL = "1MiB"  # 21 blocks


def prompt(number: int, length: int = 21) -> list[int]:
    return [random.Random(f"{number} {i}").randrange(256) for i in range(length)]


def with_ssd(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        **SLAB, "ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB", "ssd_admission": "all",
        **more,
    }  # fmt: skip


def stats_of(vllm: Vllm) -> dict[str, Any]:
    stats: dict[str, Any] = vllm.connector._scheduler.stats()
    return stats


def push_out(vllm: Vllm, numbers: range = range(100, 104)) -> None:
    """Other prompts, until vLLM has nothing else."""
    for number in numbers:
        vllm.run(f"other {number}", prompt(number))


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


# The contract


def test_methods_are_those_of_the_base_class(host: ConnectorHost) -> None:
    from stratakv.connector.vllm import StrataConnector

    methods = host._methods(BASE) | host._methods("SupportsHMA")
    overridden = 0
    for name, each in methods.items():
        mine = vars(StrataConnector).get(name)
        assert mine is not None or not each["is_abstract"], f"{name} is missing"
        if mine is None or each["kind"] == "property":
            continue
        overridden += 1
        function = mine.__func__ if isinstance(mine, classmethod) else mine
        given = list(inspect.signature(function).parameters.values())[1:]
        recorded = signature_of(each["parameters"]).parameters
        if name == "__init__":
            assert [each.name for each in given] == list(recorded)
            continue
        assert [(p.name, p.kind) for p in given] == [(p.name, p.kind) for p in recorded.values()], (
            name
        )
    assert overridden > 20
    later = {  # asked since 0.32 and 0.33
        "get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids", "supports_sleep_mode",
    }  # fmt: skip
    known = {*methods, *later}
    public = {name for name in vars(StrataConnector) if not name.startswith("_")}
    assert public <= known, public - known


def test_what_is_read_of_the_host_is_there(host: ConnectorHost) -> None:
    fields = host._fields
    assert fields("KVCacheTensor").keys() >= {"layers", "layer_stride", "block_stride", "offset"}
    assert fields("KVCacheGroupSpec").keys() >= {"layer_names", "kv_cache_spec"}
    assert fields("KVCacheConfig").keys() >= {
        "num_blocks", "kv_cache_tensors", "kv_cache_groups", "kv_cache_layout",
    }  # fmt: skip
    assert fields("SchedulerOutput").keys() >= {
        "num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids",
        "scheduled_new_reqs", "scheduled_cached_reqs",
    }  # fmt: skip
    assert fields("MambaSpec").keys() >= {
        "shapes", "dtypes", "mamba_type", "mamba_cache_mode", "num_speculative_blocks",
    }  # fmt: skip
    assert "block_size" in fields("KVCacheSpec")
    assert host.record["classes"]["SinkFullAttentionSpec"]["bases"] == ["FullAttentionSpec"]
    assert "sliding_window" in fields("SlidingWindowSpec")
    assert "attention_chunk_size" in fields("ChunkedLocalAttentionSpec")
    for name in ("KVCacheSpec", "MambaSpec"):
        assert host._methods(name)["page_size_bytes"]["kind"] == "property"
    assert fields("KVConnectorOutput").keys() >= {"kv_connector_worker_meta", "failed_recving"}
    assert fields("KVTransferConfig").keys() >= {"kv_load_failure_policy"}
    request = set(host.record["classes"]["Request"]["attributes"])
    assert request >= {
        "request_id", "kv_transfer_params", "num_computed_tokens", "block_hashes", "lora_request",
        "skip_reading_prefix_cache", "all_token_ids",
    }  # fmt: skip
    pool = set(host.record["classes"]["BlockPool"]["attributes"])
    assert pool >= {"blocks", "free_block_queue", "hash_block_size"}
    queue = host.record["classes"]["FreeKVCacheBlockQueue"]["attributes"]
    assert "fake_free_list_head" in queue
    assert "next_free_block" in fields("KVCacheBlock")


# One request after another


def test_cold_then_evicted_then_loaded(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    first = vllm.run("first", prompt(1))
    assert first.num_external == 0
    assert stats_of(vllm)["stored_blocks"] == 0  # nothing has been evicted
    push_out(vllm)
    assert stats_of(vllm)["stored_blocks"] >= 5
    again = vllm.run("again", prompt(1))
    assert again.num_external == 20
    assert again.all_token_ids == first.all_token_ids
    assert vllm.num_failed == 0
    vllm.stop()


def test_what_was_generated_is_stored_too(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    first = vllm.run("first", prompt(1), max_tokens=12)
    push_out(vllm)
    again = vllm.run("again", first.all_token_ids)
    assert again.num_external == 32  # of a prompt of 33
    vllm.stop()


def test_the_front_comes_from_vllm_and_the_rest_from_the_slab(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    vllm.run("first", prompt(1))
    vllm.run("other", prompt(2, 29))
    again = vllm.run("again", prompt(1))
    assert 0 < again.num_external < 20
    vllm.stop()


def test_a_preempted_request_loads_what_it_had(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    vllm.add("low", prompt(1), max_tokens=20)
    for _ in range(6):
        vllm.step()
    low = vllm.requests["low"]
    vllm.preempt(low)
    vllm.add("high", prompt(2, 41))
    vllm.waiting.reverse()
    vllm.run_all()
    assert low.num_external >= 4 * BLOCK
    alone = Vllm(newest, SLAB)
    assert alone.run("low", prompt(1), max_tokens=20).all_token_ids == low.all_token_ids
    vllm.stop()
    alone.stop()


def test_many_requests_at_once_and_few_blocks(newest: ConnectorHost) -> None:
    """They load, compute and evict beside each other, and every token is compared."""
    vllm = Vllm(newest, SLAB, num_blocks=14)
    requests = [
        vllm.add(f"r{i}", prompt(i % 5, 9 + 4 * (i % 3)), max_tokens=1 + i % 7) for i in range(24)
    ]
    vllm.run_all()
    assert sum(request.num_external for request in requests) > 0
    assert stats_of(vllm)["loads_in_flight"] == 0 == stats_of(vllm)["stores_in_flight"]
    vllm.stop()


def test_blocks_cached_but_never_computed_are_not_stored(newest: ConnectorHost) -> None:
    """vLLM caches a block when it schedules the step that is to compute it. Put off in the same
    breath, the request has computed nothing, and its block goes to the next one."""
    vllm = Vllm(newest, SLAB)
    request = vllm.add("late", prompt(1))
    blocks = vllm.pool.get_new_blocks(6)
    request.tables = [blocks]
    vllm._cache(request, 21)
    vllm.waiting.remove(request)
    vllm.running.append(request)
    vllm.preempt(request)
    vllm.waiting.remove(request)
    for number in range(100, 104):
        other = vllm.add("other", prompt(number))
        while not other.is_finished:
            vllm.step()
    assert stats_of(vllm)["stored_blocks"] > 0
    vllm.waiting.append(request)
    vllm.run_all()
    assert request.num_external == 0
    vllm.stop()


# What goes wrong


def test_aborted_while_it_loads(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    vllm.run("first", prompt(1))
    push_out(vllm)
    request = vllm.add("gone", prompt(1))
    scheduled = vllm._schedule()
    assert request.is_loading and not scheduled
    vllm.abort(request)
    assert "gone" in vllm.requests  # its blocks are being written to
    vllm.run_all()
    assert vllm.pool.num_free == 11
    assert vllm.run("gone", prompt(1)).num_external > 0  # the id can be used again
    vllm.stop()


def test_damaged_bytes_are_computed(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    vllm.run("first", prompt(1))
    push_out(vllm)
    slab = vllm.connector._scheduler._slab
    memory = slab.memory()
    for slot in range(slab.num_slots):
        memory[slot * slab.layout.slot_bytes + 100] ^= 1
    again = vllm.run("again", prompt(1))
    assert vllm.num_failed == 1
    assert again.num_external == 20  # was offered, once
    assert stats_of(vllm)["damaged_blocks"] == 5
    push_out(vllm, range(200, 204))
    failed = vllm.num_failed
    assert vllm.run("whole", prompt(1)).num_external == 20  # stored anew
    assert vllm.num_failed == failed
    vllm.stop()


def test_a_copy_that_fails_is_computed(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    vllm.run("first", prompt(1))
    push_out(vllm)
    device = vllm.worker._worker._worker._device
    with mock.patch.object(device, "copy", side_effect=RuntimeError("no queue")):
        again = vllm.run("again", prompt(1))
    assert vllm.num_failed == 1 and again.num_external == 20
    assert vllm.run("third", prompt(1)).num_external == 0  # still in vLLM's own cache
    vllm.stop()


@pytest.mark.parametrize("fault", ["ssd:load:error=1", "ssd:load:hang=1", "ssd:load:partial=1"])
def test_a_broken_disk_fails_no_request(newest: ConnectorHost, tmp_path: Path, fault: str) -> None:
    settings = with_ssd(tmp_path, cpu_bytes=SMALL, read_seconds=0.2, shutdown_seconds=0.5)
    vllm = Vllm(newest, settings)
    vllm.run("first", prompt(1))
    push_out(vllm, range(100, 106))
    wait_for(lambda: stats_of(vllm)["tiers"]["ssd"]["blocks"] >= 20)
    vllm.stop()
    broken = Vllm(newest, settings | {"faults": fault})
    again = broken.run("again", prompt(1))
    assert again.num_external in (0, 20)
    assert stats_of(broken)["tokens_loaded"].get("ssd", 0) < 20
    assert not broken.connector._scheduler.is_broken
    broken.stop()


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_a_mistake_of_ours_ends_nothing(newest: ConnectorHost, side: str) -> None:
    vllm = Vllm(newest, SLAB)
    first = vllm.run("first", prompt(1))
    push_out(vllm)
    role = vllm.connector._scheduler
    if side == "scheduler":
        role._side.build_meta = mock.Mock(side_effect=KeyError("a mistake"))
    else:
        vllm.worker._worker._worker.poll = mock.Mock(side_effect=KeyError("a mistake"))
    again = vllm.run("again", prompt(1))
    assert again.all_token_ids == first.all_token_ids
    assert role.is_broken
    assert vllm.run("later", prompt(1)).num_external == 0
    assert not vllm.connector.has_pending_push_work()
    assert "get_new_blocks" not in vars(vllm.pool)  # nobody listens any more
    assert vllm.connector.get_kv_connector_stats() is None
    vllm.stop()


def test_a_worker_that_cannot_reach_the_slab(newest: ConnectorHost) -> None:
    with mock.patch(
        "stratakv.connector.vllm.kv_connector.steps.SlabPlace.map_slab", side_effect=OSError("gone")
    ):
        vllm = Vllm(newest, SLAB)
        vllm.run("first", prompt(1))
        push_out(vllm)
        assert vllm.run("again", prompt(1)).num_external == 0
    assert vllm.connector._scheduler.is_broken
    vllm.stop()


# Tiers below the slab


@pytest.mark.parametrize("write_through", [True, False])
def test_from_the_disk_after_a_restart(
    newest: ConnectorHost, tmp_path: Path, write_through: bool
) -> None:
    settings = with_ssd(tmp_path, write_through=write_through)
    vllm = Vllm(newest, settings)
    first = vllm.run("first", prompt(1))
    if write_through:  # computed blocks are written at once, evicted or not
        wait_for(lambda: stats_of(vllm)["tiers"]["ssd"]["blocks"] >= 5)
    else:
        push_out(vllm)
    vllm.stop()
    again = Vllm(newest, settings)
    request = again.run("again", prompt(1))
    assert request.num_external == 20
    assert request.all_token_ids == first.all_token_ids
    [hits] = again.hits
    assert {source.name for source in hits} == {"DISK"}
    again.stop()


def test_prefill_here_and_decode_there(newest: ConnectorHost) -> None:
    with server_process("--cpu-bytes", "16MiB") as server:
        settings = {**SLAB, "servers": [f"grpc://127.0.0.1:{server.port}"]}
        prefill, decode = Vllm(newest, settings), Vllm(newest, settings)
        for each in (prefill, decode):
            wait_for(lambda each=each: not stats_of(each)["down"])
        first = prefill.run("first", prompt(1), do_remote_decode=True)
        params = first.answer_params
        assert params is not None and params["do_remote_prefill"] is True
        # It may come before its blocks are at the server, and then waits for them.
        request = decode.run("second", prompt(1), max_tokens=3, **params)
        assert request.num_external == 20
        assert request.all_token_ids[:22] == first.all_token_ids
        prefill.stop()
        decode.stop()


# What vLLM is told


def test_statistics_and_metrics(newest: ConnectorHost) -> None:
    from stratakv.connector.vllm import StrataConnector

    vllm = Vllm(newest, SLAB)
    vllm.run("first", prompt(1))
    push_out(vllm)
    vllm.run("again", prompt(1))
    stats = vllm.connector.get_kv_connector_stats()
    assert stats is not None and not stats.is_empty()
    assert vllm.connector.get_kv_connector_stats() is None  # at most one a second
    assert stats.data["counters"]["loaded_tokens"] == {"cpu": 20}
    assert stats.reduce()["cpu tier_stored_bytes"] > 0
    twice = StrataConnector.build_kv_connector_stats({}).aggregate(stats).aggregate(stats)
    assert twice.data["counters"]["loaded_tokens"] == {"cpu": 40}
    assert twice.data["gauges"]["tier_up"] == {"cpu": 1.0}

    made: dict[str, Any] = {}

    def metric(name: str, documentation: str, labelnames: list[str]) -> Any:
        assert documentation and labelnames[0] == "engine"
        made[name] = mock.Mock()
        return made[name]

    prom = StrataConnector.build_prom_metrics(
        None, {"gauge": metric, "counter": metric}, ["engine"], {0: ["0"]}
    )
    prom.observe(stats.data, 0)
    made["stratakv:loaded_tokens"].labels.assert_called_once_with("0", "cpu")
    made["stratakv:loaded_tokens"].labels().inc.assert_called_once_with(20)
    made["stratakv:tier_up"].labels().set.assert_called_once_with(1.0)
    vllm.stop()


def test_kv_events(newest: ConnectorHost) -> None:
    vllm = Vllm.__new__(Vllm)
    with mock.patch(
        f"{Vllm.__module__}.vllm_config",
        lambda settings, **more: vllm_config(settings, events=True, **more),
    ):
        vllm.__init__(newest, {**SLAB, "cpu_bytes": SMALL})  # type: ignore[misc] # of one made without
    vllm.run("first", prompt(1))
    push_out(vllm)
    events = [*vllm.connector.take_events()]
    stored = {event.block_hashes[0]: event for event in events if hasattr(event, "token_ids")}
    tokens, parent = prompt(1), None
    probe = vllm.add("probe", tokens)
    for index, name in enumerate(probe.block_hashes):
        event = stored[name]
        assert event.token_ids == tokens[index * BLOCK : (index + 1) * BLOCK]
        assert (event.parent_block_hash, event.medium, event.block_size) == (parent, "CPU", BLOCK)
        parent = name
    vllm.run_all()
    push_out(vllm, range(200, 206))
    removed: set[bytes] = set()

    def look() -> bool:
        for event in vllm.connector.take_events():
            if not hasattr(event, "token_ids"):
                removed.update(event.block_hashes)
        return set(stored) <= removed

    wait_for(look)
    vllm.stop()


def test_vllm_forgets_and_we_forget(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    vllm.run("first", prompt(1))
    push_out(vllm)
    assert vllm.pool.reset_prefix_cache()
    assert vllm.run("again", prompt(1)).num_external == 20
    assert vllm.pool.reset_prefix_cache()
    assert vllm.connector.reset_cache() is True
    assert vllm.run("third", prompt(1)).num_external == 0
    vllm.stop()


def test_blocks_that_may_be_wrong_are_forgotten(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    vllm.run("first", prompt(1))
    push_out(vllm)
    vllm.run("again", prompt(1))
    [loaded] = vllm.pool.find(vllm.add("probe", prompt(1)).block_hashes, 5, vllm.specs)
    vllm.waiting.clear()
    del vllm.requests["probe"]
    vllm.pool.evict_blocks({block.block_id for block in loaded})
    assert vllm.run("third", prompt(1)).num_external == 0
    vllm.stop()


# What cannot work


def test_what_to_paste(capsys: pytest.CaptureFixture[str], newest: ConnectorHost) -> None:
    assert main(["config", "vllm", "--connector", "--cpu-bytes", "4MiB", "--load", "always"]) == 0
    pasted = json.loads(capsys.readouterr().out)
    assert pasted["kv_connector"] == "StrataConnector"
    assert pasted["kv_connector_module_path"] == "stratakv.connector.vllm"
    assert pasted["kv_connector_extra_config"] == {"stratakv": SLAB}
    open_one(newest, settings=pasted["kv_connector_extra_config"]["stratakv"])
    assert main(["config", "vllm", "--connector", "--region-bytes", "1GiB"]) == 2
    assert "has no region" in capsys.readouterr().err


def open_one(newest: ConnectorHost, cache_config: Any = None, **changes: Any) -> None:
    from stratakv.connector.vllm import StrataConnector

    config = vllm_config(changes.pop("settings", SLAB), **changes)
    role = newest.classes["KVConnectorRole"].SCHEDULER
    StrataConnector(config, role, cache_config or kv_cache_config(8)).shutdown()


def test_what_is_refused(newest: ConnectorHost) -> None:
    with pytest.raises(ConfigError, match="pipelines and context parallelism"):
        open_one(newest, world_size=4, pipeline=2)
    vllm = Vllm(newest, SLAB)
    vllm.pool.hash_block_size = 3
    with pytest.raises(ConfigError, match="hashes every 3 tokens"):
        vllm.connector.bind_gpu_block_pool(vllm.pool)
    vllm.stop()
    with pytest.raises(ConfigError, match="did you mean cpu_bytes"):
        open_one(newest, settings={"cpu_byte": "1GiB"})
    tensors = kv_cache_config(8).kv_cache_tensors
    tensors[0].block_stride = 16
    with pytest.raises(ConfigError, match="not in one piece"):
        open_one(newest, kv_cache_config(8, kv_cache_tensors=tensors))


def test_tensors_that_lie_elsewhere_are_refused(newest: ConnectorHost) -> None:
    vllm = Vllm(newest, SLAB)
    views = torch.from_numpy(vllm.memory[0]).unsqueeze(2)
    with pytest.raises(ConfigError, match="begins at byte"):
        vllm.worker.register_kv_caches({f"layer{i}": views[2 - i] for i in range(3)})
    vllm.stop()
