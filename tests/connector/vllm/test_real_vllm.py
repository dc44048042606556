# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with our tiers below it: the same tokens as without, cold and out of every tier, and
whatever goes wrong in a tier costs computing and nothing else.

Needs an environment with vLLM's CPU build, whose Python STRATAKV_VLLM_PYTHON names; `make
test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.engine.cli.main import main

from ...tiers.cache_server.rig import server_process
from .vllm_engine import (
    ANSWER_SECONDS,
    BLOCK_TOKENS,
    PYTHON,
    VllmEngine,
    extra_config,
    make_model,
    make_prompts,
    package_path,
    regions_of,
)

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="STRATAKV_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.timeout(900),
]

# A region that holds one prompt and a half, so that everything else comes from below it.
REGION_CHUNKS = 14
WHOLE = 288  # of 300 tokens: nine chunks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(6)


@pytest.fixture(scope="module")
def expected(
    model: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """What vLLM computes without us."""
    with VllmEngine(model, tmp_path_factory.mktemp("alone")) as engine:
        tokens, cached = engine.generate(prompts)
        assert engine.generate(prompts) == (tokens, [0] * len(prompts))  # its cache is too small
    assert cached == [0] * len(prompts)
    assert len({tuple(each) for each in tokens}) == len(prompts)
    return tokens


@pytest.fixture(autouse=True)
def _no_regions_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert regions_of(tmp_path) == []


def wait_for_disk(engine: VllmEngine, blocks: int) -> None:
    """Until so many are on the disk, as a scrape of vLLM shows it; steps bring it figures."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while engine.do({"metrics": True}).get("stratakv:tier_blocks:ssd", 0) < blocks:
        assert time.monotonic() < deadline
        engine.generate([[7, 8, 9]])


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
    with VllmEngine(model, tmp_path, extra_config(REGION_CHUNKS, cpu_bytes="8MiB")) as engine:
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
    with VllmEngine(model, tmp_path, extra_config(REGION_CHUNKS, cpu_bytes="8MiB")) as engine:
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
    region = extra_config(200, cpu_bytes="8MiB")
    with VllmEngine(model, tmp_path, region) as engine:
        engine.generate(prompts)
        rows = engine.do({"spoil_region": True})["spoilt"]
        assert rows >= 54
        tokens, cached = engine.generate(prompts)
        assert cached == [WHOLE] * 6
        assert all(a != b for a, b in zip(tokens, expected, strict=True))


def test_from_the_ssd_after_a_restart_and_after_a_kill(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = {
        "cpu_bytes": "1MiB", "ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "32MiB",
        "ssd_admission": "all", "load": "always",
    }  # fmt: skip
    extra = extra_config(REGION_CHUNKS, **settings)
    # As people run it: the engine's core in a process of its own.
    with VllmEngine(model, tmp_path, extra, in_one_process=False) as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
    with VllmEngine(model, tmp_path, extra) as engine:
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        assert engine.do({"stats": True})["tiers"]["ssd"]["loaded_blocks"] >= 54
        more = make_prompts(6, seed=2)
        after = engine.generate(more)[0]
        engine.generate(prompts)  # pushes what is new out of the slab, and onto the disk
        engine.do({"idle": 30})
        engine.kill()
    with VllmEngine(model, tmp_path, extra) as engine:
        assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        tokens, cached = engine.generate(more)
        assert tokens == after
        assert sum(cached) >= 3 * WHOLE
    # The kill left its region behind, and the next start has removed it.


def test_two_ranks(model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """vLLM kills a core whose ranks take long to stop, so nothing may depend on an orderly stop."""
    settings = {
        "cpu_bytes": "8MiB", "ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "32MiB",
        "ssd_admission": "all", "load": "always",
    }  # fmt: skip
    extra = extra_config(REGION_CHUNKS, **settings)
    ranks = {"in_one_process": False, "tensor_parallel_size": 2}
    with VllmEngine(model, tmp_path, extra, **ranks) as engine:
        tokens, cached = engine.generate(prompts)
        assert cached == [0] * 6
        assert engine.generate(prompts) == (tokens, [WHOLE] * 6)
        wait_for_disk(engine, blocks=54)
    with VllmEngine(model, tmp_path, extra, **ranks) as engine:
        assert engine.generate(prompts) == (tokens, [WHOLE] * 6)
    with VllmEngine(model, tmp_path, extra_config(REGION_CHUNKS, cpu_bytes="1MiB")):
        pass  # removes what a killed core has left


def test_flipped_bytes_on_the_disk_are_computed(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = {
        "cpu_bytes": "1MiB", "ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "32MiB",
        "ssd_admission": "all", "load": "always",
    }  # fmt: skip
    extra = extra_config(REGION_CHUNKS, **settings)
    with VllmEngine(model, tmp_path, extra) as engine:
        engine.generate(prompts)
    blocks = tmp_path / "ssd" / "blocks"
    content = bytearray(blocks.read_bytes())
    step = 4096
    for place in range(step + 100, len(content), step):  # one bit of every page but the first
        content[place] ^= 1
    blocks.write_bytes(content)
    with VllmEngine(model, tmp_path, extra) as engine:
        assert engine.generate(prompts) == (expected, [0] * 6)
        assert sum(engine.do({"stats": True})["tiers"]["ssd"]["rejected"].values()) >= 6


def test_from_a_cache_server_that_another_engine_filled(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    with server_process("--cpu-bytes", "16MiB") as server:
        address = f"grpc://127.0.0.1:{server.port}"
        settings = {"cpu_bytes": "8MiB", "servers": [address], "load": "always"}
        extra = extra_config(REGION_CHUNKS, **settings)
        with VllmEngine(model, tmp_path, extra) as engine:
            assert engine.generate(prompts) == (expected, [0] * 6)
            assert engine.do({"idle": 30})["idle"]
            engine.kill()  # what it has stored is at the server
        with VllmEngine(model, tmp_path, extra, in_one_process=False) as engine:
            assert engine.generate(prompts) == (expected, [WHOLE] * 6)
        other = make_model(tmp_path / "other", seed=7)
        with VllmEngine(other, tmp_path, extra) as engine:
            assert engine.generate(prompts[:2])[1] == [0, 0]  # of the same shape, and never mixed
            server.kill()
            assert engine.generate(make_prompts(2, seed=3))[1] == [0, 0]


@pytest.mark.parametrize(
    "faults", ["ssd:load:hang=1", "ssd:load:error=1", "ssd:store:hang=1", "ssd:store:busy=1",
               "ssd:load:partial=1", "ssd:lookup:error=0.5"]
)  # fmt: skip
def test_a_broken_ssd_fails_no_request(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path, faults: str
) -> None:
    settings = {
        "cpu_bytes": "1MiB", "ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "32MiB",
        "ssd_admission": "all", "load": "always", "read_seconds": 1,
    }  # fmt: skip
    with VllmEngine(model, tmp_path, extra_config(REGION_CHUNKS, **settings)) as engine:
        engine.generate(prompts)
    broken = extra_config(REGION_CHUNKS, **settings, faults=faults)
    with VllmEngine(model, tmp_path, broken) as engine:
        for _ in range(2):
            assert engine.generate(prompts)[0] == expected
        assert engine.generate(prompts, together=True)[0] == expected


def test_a_full_slab_and_a_small_region_fail_no_request(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    settings = {
        "cpu_bytes": "1MiB", "ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB",
        "ssd_admission": "all", "load": "always",
    }  # fmt: skip
    with VllmEngine(model, tmp_path, extra_config(4, **settings)) as engine:
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
    engine = VllmEngine(model, tmp_path, extra_config(REGION_CHUNKS, **settings))
    assert engine.refused is not None
    assert any(words in each for each in engine.refused), engine.refused


def test_a_cache_server_of_another_layout_stops_the_start(model: Path, tmp_path: Path) -> None:
    with server_process("--cpu-bytes", "16MiB") as server:
        server.attach(server.stub())  # the rig's own layout
        settings = {"cpu_bytes": "1MiB", "servers": [f"grpc://127.0.0.1:{server.port}"]}
        engine = VllmEngine(model, tmp_path, extra_config(REGION_CHUNKS, **settings))
        assert engine.refused is not None
        assert any("a tenant of its own" in each for each in engine.refused), engine.refused


def test_chunks_of_several_blocks(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    extra = extra_config(REGION_CHUNKS, cpu_bytes="16MiB") | {"blocks_per_chunk": 2}
    with VllmEngine(model, tmp_path, extra) as engine:
        assert engine.generate(prompts)[0] == expected
        tokens, cached = engine.generate(prompts)
        assert tokens == expected
        assert cached == [8 * BLOCK_TOKENS] * 6
