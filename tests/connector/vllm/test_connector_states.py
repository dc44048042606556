# SPDX-License-Identifier: Apache-2.0
"""StrataConnector below hybrids: state-space layers beside attention, cache groups whose blocks
have unlike numbers of tokens, and what vLLM keeps of states and windows at the ends of prompts.

A small vLLM compares every byte that a token attends to, and every byte of a state before the next
one is made of it. Kinds, shapes and dtypes are those of Qwen3-Next and of Mamba-2, which vLLM's CPU
build does not run.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import cbor2
import pytest

from stratakv.connector.vllm.kv_connector.groups import Columns
from stratakv.connector.vllm.kv_connector.opening import identity_of
from stratakv.connector.vllm.kv_connector.pages import plan_pages
from stratakv.connector.vllm.settings import HOST

from ...tiers.cache_server.rig import server_process
from .fake_connector_host import PAGE_BYTES, ConnectorHost, kv_cache_config, newest, vllm_config
from .fake_pool import BLOCK, FullAttentionSpec, MambaSpec, SlidingWindowSpec
from .fake_request import Request
from .fake_scheduler import Vllm
from .test_connector import prompt, push_out, stats_of, wait_for, with_ssd
from .test_connector_parts import FULL, MAMBA_2, MODELS, SLAB, SLIDING, STATES, make

__all__ = ["newest"]

HYBRID = MODELS["states and full"]
STATE_GROUP = 0  # of HYBRID
BLOCK_BYTES = 3 * PAGE_BYTES
HALVES = FullAttentionSpec(PAGE_BYTES, BLOCK // 2)


def forget(vllm: Vllm, request: Request, group: int, *positions: int) -> None:
    """What a tier would evict: the blocks of a cache group at these positions, on every rank."""
    role = vllm.connector._scheduler
    parts = role._parts
    keys = parts.keys_of(role._view(request).block_hashes)
    role._side._hierarchy.forget_blocks(
        [
            keys[position * parts.width + index]
            for position in positions
            for index, part in enumerate(parts.all)
            if part.group == group
        ]
    )
    role._requests.pop(request.request_id)


def damage(vllm: Vllm, request: Request, group: int, position: int) -> None:
    """One byte of a block in the slab."""
    role = vllm.connector._scheduler
    key = role._parts.keys_of(role._view(request).block_hashes)[
        position * role._parts.width + group
    ]
    [slot] = role._slab.pin([key], touch=False)
    role._slab.unpin([key])
    role._slab.memory()[slot * role._slab.layout.slot_bytes + 1000] ^= 1
    role._requests.pop(request.request_id)


# A hit


@pytest.mark.parametrize("specs", [HYBRID, [FULL, MAMBA_2, MAMBA_2]], ids=["one", "two of Mamba-2"])
def test_a_hit_brings_the_last_state_and_no_other(newest: ConnectorHost, specs: list[Any]) -> None:
    vllm = make(newest, specs)
    first = vllm.run("first", prompt(1))
    push_out(vllm)
    loaded = stats_of(vllm)["load_bytes"]
    again = vllm.run("again", prompt(1))
    assert (again.num_external, again.all_token_ids) == (20, first.all_token_ids)
    num_states = len(specs) - 1
    assert stats_of(vllm)["load_bytes"] - loaded == (5 + num_states) * BLOCK_BYTES
    vllm.stop()


def test_a_hit_behind_what_vllm_has_itself(newest: ConnectorHost) -> None:
    """A longer prompt whose front was computed here meets the state of another engine's."""
    with server_process("--cpu-bytes", "16MiB") as server:
        settings = {**SLAB, "servers": [f"grpc://127.0.0.1:{server.port}"]}
        one, other = (make(newest, HYBRID, settings=settings) for _ in range(2))
        for each in (one, other):
            wait_for(lambda each=each: not stats_of(each)["down"])
        tokens = prompt(1, 33)
        one.run("long", tokens)
        wait_for(lambda: stats_of(one)["tiers"]["remote"]["stored_blocks"] >= 9)
        other.run("short", tokens[:13])
        request = other.run("long", tokens)
        assert request.num_external == 32 - 12
        one.stop()
        other.stop()


