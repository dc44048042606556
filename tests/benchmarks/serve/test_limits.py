# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench serve --limits`: a small run of everything, its arithmetic, and what cannot be
asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.redraw import draw
from stratakv.benchmarks.serve import limits, limits_process, limits_worker, peer_engines
from stratakv.benchmarks.serve.limits_process import Reading, WrongWork, weight_bytes
from stratakv.benchmarks.serve.lora_limits import LORA_CASES
from stratakv.engine.cli.main import main
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.kernels.cpu.library import CpuLibrary, Missing, cpu_library

SMALL = peer_engines.QWEN | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model of the same family whose folder is made at once."""
    monkeypatch.setattr(peer_engines, "QWEN", SMALL)
    peer_engines.make_model(tmp_path / "small", SMALL)
    return tmp_path / "small"


@pytest.mark.slow
@pytest.mark.skipif(not isinstance(cpu_library(), CpuLibrary), reason="needs compiled kernels")
def test_everything_in_small(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "bench",
        "serve",
        "--limits",
        "--lora",
        "--quick",
        "--rounds",
        "2",
        "--num-threads",
        "1",
    ]
    assert main([*words, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "serve_limits.json").read_text())
    assert set(written["ratios"]) == {*limits.CASES, *LORA_CASES}
    assert all(ratio > 0 for ratio in written["ratios"].values())
    figures = written["figures"]
    for name, case in limits.CASES.items():
        found = figures["contests"][name]
        assert len(found["rounds"]) == 2 and set(found["by_limit"]) == {case.limit, case.rival}
        assert found["processor_quartiles"][0] <= found["processor_ratio"]
        assert figures["spreads"][name][0] <= written["ratios"][name] <= figures["spreads"][name][1]
        # The stricter of both limits is the one that stands.
        assert written["ratios"][name] == min(each["ratio"] for each in found["by_limit"].values())
    model = written["figures"]["model"]
    assert model["weight_bytes"] == weight_bytes(load_model_spec(small))
    assert model["kv_bytes"] == 4000 * 2 * 2 * 2 * 32 * 2
    printed = capsys.readouterr().out
    assert "One request against its limits" in printed and "Adapters: time with" in printed
    again = tmp_path / "again.png"
    assert draw(Report.read(tmp_path / "serve_limits.json"), again) == [again]


def test_weights_that_a_step_does_not_read_do_not_count(small: Path) -> None:
    stored = (small / "model.safetensors").stat().st_size
    tied = weight_bytes(load_model_spec(small))
    assert stored * 0.9 < tied < stored  # less a header
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    # The embedding is not read then, but a head of its size is.
    assert weight_bytes(load_model_spec(small)) == tied


def test_a_buffer_is_read_whole() -> None:
    reading = Reading(10_000, 3)
    assert reading.scan(9_999) == 9_999 and reading.sum(10_000) == 10_000
    reading._buffer[9_000] = 1
    assert reading.scan(6_000) == 6_000
    for read in (reading.scan, reading.sum):
        with pytest.raises(WrongWork, match="holds something else"):
            read(9_999)


def test_processor_seconds_are_of_the_rounds_that_count(tmp_path: Path) -> None:
    worker = limits_worker.Worker.__new__(limits_worker.Worker)
    taken = [{"amount": 8.0, "seconds": 1.0, "processor_seconds": used} for used in (9.0, 2.0, 4.0)]
    worker.taken = {"decode": taken}
    assert worker.processor_rates("decode", 2) == [4.0, 2.0]  # without the first, which warms up


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rounds", "0"], "--rounds takes 1 to 1000 here"),
        (["--num-threads", "0"], "--num-threads takes 1 to 1024 here"),
        (["--model", "x"], "--model is of no use beside --limits"),
        (["--peer-python", sys.executable], "--peer-python is of no use beside --limits"),
    ],
)
def test_what_cannot_be_asked(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--limits", "--out", str(tmp_path), *words]) != 0
    assert expected in " ".join(capsys.readouterr().err.split())


def test_without_compiled_kernels_it_says_so(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_process, "cpu_library", lambda: Missing("they were not built"))
    with pytest.raises(WrongWork, match="they were not built"):
        limits_process.Works({"model": str(small)})
