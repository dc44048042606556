# SPDX-License-Identifier: Apache-2.0
"""StrataConnector below engines with several cache groups and several ranks: a small vLLM compares
every byte that a token attends to, in each group and on each rank."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest

from stratakv.connector.vllm.kv_connector.groups import Columns
from stratakv.connector.vllm.kv_connector.pages import plan_pages
from stratakv.tiers.block import pack_key
from stratakv.tiers.settings.values import ConfigError

from ...tiers.cache_server.rig import server_process
from .fake_connector_host import PAGE_BYTES, ConnectorHost, kv_cache_config, newest
from .fake_pool import (
    BLOCK,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from .fake_scheduler import Vllm
from .test_connector import open_one, prompt, push_out, stats_of, wait_for, with_ssd

__all__ = ["newest"]

SLAB = {"cpu_bytes": "16MiB", "load": "always"}  # 341 blocks
WINDOW = 6  # of its tokens the next one sees five, which lie in two blocks

FULL = FullAttentionSpec(PAGE_BYTES)
SLIDING = SlidingWindowSpec(PAGE_BYTES, WINDOW)
CHUNKED = ChunkedLocalAttentionSpec(PAGE_BYTES, 3 * BLOCK)
STATES = MambaSpec(PAGE_BYTES)
# Mamba-2, whose backend can keep a state within a step's tokens.
MAMBA_2 = MambaSpec(
    PAGE_BYTES,
    shapes=((64, 3), (8, 16, 16)),
    dtypes=("float16", "float16"),
    mamba_type="MAMBA2",
    num_prefill_checkpoint_blocks=1,
    prefill_checkpoint_alignment=1,
)
MODELS = {
    "full": [FULL],
    "windowed": [SLIDING],
    "full and windowed": [FULL, SLIDING],
    "two windows first": [SLIDING, SlidingWindowSpec(PAGE_BYTES, 11), FULL],
    "full and chunked": [FULL, CHUNKED],
    "sinks": [SinkFullAttentionSpec(PAGE_BYTES)],
    "states and full": [STATES, FULL],
    "states alone": [STATES],
    "full and three of Mamba-2": [FULL, MAMBA_2, MAMBA_2, MAMBA_2],
    "states and windows": [STATES, SLIDING, FULL],
    "windows of half a block": [FULL, SlidingWindowSpec(PAGE_BYTES, WINDOW, BLOCK // 2)],
    "halves first": [FullAttentionSpec(PAGE_BYTES, BLOCK // 2), SLIDING],
    "halves, quarters and states": [
        FullAttentionSpec(PAGE_BYTES, BLOCK // 2),
        SlidingWindowSpec(PAGE_BYTES, 3, 1),
        STATES,
    ],
}


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def make(host: ConnectorHost, specs: list[Any], num_ranks: int = 1, **more: Any) -> Vllm:
    settings = more.pop("settings", SLAB)
    num_blocks = more.pop("num_blocks", 1 + sum(blocks_for(spec, 11) for spec in specs))
    return Vllm(host, settings, num_blocks, specs=specs, num_ranks=num_ranks, **more)


def blocks_for(spec: Any, num_blocks: int) -> int:
    """As many tokens of this group as in so many blocks; of states a request has two."""
    return 4 if isinstance(spec, MambaSpec) else num_blocks * BLOCK // spec.block_size


@pytest.mark.parametrize("model", MODELS)
def test_out_of_vllm_and_back(newest: ConnectorHost, model: str, num_ranks: int) -> None:
    vllm = make(newest, MODELS[model], num_ranks)
    first = vllm.run("first", prompt(1))
    push_out(vllm)
    again = vllm.run("again", prompt(1))
    assert again.num_external == 20
    assert again.all_token_ids == first.all_token_ids
    assert vllm.num_failed == 0 and not vllm.connector._scheduler.is_broken
    vllm.stop()


def test_a_window_needs_its_last_blocks_and_no_others(newest: ConnectorHost) -> None:
    vllm = make(newest, [FULL, SLIDING])
    request = vllm.run("first", prompt(1))
    push_out(vllm)
    role = vllm.connector._scheduler
    keys = role._parts.keys_of(role._view(request).block_hashes)[: 5 * 2]
    role._side._hierarchy.forget_blocks([keys[1], keys[3]])  # what the window does not see any more
    loaded = stats_of(vllm)["load_bytes"]
    assert vllm.run("again", prompt(1)).num_external == 20
    assert stats_of(vllm)["load_bytes"] - loaded == 7 * 3 * PAGE_BYTES  # five and two
    push_out(vllm, range(200, 204))
    role._side._hierarchy.forget_blocks([keys[9]])  # so that four are left, which need two others
    assert vllm.run("shorter", prompt(1)).num_external == 16
    vllm.stop()


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_a_hit_needs_the_part_of_every_rank(newest: ConnectorHost, lost_rank: int) -> None:
    vllm = make(newest, [FULL, SLIDING], 2)
    request = vllm.run("first", prompt(1))
    push_out(vllm)
    role = vllm.connector._scheduler
    digest = role._view(request).block_hashes[2]
    role._side._hierarchy.forget_blocks([pack_key(digest, 0, lost_rank, 2)])
    assert vllm.run("again", prompt(1)).num_external == 8
    vllm.stop()


def test_a_copy_that_fails_on_one_rank_fails_the_load(newest: ConnectorHost) -> None:
    vllm = make(newest, [FULL, SLIDING], 2)
    vllm.run("first", prompt(1))
    push_out(vllm)
    device = vllm.workers[1]._worker._worker._device
    with mock.patch.object(device, "copy", side_effect=RuntimeError("no queue")):
        again = vllm.run("again", prompt(1))
    assert vllm.num_failed == 1 and again.num_external == 20
    assert not vllm.connector._scheduler.is_broken
    vllm.stop()


@pytest.mark.parametrize("model", ["full", "two windows first"])
def test_damaged_bytes_are_computed(newest: ConnectorHost, model: str) -> None:
    vllm = make(newest, MODELS[model], 2)
    vllm.run("first", prompt(1))
    push_out(vllm)
    slab = vllm.connector._scheduler._slab
    memory = slab.memory()
    for slot in range(slab.num_slots):
        memory[slot * slab.layout.slot_bytes + 100] ^= 1
    vllm.run("again", prompt(1))
    assert vllm.num_failed == 1
    assert stats_of(vllm)["damaged_blocks"] >= 10
    vllm.stop()


def test_a_worker_that_cannot_reach_the_slab_beside_one_that_can(newest: ConnectorHost) -> None:
    vllm = make(newest, [FULL, SLIDING], 2)
    vllm.workers[1]._worker._attach = mock.Mock()
    vllm.workers[1]._worker._error = "gone"
    first = vllm.run("first", prompt(1))
    push_out(vllm)
    again = vllm.run("again", prompt(1))
    assert (again.num_external, again.all_token_ids) == (0, first.all_token_ids)
    assert vllm.connector._scheduler.is_broken
    vllm.stop()


@pytest.mark.parametrize("model", MODELS)
def test_many_requests_at_once_and_few_blocks(newest: ConnectorHost, model: str) -> None:
    """They load, compute, evict and put each other off."""
    specs = MODELS[model]
    numbers = random.Random(model)
    vllm = make(newest, specs, 2, num_blocks=1 + sum(blocks_for(spec, 14) for spec in specs))
    requests = []
    for i in range(30):
        tokens = prompt(numbers.randrange(5), 9 + 4 * numbers.randrange(4))
        requests.append(vllm.add(f"r{i}", tokens, max_tokens=1 + numbers.randrange(7)))
        if numbers.random() < 0.3:
            vllm.run_all()
    vllm.run_all()
    assert sum(request.num_external for request in requests) > 0
    stats = stats_of(vllm)
    assert stats["loads_in_flight"] == stats["stores_in_flight"] == 0
    assert not vllm.connector._scheduler.is_broken
    vllm.stop()


def test_aborted_while_both_ranks_load(newest: ConnectorHost) -> None:
    vllm = make(newest, [FULL, SLIDING], 2)
    vllm.run("first", prompt(1))
    push_out(vllm)
    request = vllm.add("gone", prompt(1))
    assert not vllm._schedule() and request.is_loading
    vllm.abort(request)
    vllm.run_all()
    assert vllm.pool.num_free == 22
    vllm.stop()


def test_from_the_disk_after_a_restart(newest: ConnectorHost, tmp_path: Any) -> None:
    settings = with_ssd(tmp_path, **SLAB)
    vllm = make(newest, [FULL, SLIDING], 2, settings=settings)
    first = vllm.run("first", prompt(1))
    wait_for(lambda: stats_of(vllm)["tiers"]["ssd"]["blocks"] >= 20)
    vllm.stop()
    vllm = make(newest, [FULL, SLIDING], 2, settings=settings)
    again = vllm.run("again", prompt(1))
    assert (again.num_external, again.all_token_ids) == (20, first.all_token_ids)
    vllm.stop()


def test_prefill_here_and_decode_there(newest: ConnectorHost) -> None:
    with server_process("--cpu-bytes", "32MiB") as server:
        settings = {**SLAB, "servers": [f"grpc://127.0.0.1:{server.port}"]}
        prefill, decode = (make(newest, [FULL, SLIDING], 2, settings=settings) for _ in range(2))
        for each in (prefill, decode):
            wait_for(lambda each=each: not stats_of(each)["down"])
        first = prefill.run("first", prompt(1), do_remote_decode=True)
        assert first.answer_params is not None
        request = decode.run("second", prompt(1), max_tokens=3, **first.answer_params)
        assert request.num_external == 20
        assert request.all_token_ids[:22] == first.all_token_ids
        # Without a word from a router the tiers are asked too.
        wait_for(lambda: decode.run("third", [*prompt(1), 9]).num_external or True)
        prefill.stop()
        decode.stop()


# How blocks lie


def test_blocks_outermost_are_copied_whole(newest: ConnectorHost) -> None:
    plan = plan_pages(kv_cache_config(8, specs=[FULL, SLIDING], is_packed=True))
    assert plan.is_dense and plan.block_bytes == 3 * PAGE_BYTES
    vllm = make(newest, [FULL, SLIDING], is_packed=True)
    vllm.run("first", prompt(1))
    push_out(vllm)
    assert vllm.run("again", prompt(1)).num_external == 20
    vllm.stop()


def test_groups_that_share_no_layout_are_refused() -> None:
    config = kv_cache_config(8, specs=[FULL, SLIDING])
    config.kv_cache_tensors[1].offset = 64
    with pytest.raises(ConfigError, match=r"share no layout.*begins at byte 64.*use StrataSpec"):
        plan_pages(config)


# What is refused


class CircularBufferSpec(FullAttentionSpec):
    """A kind that no hit can restore."""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CircularBufferSpec(PAGE_BYTES), r"group 1 \(group1.layer0, .*is a CircularBufferSpec"),
        (MambaSpec(PAGE_BYTES, mamba_cache_mode="none"), r"in mode none.*--mamba-cache-mode align"),
        (MambaSpec(PAGE_BYTES, num_speculative_blocks=2), r"2 blocks for proposed.*vllm#47194"),
    ],
    ids=["circular", "no states kept", "speculation"],
)
def test_kinds_of_groups_that_are_refused(newest: ConnectorHost, spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_one(newest, kv_cache_config(8, specs=[FULL, spec]))


def test_groups_that_vllm_does_not_transfer_are_refused(newest: ConnectorHost) -> None:
    kept = kv_cache_config(8, specs=[FULL, SLIDING])
    kept.kv_cache_groups[1].enable_kv_transfer = False
    with pytest.raises(ConfigError, match="cache group 1"):
        open_one(newest, kept)


@pytest.mark.parametrize("spec", [SLIDING, CHUNKED, STATES], ids=["window", "chunk", "state"])
def test_what_a_hit_needs_is_what_vllm_keeps(spec: Any) -> None:
    parts = Columns(kv_cache_config(8, specs=[FULL, spec])).parts(1)
    for first in range(6):
        for length in range(1, 30):
            places = parts.needed(first, length)
            skipped = spec.num_skipped((first + length) * BLOCK) // BLOCK
            wanted = [p for p in range(length) if first + p >= skipped]
            assert [place // 2 for place in places if place % 2] == wanted
            assert [place // 2 for place in places if not place % 2] == [*range(length)]
    for length in range(1, 30):
        assert parts.num_needed(length) == len(parts.needed(0, length))