def test_a_prompt_of_whole_blocks_ends_a_block_earlier(newest: ConnectorHost) -> None:
    """Its last token is computed once more, which the state behind it has already seen."""
    vllm = make(newest, HYBRID)
    vllm.run("longer", prompt(1, 25))
    vllm.run("first", prompt(1, 20))
    push_out(vllm)
    assert vllm.run("again", prompt(1, 20)).num_external == 16
    assert vllm.num_failed == 0
    vllm.stop()


def test_answers_leave_states_too(newest: ConnectorHost) -> None:
    vllm = make(newest, HYBRID)
    first = vllm.run("first", prompt(1), max_tokens=12)
    push_out(vllm)
    assert vllm.run("again", first.all_token_ids).num_external == 32  # of a prompt of 33
    vllm.stop()


def test_a_preempted_request_goes_on_from_its_state(newest: ConnectorHost) -> None:
    vllm = make(newest, HYBRID)
    low = vllm.add("low", prompt(1), max_tokens=20)
    for _ in range(8):
        vllm.step()
    vllm.preempt(low)
    vllm.add("high", prompt(2, 41))
    vllm.waiting.reverse()
    vllm.run_all()
    assert low.num_external >= 5 * BLOCK
    alone = make(newest, HYBRID)
    assert alone.run("low", prompt(1), max_tokens=20).all_token_ids == low.all_token_ids
    vllm.stop()
    alone.stop()


# All or shorter


def test_without_its_state_a_hit_is_shorter(newest: ConnectorHost) -> None:
    vllm = make(newest, HYBRID)
    vllm.run("short", prompt(1))
    push_out(vllm)
    long = vllm.run("long", prompt(1, 33))  # leaves a state behind 32 tokens beside that behind 20
    assert long.num_external == 20
    push_out(vllm)
    forget(vllm, long, STATE_GROUP, 7)
    assert vllm.run("again", prompt(1, 33)).num_external == 20
    push_out(vllm, range(200, 204))
    forget(vllm, long, STATE_GROUP, 4, 7)
    assert vllm.run("none", prompt(1, 33)).num_external == 0
    assert vllm.num_failed == 0 and not vllm.connector._scheduler.is_broken
    vllm.stop()


def test_without_a_block_of_attention_a_hit_ends_at_a_state_before_it(
    newest: ConnectorHost,
) -> None:
    vllm = make(newest, HYBRID)
    vllm.run("short", prompt(1))
    push_out(vllm)
    long = vllm.run("long", prompt(1, 33))
    push_out(vllm)
    forget(vllm, long, 1, 6)
    assert vllm.run("again", prompt(1, 33)).num_external == 20
    vllm.stop()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_state_is_computed(newest: ConnectorHost, rank: int) -> None:
    vllm = make(newest, HYBRID, 2)
    first = vllm.run("first", prompt(1))
    push_out(vllm)
    damage(vllm, first, rank, 4)  # the parts of the first group come first, one for each rank
    again = vllm.run("again", prompt(1))
    assert again.all_token_ids == first.all_token_ids
    assert vllm.num_failed == 1
    assert stats_of(vllm)["damaged_blocks"] == 1
    push_out(vllm, range(200, 204))
    assert vllm.run("whole", prompt(1)).num_external == 20  # the state was stored anew
    assert vllm.num_failed == 1
    vllm.stop()


def test_a_copy_that_fails_is_computed(newest: ConnectorHost) -> None:
    vllm = make(newest, HYBRID)
    vllm.run("first", prompt(1))
    push_out(vllm)
    device = vllm.worker._worker._worker._device
    with mock.patch.object(device, "copy", side_effect=RuntimeError("no queue")):
        assert vllm.run("again", prompt(1)).num_external == 20
    assert vllm.num_failed == 1
    vllm.stop()


