# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with StrataConnector: the same tokens as without, cold and out of every tier, and
whatever goes wrong in a tier costs computing and nothing else.

Needs what test_real_vllm.py needs: `make test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ...tiers.cache_server.rig import server_process
from . import vllm_engine
from .vllm_engine import ANSWER_SECONDS, PYTHON, VllmEngine, make_model, make_prompts

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="STRATAKV_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(900),
]

WHOLE = 288  # of 300 tokens: nine blocks; vLLM has 39, and six prompts take 60
PROCESS = Path(__file__).with_name("connector_process.py")


class ConnectorEngine(VllmEngine):
    """With our connector."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        arguments = settings.pop("arguments", {})
        transfer = {
            "kv_connector": "StrataConnector",
            "kv_connector_module_path": "stratakv.connector.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"stratakv": settings},
        }
        with mock.patch.object(vllm_engine, "PROCESS", PROCESS):
            super().__init__(model, folder, kv_transfer_config=transfer, **arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(6)


@pytest.fixture(scope="module")
def expected(
    model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[list[int]]]:
    """What vLLM computes without us."""
    with VllmEngine(model, tmp_path_factory.mktemp("alone")) as engine:
        tokens, cached = engine.generate(prompts)
        assert engine.generate(prompts) == (tokens, [0] * len(prompts))  # its cache is too small
    assert cached == [0] * len(prompts)
    return tokens


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "cpu_bytes": "8MiB", "ssd_path": str(folder / "ssd"), "ssd_bytes": "32MiB",
        "ssd_admission": "all", "load": "always", **more,
    }  # fmt: skip


def wait_for_disk(engine: VllmEngine, blocks: int) -> None:
    """Until so many are on the disk, as a scrape of vLLM shows it; steps bring it metrics."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while engine.do({"metrics": True}).get("stratakv:tier_blocks:ssd", 0) < blocks:
        assert time.monotonic() < deadline
        engine.generate([[7, 8, 9]])


def test_cold_and_from_the_slab(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    with ConnectorEngine(model, tmp_path, cpu_bytes="8MiB", load="always") as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        stats = engine.do({"stats": True})
        assert stats["failures"] == {} and not stats["broken"]
        assert stats["metrics"]["stratakv:tier_capacity_bytes:cpu"] == 8 * 1024**2
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
    settings = on_disk(tmp_path)
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
    settings = on_disk(tmp_path, write_through=False)
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
    settings = on_disk(tmp_path)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        engine.generate(prompts)
        assert engine.do({"idle": 30})["idle"]
    blocks = tmp_path / "ssd" / "blocks"
    content = bytearray(blocks.read_bytes())
    step = 4096
    for place in range(step + 100, len(content), step):  # one bit of every page but the first
        content[place] ^= 1
    blocks.write_bytes(content)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts)[0] == expected
        assert sum(engine.do({"stats": True})["tiers"]["ssd"]["rejected"].values()) >= 6


@pytest.mark.parametrize(
    "faults", ["ssd:load:hang=1", "ssd:load:error=1", "ssd:store:hang=1", "ssd:load:partial=1"]
)
def test_a_broken_ssd_fails_no_request(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path, faults: str
) -> None:
    settings = on_disk(tmp_path, read_seconds=1)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        engine.generate(prompts)
    with ConnectorEngine(model, tmp_path, **settings, faults=faults) as engine:
        for _ in range(2):
            assert engine.generate(prompts)[0] == expected
        assert engine.generate(prompts, together=True)[0] == expected


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
        other = make_model(tmp_path / "other", seed=7)
        with ConnectorEngine(other, tmp_path, **settings) as engine:
            assert engine.generate(prompts[:2])[1] == [0, 0]  # of the same shape, and never mixed
            server.kill()
            assert engine.generate(make_prompts(2, seed=3))[1] == [0, 0]


def test_kv_events(model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    events = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with ConnectorEngine(model, tmp_path, cpu_bytes="1MiB", load="always", arguments=events) as e:
        for _ in range(2):
            e.generate(prompts)
        seen = {tuple(each) for each in e.do({"events": True})["events"]}
        assert {("BlockStored", "GPU"), ("BlockStored", "CPU")} <= seen


def test_what_cannot_work_stops_the_start(model: Path, tmp_path: Path) -> None:
    engine = ConnectorEngine(model, tmp_path, cpu_byte="1GiB")
    assert engine.refused is not None
    assert any("did you mean cpu_bytes" in each for each in engine.refused), engine.refused
