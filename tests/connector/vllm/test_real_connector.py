# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with StrataConnector: the same tokens as without, cold and out of every tier, and
whatever goes wrong in a tier costs computing and nothing else.

Needs what test_real_vllm.py needs: `make test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ...tiers.cache_server.rig import server_process
from .real_vllm import (
    WHOLE,
    ConnectorEngine,
    check_broken_ssd,
    check_refused,
    check_tenants,
    computed,
    expected,
    flip_bits_on_disk,
    make_connector,
    model,
    needs_vllm,
    on_disk,
    prompts,
    rejected_on_disk,
    wait_for_disk,
    windowed_model,
)
from .vllm_engine import BLOCK_TOKENS, WINDOW, VllmEngine, make_prompts

__all__ = ["expected", "make_connector", "model", "prompts", "windowed_model"]

pytestmark = needs_vllm


def test_cold_and_from_the_slab(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    with ConnectorEngine(model, tmp_path, cpu_bytes="8MiB", load="always") as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        stats = engine.do({"stats": True})
        assert stats["failures"] == {} and not stats["broken"]
        assert stats["metrics"]["stratakv:tier_capacity_bytes:cpu"] == 8 * 1024**2
        # Figures are told once in a while, at the next step.
        deadline = time.monotonic() + 60
        while "stratakv:loaded_tokens_total:cpu" not in stats["metrics"]:
            assert time.monotonic() < deadline, "nobody tells how many tokens were loaded"
            engine.generate(prompts[:1])
            stats = engine.do({"stats": True})
        assert stats["metrics"]["stratakv:loaded_tokens_total:cpu"] > 0
        # All at once, in less than half of the blocks that they need.
        assert engine.do({"forget": True})["forgotten"]
        assert engine.generate(prompts, together=True) == (expected, [WHOLE] * 6)


def test_generated_tokens_and_preempted_requests(model: Path, tmp_path: Path) -> None:
    """Answers are long and blocks few, so that requests are put off in the middle of them."""
    prompts = make_prompts(6, length=200, seed=4)
    command = {"generate": prompts, "max_tokens": 150, "together": True}
    with VllmEngine(model, tmp_path) as engine:
        wanted = engine.do(command)["tokens"]
    with ConnectorEngine(model, tmp_path, cpu_bytes="8MiB", load="always") as engine:
        assert engine.do(command)["tokens"] == wanted
        whole = [p + t for p, t in zip(prompts, wanted, strict=True)]
        assert engine.generate(whole)[1] == [320] * 6  # of 350, ten blocks
        stats = engine.do({"stats": True})
        assert stats["failures"] == {} and stats["loads"] >= 6


@pytest.mark.parametrize("how", ["zero", "flip"])
def test_bytes_that_changed_in_memory_are_computed(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path, how: str
) -> None:
    with ConnectorEngine(model, tmp_path, cpu_bytes="8MiB", load="always") as engine:
        engine.generate(prompts)
        engine.generate(make_prompts(4, seed=9))  # pushes them all out
        assert engine.do({"forget": True})["forgotten"]
        assert engine.do({"damage": how})["damaged"] >= 54
        assert engine.generate(prompts)[0] == expected
        assert engine.do({"stats": True})["damaged"] >= 6
        assert engine.generate(prompts)[0] == expected


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_a_mistake_of_ours_fails_no_request(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path, side: str
) -> None:
    with ConnectorEngine(model, tmp_path, cpu_bytes="8MiB", load="always") as engine:
        engine.generate(prompts)
        engine.do({"break": side})
        assert engine.generate(prompts, together=True)[0] == expected
        assert engine.do({"stats": True})["broken"]


def test_from_the_ssd_after_a_restart_and_after_a_kill(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = on_disk(tmp_path, cpu_bytes="8MiB")
    # As people run it: the engine's core in a process of its own.
    own = {"arguments": {"in_one_process": False}}
    with ConnectorEngine(model, tmp_path, **settings, **own) as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        assert engine.do({"stats": True})["tiers"]["ssd"]["loaded_blocks"] >= 54
        more = make_prompts(6, seed=2)
        after = engine.generate(more)[0]
        assert engine.do({"idle": 30})["idle"]
        engine.kill()
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        assert engine.generate(more) == (after, [WHOLE] * 6)


def test_stored_on_eviction_only(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = on_disk(tmp_path, cpu_bytes="8MiB", write_through=False)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts[:2]) == (expected[:2], [0] * 2)
        assert engine.do({"stats": True})["tiers"]["cpu"]["stored_blocks"] == 0
        assert engine.generate(prompts)[0] == expected
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        tokens, cached = engine.generate(prompts)
        assert tokens == expected
        assert WHOLE in cached  # what vLLM still had at the stop is lost


def test_flipped_bytes_on_the_disk_are_computed(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = on_disk(tmp_path, cpu_bytes="8MiB")
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        engine.generate(prompts)
        assert engine.do({"idle": 30})["idle"]
    flip_bits_on_disk(tmp_path)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts)[0] == expected
        assert rejected_on_disk(engine) >= 6


@pytest.mark.parametrize(
    "faults", ["ssd:load:hang=1", "ssd:load:error=1", "ssd:store:hang=1", "ssd:load:partial=1"]
)
def test_a_broken_ssd_fails_no_request(
    make_connector: Callable[..., VllmEngine],
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
    faults: str,
) -> None:
    settings = on_disk(tmp_path, cpu_bytes="8MiB", read_seconds=1)
    check_broken_ssd(make_connector, settings, faults, prompts, expected)


def test_from_a_tenant_of_a_cache_server_that_another_engine_filled(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    check_tenants(ConnectorEngine, model, tmp_path, prompts, expected)


def test_prefill_here_and_decode_there(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """Through a cache server: what one vLLM has computed, another one loads."""
    with server_process("--cpu-bytes", "16MiB") as server:
        address = f"grpc://127.0.0.1:{server.port}"
        settings = {"cpu_bytes": "8MiB", "servers": [address], "load": "always"}
        with ConnectorEngine(model, tmp_path, **settings) as engine:
            assert engine.generate(prompts) == (expected, [0] * 6)
            assert engine.do({"idle": 30})["idle"]
            engine.kill()  # what it has stored is at the server
        with ConnectorEngine(model, tmp_path, **settings) as engine:
            asked = {"generate": prompts, "max_tokens": 6, "params": {"do_remote_prefill": True}}
            answer = engine.do(asked)
            assert (answer["tokens"], answer["cached"]) == (expected, [WHOLE] * 6)


# Several cache groups, several ranks

# vLLM reserves blocks for a step in each group; so many are enough for 448 tokens, and for less
# than two prompts.
GROUPS = {"num_gpu_blocks_override": 70, "max_model_len": 448, "max_num_batched_tokens": 448}
RANKS = {"in_one_process": False, "tensor_parallel_size": 2}


def test_several_cache_groups(windowed_model: Path, tmp_path: Path) -> None:
    """Four groups, three of them windowed: out of the slab, and out of the SSD after a kill."""
    prompts = make_prompts(6)
    expected = computed(windowed_model, prompts, tmp_path, **GROUPS)
    settings = on_disk(tmp_path, cpu_bytes="16MiB")
    with ConnectorEngine(windowed_model, tmp_path, **settings, arguments=GROUPS) as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        assert engine.generate(prompts, together=True)[0] == expected
        stats = engine.do({"stats": True})
        assert stats["failures"] == {} and not stats["broken"]
        assert engine.do({"idle": 30})["idle"]
        engine.kill()
    with ConnectorEngine(windowed_model, tmp_path, **settings, arguments=GROUPS) as engine:
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        assert engine.do({"stats": True})["tiers"]["ssd"]["loaded_blocks"] >= 90
        assert engine.do({"damage": "zero"})["damaged"]
        assert engine.generate(prompts)[0] == expected
        assert engine.do({"stats": True})["damaged"] > 0


@pytest.mark.parametrize("which", ["one group", "four groups"])
def test_two_ranks(model: Path, windowed_model: Path, tmp_path: Path, which: str) -> None:
    """vLLM kills a core whose ranks take long to stop, so nothing may depend on an orderly stop."""
    prompts = make_prompts(6)
    if which == "one group":
        chosen, arguments, blocks = model, RANKS, 6 * 2 * 9
    else:
        # Of each windowed group the blocks of the last window: of the others nobody asks again.
        in_window = WINDOW // BLOCK_TOKENS
        chosen, arguments, blocks = windowed_model, RANKS | GROUPS, 6 * 2 * (9 + 3 * in_window)
    settings = on_disk(tmp_path, cpu_bytes="16MiB")
    with ConnectorEngine(chosen, tmp_path, **settings, arguments=arguments) as engine:
        tokens, cached = engine.generate(prompts)
        assert cached == [0] * 6
        assert engine.generate(prompts) == (tokens, [WHOLE] * 6)
        wait_for_disk(engine, blocks)
    with ConnectorEngine(chosen, tmp_path, **settings, arguments=arguments) as engine:
        assert engine.generate(prompts) == (tokens, [WHOLE] * 6)


def test_kv_events(model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    events = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with ConnectorEngine(model, tmp_path, cpu_bytes="1MiB", load="always", arguments=events) as e:
        for _ in range(2):
            e.generate(prompts)
        seen = {tuple(each) for each in e.do({"events": True})["events"]}
        assert {("BlockStored", "GPU"), ("BlockStored", "CPU")} <= seen


def test_what_cannot_work_stops_the_start(model: Path, tmp_path: Path) -> None:
    check_refused(ConnectorEngine(model, tmp_path, cpu_byte="1GiB"), "did you mean cpu_bytes")