def test_a_broken_disk_fails_no_request(newest: ConnectorHost, tmp_path: Path) -> None:
    settings = with_ssd(tmp_path, read_seconds=0.2, shutdown_seconds=0.5)
    vllm = make(newest, HYBRID, settings=settings)
    first = vllm.run("first", prompt(1))
    wait_for(lambda: stats_of(vllm)["tiers"]["ssd"]["blocks"] >= 6)
    vllm.stop()
    for fault in ("ssd:load:error=1", "ssd:load:partial=1", "ssd:load:hang=1"):
        broken = make(newest, HYBRID, settings=settings | {"faults": fault})
        again = broken.run("again", prompt(1))
        assert again.all_token_ids == first.all_token_ids
        assert stats_of(broken)["tokens_loaded"].get("ssd", 0) < 20
        assert not broken.connector._scheduler.is_broken
        broken.stop()


def test_aborted_while_it_loads(newest: ConnectorHost) -> None:
    vllm = make(newest, HYBRID)
    vllm.run("first", prompt(1))
    push_out(vllm)
    request = vllm.add("gone", prompt(1))
    assert not vllm._schedule() and request.is_loading
    vllm.abort(request)
    vllm.run_all()
    assert vllm.pool.num_free == len(vllm.pool.blocks) - 1
    vllm.stop()


# Other tiers


def test_from_the_disk_after_a_restart(newest: ConnectorHost, tmp_path: Path) -> None:
    settings = with_ssd(tmp_path, **SLAB)
    vllm = make(newest, HYBRID, 2, settings=settings)
    first = vllm.run("first", prompt(1))
    wait_for(lambda: stats_of(vllm)["tiers"]["ssd"]["blocks"] >= 12)
    vllm.stop()
    vllm = make(newest, HYBRID, 2, settings=settings)
    again = vllm.run("again", prompt(1))
    assert (again.num_external, again.all_token_ids) == (20, first.all_token_ids)
    vllm.stop()


def test_blocks_outermost_are_copied_whole(newest: ConnectorHost) -> None:
    assert plan_pages(kv_cache_config(8, specs=HYBRID, is_packed=True)).is_dense
    vllm = make(newest, HYBRID, is_packed=True)
    vllm.run("first", prompt(1))
    push_out(vllm)
    assert vllm.run("again", prompt(1)).num_external == 20
    vllm.stop()


# Names


def identity(specs: list[Any]) -> Any:
    config = kv_cache_config(8, specs=specs)
    settings: Any = HOST.read(SLAB)
    return identity_of(vllm_config(SLAB), config, plan_pages(config), Columns(config), settings)


@pytest.mark.parametrize(
    "other",
    [
        MambaSpec(PAGE_BYTES, shapes=((64, 3), (4, 16, 16))),
        MambaSpec(PAGE_BYTES, dtypes=("bfloat16", "bfloat16")),
        MambaSpec(PAGE_BYTES, mamba_type="MAMBA2"),
        FULL,
    ],
    ids=["shape", "dtype", "kind", "attention"],
)
def test_states_of_another_plan_are_never_met(newest: ConnectorHost, other: Any) -> None:
    assert identity([STATES, FULL]).root() == identity([MambaSpec(PAGE_BYTES), FULL]).root()
    assert identity([STATES, FULL]).root() != identity([other, FULL]).root()


def test_keys_of_models_without_states_are_what_they_were(newest: ConnectorHost) -> None:
    made = identity([FULL, SLIDING])
    fields = dataclasses.asdict(made)
    assert fields.pop("states") == ()
    assert made.root() == hashlib.sha256(cbor2.dumps(fields, canonical=True)).digest()


# Blocks of unlike sizes


