# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench serve --limits --lora`: a small run of everything, its adapters and its
arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.serve import lora_limits, lora_process, peer_engines
from stratakv.benchmarks.serve.limits import plot_limits
from stratakv.benchmarks.serve.lora_limits import LORA_CASES, measure_adapters, print_adapters
from stratakv.benchmarks.serve.lora_process import (
    REQUESTS,
    AdapterWorks,
    WrongWork,
    make_adapter,
    time_phases,
)
from stratakv.benchmarks.serve.phases_process import NewTokens
from stratakv.engine.cli.main import main
from stratakv.engine.models.lora.adapter_file import AdapterFile
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.core_messages import AddRequest
from stratakv.kernels.cpu.library import CpuLibrary, Missing, cpu_library

TINY = peer_engines.QWEN | {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEEDS_KERNELS = pytest.mark.skipif(
    not isinstance(cpu_library(), CpuLibrary), reason="needs compiled kernels"
)


@pytest.fixture
def plan(tmp_path: Path) -> dict[str, Any]:
    """The plan of a run on a model whose folder is made at once."""
    peer_engines.make_model(tmp_path / "tiny", TINY)
    return {"model": str(tmp_path / "tiny"), "adapters": str(tmp_path / "adapters"), "threads": 1,
            "prompt_tokens": 20, "decode_tokens": 2, "seed": 0}  # fmt: skip


@NEEDS_KERNELS
def test_each_work_has_the_adapters_of_its_name(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[AddRequest] = []
    monkeypatch.setattr(
        lora_process, "AddRequest", lambda *a, **k: asked.append(AddRequest(*a, **k)) or asked[-1]
    )
    works = AdapterWorks(plan)
    assert works.num_bytes["wide"] == 4 * works.num_bytes["adapter"] > 0
    for name, count, adapters, amount in (
        ("rows_without", REQUESTS, {""}, REQUESTS * 2),
        ("base_rows", REQUESTS, {""}, REQUESTS * 2),
        ("adapter_rows", REQUESTS, {f"adapter-{i}" for i in range(4)}, REQUESTS * 2),
        ("wide_rows", REQUESTS, {f"wide-{i}" for i in range(4)}, REQUESTS * 2),
        ("base_prompt", 1, {""}, 20),
        ("adapter_prompt", 1, {"adapter-0"}, 20),
    ):
        asked.clear()
        done = works.do(name)
        assert done.amount == amount and done.seconds > 0, name
        assert len(asked) == count
        assert {each.extras.adapter for each in asked if each.extras is not None} == adapters
    with pytest.raises(WrongWork, match="no work 'wide_prompt'"):
        works.do("wide_prompt")


def test_adapters_are_those_of_peft_and_fit_the_model(plan: dict[str, Any], tmp_path: Path) -> None:
    model = Path(plan["model"])
    num_bytes = make_adapter(tmp_path / "made", model, 8, 1)
    read = AdapterFile.read(tmp_path / "made", load_model_spec(model), 8)
    assert (read.rank, read.num_bytes, len(read.modules)) == (8, num_bytes, 7)
    assert {each.scale for each in read.modules.values()} == {2.0}
    make_adapter(tmp_path / "other", model, 8, 2)
    other = AdapterFile.read(tmp_path / "other", load_model_spec(model), 8)
    assert other.fingerprint != read.fingerprint


def test_a_missing_token_stops_the_run() -> None:
    class Scripted:
        """A side whose second request gets a token too many."""

        def add(self, *_: Any) -> None: ...
        def step(self) -> Any:
            yield NewTokens("0", [1], False)
            yield NewTokens("1", [1, 2], False)

    with pytest.raises(WrongWork, match="not every prompt got 2 tokens"):
        time_phases(Scripted(), [[5], [6]], 2)  # type: ignore[arg-type]


def test_without_compiled_kernels_it_says_so(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_process, "cpu_library", lambda: Missing("they were not built"))
    with pytest.raises(WrongWork, match="they were not built"):
        AdapterWorks(plan)


class ScriptedWorker:
    """Stands for the child: work with adapters takes 1.5 times as long, and twice the processor."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> ScriptedWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_ready(self) -> dict[str, Any]:
        return {"variant": "scripted"}

    def rate_of(self, work: str) -> Any:
        return lambda: 100.0 if work in self._dear else 150.0

    def processor_rates(self, work: str, rounds: int) -> list[float]:
        return [100.0 if work in self._dear else 200.0] * rounds

    _dear = ("adapter_rows", "wide_rows", "adapter_prompt")


def test_ratios_are_of_times(
    plan: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lora_limits, "Worker", ScriptedWorker)
    report = Report("serve_limits", "a test")
    report.figures |= {"contests": {}, "spreads": {}, "plan": plan}
    measure_adapters(report, plan, 3, tmp_path, Console(stderr=True))
    assert {name: round(ratio, 9) for name, ratio in report.ratios.items()} == {
        name: 1.0 if name == "lora_base_rows" else 1.5 for name in LORA_CASES
    }
    found = report.figures["contests"]["lora_mixed_64"]
    assert found["processor_ratio"] == 2.0 and found["processor_quartiles"] == (2.0, 2.0)
    monkeypatch.setenv("COLUMNS", "200")
    print_adapters(report)
    printed = capsys.readouterr().out
    assert "<= 1.02 met" in printed and "<= 1.25 missed" in printed
    assert plot_limits(report, tmp_path / "made.png").exists()


def test_the_flag_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--lora", "--out", str(tmp_path)]) != 0
    assert "--lora is of no use without --limits" in " ".join(capsys.readouterr().err.split())
