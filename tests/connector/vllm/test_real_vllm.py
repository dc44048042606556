# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with our tiers below it: the same tokens as without, cold and out of every tier, and
whatever goes wrong in a tier costs computing and nothing else.

Needs an environment with vLLM's CPU build, whose Python STRATAKV_VLLM_PYTHON names; `make
test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratakv.engine.cli.main import main

from ...tiers.cache_server.rig import server_process
from .real_vllm import (
    WHOLE,
    SpecEngine,
    check_broken_ssd,
    check_refused,
    check_tenants,
    expected,
    flip_bits_on_disk,
    make_spec,
    model,
    needs_vllm,
    on_disk,
    prompts,
    rejected_on_disk,
    wait_for_disk,
)
from .vllm_engine import (
    BLOCK_TOKENS,
    PYTHON,
    VllmEngine,
    make_prompts,
    package_path,
    regions_of,
)

__all__ = ["expected", "make_spec", "model", "prompts"]

pytestmark = needs_vllm


@pytest.fixture(autouse=True)
def _no_regions_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert regions_of(tmp_path) == []


def test_doctor_knows_this_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", package_path(tmp_path))
    flags = ("--cpu-bytes", "8MiB", "--region-bytes", "1MiB", "--python", str(PYTHON), "--json")
    assert main(["doctor", "vllm", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    facts = {each["what"]: each["fact"] for each in told["findings"]}
    assert facts["block hash"] == "sha256 is the same in every process"
    assert main(["doctor", "vllm", *flags, "--prefix-caching-hash-algo", "xxhash"]) == 1
    assert "random seed" in capsys.readouterr().out


def test_cold_and_from_the_slab(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    with SpecEngine(model, tmp_path, cpu_bytes="8MiB") as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        stats = engine.do({"stats": True})
        assert stats["tiers"]["cpu"]["stored_blocks"] == 54
        assert stats["tiers"]["cpu"]["loaded_blocks"] >= 40
        assert stats["damaged"] == 0
        assert stats["metrics"]["stratakv:tier_capacity_bytes:cpu"] == 8 * 1024**2
        # All at once, so that loads wait for room in the region beside each other.
        assert engine.do({"forget": True})["forgotten"]
        tokens, cached = engine.generate(prompts, together=True)
        assert tokens == expected
        assert sum(cached) > 0


@pytest.mark.parametrize("how", ["zero", "flip"])
def test_bytes_that_changed_in_memory_are_computed(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path, how: str
) -> None:
    with SpecEngine(model, tmp_path, cpu_bytes="8MiB") as engine:
        engine.generate(prompts)
        assert engine.do({"forget": True})["forgotten"]
        assert engine.do({"damage": how})["damaged"] == 54
        assert engine.generate(prompts) == (expected, [0] * 6)
        assert engine.do({"stats": True})["damaged"] >= 6
        # What was computed anew is whole again.
        assert engine.generate(prompts[:5])[0] == expected[:5]


def test_wrong_bytes_would_change_the_tokens(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """The other tests would see a chunk that was not checked."""
    with SpecEngine(model, tmp_path, cpu_bytes="8MiB", region_chunks=200) as engine:
        engine.generate(prompts)
        rows = engine.do({"spoil_region": True})["spoilt"]
        assert rows >= 54
        tokens, cached = engine.generate(prompts)
        assert cached == [WHOLE] * 6
        assert all(a != b for a, b in zip(tokens, expected, strict=True))


def test_from_the_ssd_after_a_restart_and_after_a_kill(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = on_disk(tmp_path)
    # As people run it: the engine's core in a process of its own.
    own = {"arguments": {"in_one_process": False}}
    with SpecEngine(model, tmp_path, **settings, **own) as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
    with SpecEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        assert engine.do({"stats": True})["tiers"]["ssd"]["loaded_blocks"] >= 54
        more = make_prompts(6, seed=2)
        after = engine.generate(more)[0]
        engine.generate(prompts)  # pushes what is new out of the slab, and onto the disk
        engine.do({"idle": 30})
        engine.kill()
    with SpecEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        tokens, cached = engine.generate(more)
        assert tokens == after
        assert sum(cached) >= 3 * WHOLE
    # The kill left its region behind, and the next start has removed it.


def test_two_ranks(model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """vLLM kills a core whose ranks take long to stop, so nothing may depend on an orderly stop."""
    settings = on_disk(tmp_path, cpu_bytes="8MiB")
    ranks = {"arguments": {"in_one_process": False, "tensor_parallel_size": 2}}
    with SpecEngine(model, tmp_path, **settings, **ranks) as engine:
        tokens, cached = engine.generate(prompts)
        assert cached == [0] * 6
        assert engine.generate(prompts) == (tokens, [WHOLE] * 6)
        wait_for_disk(engine, blocks=54)
    with SpecEngine(model, tmp_path, **settings, **ranks) as engine:
        assert engine.generate(prompts) == (tokens, [WHOLE] * 6)
    with SpecEngine(model, tmp_path, cpu_bytes="1MiB"):
        pass  # removes what a killed core has left


def test_flipped_bytes_on_the_disk_are_computed(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = on_disk(tmp_path)
    with SpecEngine(model, tmp_path, **settings) as engine:
        engine.generate(prompts)
    flip_bits_on_disk(tmp_path)
    with SpecEngine(model, tmp_path, **settings) as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
        assert rejected_on_disk(engine) >= 6


def test_from_a_tenant_of_a_cache_server_that_another_engine_filled(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    check_tenants(SpecEngine, model, tmp_path, prompts, expected)


@pytest.mark.parametrize(
    "faults", ["ssd:load:hang=1", "ssd:load:error=1", "ssd:store:hang=1", "ssd:store:busy=1",
               "ssd:load:partial=1", "ssd:lookup:error=0.5"]
)  # fmt: skip
def test_a_broken_ssd_fails_no_request(
    make_spec: Callable[..., VllmEngine],
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
    faults: str,
) -> None:
    settings = on_disk(tmp_path, read_seconds=1)
    check_broken_ssd(make_spec, settings, faults, prompts, expected)


def test_a_full_slab_and_a_small_region_fail_no_request(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = on_disk(tmp_path, ssd_bytes="16MiB")
    with SpecEngine(model, tmp_path, region_chunks=4, **settings) as engine:
        long = make_prompts(3, length=900, seed=5)
        first = engine.generate(long, together=True)[0]
        for _ in range(2):
            assert engine.generate(prompts, together=True)[0] == expected
            assert engine.generate(long, together=True)[0] == first


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cpu_byte": "1GiB"}, "did you mean cpu_bytes"),
        ({"ssd_path": "x", "ssd_codec": "fp8"}, "use lossless or none"),
        ({"servers": ["http://x"]}, "a cache server's address looks like"),
        ({"cpu_bytes": "many"}, "cpu_bytes takes"),
    ],
)
def test_settings_that_cannot_work_stop_the_start(
    model: Path, tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    check_refused(SpecEngine(model, tmp_path, **settings), words)


def test_a_cache_server_of_another_layout_stops_the_start(model: Path, tmp_path: Path) -> None:
    with server_process("--cpu-bytes", "16MiB") as server:
        server.attach(server.stub())  # the rig's own layout
        settings = {"cpu_bytes": "1MiB", "servers": [f"grpc://127.0.0.1:{server.port}"]}
        check_refused(SpecEngine(model, tmp_path, **settings), "a tenant of its own")


def test_chunks_of_several_blocks(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    chunks = {"more": {"blocks_per_chunk": 2}}
    with SpecEngine(model, tmp_path, cpu_bytes="16MiB", arguments=chunks) as engine:
        assert engine.generate(prompts)[0] == expected
        tokens, cached = engine.generate(prompts)
        assert tokens == expected
        assert cached == [8 * BLOCK_TOKENS] * 6
