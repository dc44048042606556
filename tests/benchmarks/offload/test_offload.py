# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench offload`: the whole of it on a small plan, and what it must refuse to report."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stratakv.benchmarks.harness.load_client import StreamedAnswer
from stratakv.benchmarks.harness.report import Report, percentile
from stratakv.benchmarks.harness.served import ServedModel, ServerFailed
from stratakv.benchmarks.harness.workloads import documents, question
from stratakv.benchmarks.offload import command as offload
from stratakv.benchmarks.offload.report import PHASES, WARM_PHASES, Phase, Plan, prefill_flops
from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.tiers.settings.values import ConfigError

PLAN = Plan(Path("model"), 2, 100, 32, 4, 16, 2**20, 2**24)


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts servers, one after the other
def test_every_phase_of_a_small_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "offload", "--quick", "--out", str(tmp_path), "--documents", "3"]
    assert main([*words, "--prefix-tokens", "400", "--output-tokens", "4"]) == 0
    written = json.loads((tmp_path / "offload.json").read_text())
    assert {"environment", "limits", "figures", "ratios"} <= written.keys()
    phases = written["figures"]["phases"]
    assert list(phases) == list(PHASES)
    for name in WARM_PHASES:
        assert phases[name]["cached_tokens_by_tier"][name] == 3 * 400
        assert written["ratios"][f"ttft_cold_over_{name}"] > 0
    assert all(math.isfinite(ratio) for ratio in written["ratios"].values())
    assert (tmp_path / "offload.png").read_bytes().startswith(b"\x89PNG")
    assert "cold / this" in capsys.readouterr().out


def test_on_a_gpu_only_the_phases_are_measured() -> None:
    def chosen(**given: Any) -> list[str]:
        given = {"device": "cuda", "sections": None, "quick": False} | given
        return offload.sections_for(argparse.Namespace(**given))

    assert chosen() == chosen(sections="phases") == chosen(quick=True) == ["phases"]
    assert len(chosen(device="cpu")) > 1
    with pytest.raises(ConfigError, match="--sections convoy count processor seconds of a CPU"):
        chosen(sections="phases,convoy")
    words = replace(PLAN, device="cuda:1").serve_arguments(Path("ssd"))
    assert words[words.index("--device") + 1] == "cuda:1"
    assert words[words.index("--dtype") + 1] == "float32"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--prefix-tokens", "5000", "has room for 4048"),
        ("--prefix-tokens", "0", "ask for at least 320"),
        ("--documents", "2", "at least 3"),
        ("--documents", "0", "at least 3"),
        ("--documents", "1000", "ask for fewer or shorter"),
        ("--output-tokens", "0", "--output-tokens must be at least 1"),
        ("--block-size", "7", "--block-size takes a power of two"),
        ("--model", "/nowhere", "/nowhere is not a directory"),
        ("--device", "tpu", "--device takes cpu or cuda"),
        ("--device", "cuda:0,cuda:1", "names several GPUs"),
    ],
)
def test_a_plan_that_cannot_work(
    option: str,
    value: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "offload", "--out", str(tmp_path), option, value]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def answer(token_ids: list[int], **tiers: int) -> StreamedAnswer:
    return StreamedAnswer(
        token_ids=token_ids, cached_tokens=sum(tiers.values()), cached_by_tier=tiers
    )


def good_phases() -> dict[str, Phase]:
    cold = Phase([answer([number]) for number in range(2 * len(WARM_PHASES))])
    return {"cold": cold} | {
        name: Phase([answer([1], **{name: 96}), answer([2], **{name: 96})]) for name in WARM_PHASES
    }


EXPECTED = {(name, document): [document + 1] for name in WARM_PHASES for document in range(2)}


def test_phases_that_agree_pass() -> None:
    offload.check_phases(PLAN, good_phases(), EXPECTED)


def other_tokens(phases: dict[str, Phase]) -> None:
    phases["ssd"].answers[1].token_ids = [7]


def other_tier(phases: dict[str, Phase]) -> None:
    phases["cpu"].answers[0].cached_by_tier = {"pool": 96}


def warm_cold(phases: dict[str, Phase]) -> None:
    phases["cold"].answers[3].cached_tokens = 16


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (other_tokens, "phase ssd, document 2: tokens"),
        (other_tier, "phase cpu, document 1: 0 of 100"),
        (warm_cold, "a cold request found 16"),
    ],
)
def test_what_is_no_figure(spoil: Callable[[dict[str, Phase]], None], words: str) -> None:
    phases = good_phases()
    spoil(phases)
    with pytest.raises(offload.BenchmarkFailed, match=words):
        offload.check_phases(PLAN, phases, EXPECTED)


def test_documents_share_no_first_block() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    made = documents(encode, 5, 3000)
    assert {len(document) for document in made} == {3000}
    assert len({tuple(document[:16]) for document in made}) == 5
    assert made == documents(encode, 5, 3000)
    assert len(question(encode, 2, 8)) == 8
    with pytest.raises(ValueError, match="ask for fewer or shorter"):
        documents(encode, 3, 10**6)


def test_operations_of_the_embedded_model() -> None:
    spec = load_model_spec(EMBEDDED_MODEL)
    # Two operations for each weight of the layers, without the embedding, and one row of logits.
    weights = 5_475_584 - 4096 * 256 - 13 * 256
    assert prefill_flops(spec, 1) == 2 * weights + 2 * 6 * 256 + 2 * 4096 * 256


@pytest.mark.parametrize(("percent", "expected"), [(50, 2.0), (99, 4.0), (1, 1.0), (100, 4.0)])
def test_percentile(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    report = Report("probe", "stratakv bench probe", environment={})
    path = report.write(tmp_path)
    before = path.read_text()
    report.ratios["broken"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        report.write(tmp_path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["probe.json"]


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    arguments: list[Any] = [str(tmp_path / "nothing")]
    with pytest.raises(ServerFailed, match=r"ended with code 2(.|\n)*not a directory"):
        ServedModel(arguments, tmp_path / "log", start_seconds=60)