@pytest.mark.parametrize("hash_tokens", [1, 2])
@pytest.mark.parametrize("model", ["full and windowed", "states and full", "halves first"])
def test_hashes_of_less_than_a_block(newest: ConnectorHost, model: str, hash_tokens: int) -> None:
    """vLLM's --prefix-match-unit."""
    vllm = make(newest, MODELS[model], hash_tokens=hash_tokens)
    first = vllm.run("first", prompt(1))
    push_out(vllm)
    again = vllm.run("again", prompt(1))
    assert (again.num_external, again.all_token_ids) == (20, first.all_token_ids)
    vllm.stop()


def test_a_hit_needs_every_block_of_a_position(newest: ConnectorHost) -> None:
    vllm = make(newest, [HALVES, SLIDING])
    request = vllm.run("first", prompt(1))
    push_out(vllm)
    forget(vllm, request, 1, 2)  # the second half of the third position
    assert vllm.run("again", prompt(1)).num_external == 8
    assert vllm.num_failed == 0
    vllm.stop()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("window", [3, 6, 9])
def test_what_a_hit_needs_is_what_vllm_keeps(size: int, window: int) -> None:
    spec = SlidingWindowSpec(PAGE_BYTES, window, size)
    columns = Columns(kv_cache_config(8, specs=[FULL, spec]))
    parts, step = columns.parts(1), BLOCK // size
    for first in range(5):
        for length in range(1, 12):
            end = (first + length) * BLOCK
            wanted = [i for i in range(first * step, end // size) if spec.keeps(i, end)]
            places = [divmod(place, parts.width) for place in parts.needed(first, length)]
            needed = [(first + p) * step + columns.all[i].place for p, i in places if i]
            assert needed == wanted


def test_kv_events_name_the_cache_group(newest: ConnectorHost) -> None:
    with mock.patch(
        f"{Vllm.__module__}.vllm_config",
        lambda settings, **more: vllm_config(settings, events=True, **more),
    ):
        vllm = make(newest, [SLIDING, HALVES])
    vllm.run("first", prompt(1))
    push_out(vllm)
    events = [each for each in vllm.connector.take_events() if hasattr(each, "token_ids")]
    assert {event.group_idx for event in events} == {0, 1}
    hashes = vllm.add("probe", prompt(1)).block_hashes
    mine = [each for each in events if each.block_hashes[0] in hashes]
    assert mine and all(len(each.token_ids) == each.block_size == BLOCK for each in mine)
    vllm.run_all()
    vllm.stop()


# What vLLM keeps


@pytest.mark.parametrize(
    "model", ["states and full", "full and windowed", "windows of half a block"]
)
@pytest.mark.parametrize(("retention", "next_hit"), [(0, 20), (8, 32), (None, 32)])
def test_hits_end_where_prompts_do(
    newest: ConnectorHost, model: str, retention: int | None, next_hit: int
) -> None:
    """prefix_cache_retention_interval: 0 keeps states and windows at the ends of prompts."""
    vllm = make(newest, MODELS[model], retention=retention)
    first = vllm.run("first", prompt(1), max_tokens=12)
    push_out(vllm)
    again = vllm.run("again", prompt(1))
    assert again.num_external == 20
    push_out(vllm, range(200, 204))
    # The next turn begins where the answer ends, of which 0 keeps nothing.
    assert vllm.run("turn", first.all_token_ids).num_external == next_hit
    assert vllm.num_failed == 0
    vllm.stop()


@pytest.mark.parametrize("model", ["states and full", "halves, quarters and states"])
def test_many_requests_where_vllm_keeps_the_ends(newest: ConnectorHost, model: str) -> None:
    specs = MODELS[model]
    vllm = make(newest, specs, 2, retention=0)
    requests = [
        vllm.add(f"r{i}", prompt(i % 5, 9 + 4 * (i % 4)), max_tokens=1 + i % 7) for i in range(24)
    ]
    vllm.run_all()
    assert sum(request.num_external for request in requests) > 0
    assert not vllm.connector._scheduler.is_broken
    vllm.stop()
