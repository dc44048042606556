# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench serve`: a small run of everything, the arithmetic, and what cannot be asked."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.load_client import LoadRun, StreamedAnswer
from stratakv.benchmarks.harness.peer import Peer, PeerFailed
from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.harness.workloads import WORKLOADS
from stratakv.benchmarks.serve import command as serve
from stratakv.benchmarks.serve.command import Plan
from stratakv.benchmarks.serve.report import fill_comparison, load_figures
from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import EMBEDDED_MODEL

PEER_FILE = "stratakv.benchmarks.serve.engine_peer"


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "CPU_TIER", "32MiB")
    monkeypatch.setattr(serve, "SSD_TIER", "128MiB")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_everything_in_small(
    tmp_path: Path, one_layer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "serve", "--quick", "--out", str(tmp_path), "--requests", "8"]
    words += ["--model", str(one_layer)]
    words += ["--concurrency", "4", "--output-tokens", "8", "--rounds", "1", "--num-threads", "1"]
    assert main(words) == 0
    written = json.loads((tmp_path / "serve.json").read_text())
    figures = written["figures"]
    assert list(figures["workloads"]) == list(WORKLOADS)
    for workload in figures["workloads"].values():
        assert (workload["completed"], workload["failed"]) == (8, 0)
        assert workload["total_output_tokens"] == 8 * 8
        assert 0 < workload["median_ttft_ms"] <= workload["p99_ttft_ms"]
    assert figures["workloads"]["unique"]["hit_rate"] == 0
    assert figures["workloads"]["chat-system-prompt"]["hit_rate"] > 0.4
    assert figures["workloads"]["multi-turn"]["hit_rate"] > 0.3
    assert figures["comparison"]["engine"]["same_text"] == 1.0
    ratios = {"http_vs_engine", "tokens_vs_transformers_serial", "tokens_vs_transformers_padded"}
    if importlib.util.find_spec("transformers") is None:
        ratios = {"http_vs_engine"}
    assert written["ratios"].keys() == ratios
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in written["ratios"].values())
    assert written["limits"]["engine_output_throughput"] > 0
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "Output token throughput (tok/s)" in shown and "P99 TTFT (ms)" in shown


@pytest.mark.slow
def test_without_transformers(
    tmp_path: Path,
    one_layer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    words = ["bench", "serve", "--quick", "--out", str(tmp_path), "--workload", "unique"]
    words += ["--request-rate", "50", "--requests", "4", "--concurrency", "2"]
    words += ["--model", str(one_layer)]
    assert main([*words, "--output-tokens", "4", "--rounds", "1"]) == 0
    written = json.loads((tmp_path / "serve.json").read_text())
    assert written["ratios"].keys() == {"http_vs_engine"}
    assert written["figures"]["comparison"].keys() == {"http", "engine"}
    told = capsys.readouterr()
    assert "pip install '.[test]'" in told.err
    assert "50 requests a second" in told.out


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--workload", "uniqe", "there is no workload 'uniqe'; did you mean unique"),
        ("--requests", "0", "--requests takes 1 to 100000, not 0"),
        ("--concurrency", "0", "--concurrency takes 1 to 1024"),
        ("--output-tokens", "257", "--output-tokens takes 1 to 256, not 257"),
        ("--rounds", "-1", "--rounds takes 0 to"),
        ("--num-threads", "0", "--num-threads takes 1 to"),
        ("--request-rate", "0", "--request-rate takes more than 0"),
        ("--request-rate", "nan", "--request-rate takes more than 0"),
        ("--model", "/nowhere", "/nowhere is not a directory"),
    ],
)
def test_a_plan_that_cannot_work(
    option: str, value: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--out", str(tmp_path), option, value]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_model_whose_context_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "short"
    shutil.copytree(EMBEDDED_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    assert main(["bench", "serve", "--out", str(tmp_path / "out"), "--model", str(model)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "take a context of 2816 tokens and short has 512" in told


def answer(*event_seconds: float, tokens: int = 3, **tiers: int) -> StreamedAnswer:
    total = event_seconds[-1] + 0.5
    return StreamedAnswer("text", list(event_seconds), total, 100, tokens, tiers)


def test_figures_of_a_run() -> None:
    run = LoadRun(
        [[answer(1.0, 2.0, 4.0, pool=48)], [answer(3.0, 5.0, cpu=32), answer(2.0, tokens=1)]],
        ["HTTP 503: busy", "HTTP 503: busy"],
        seconds=10.0,
    )
    figures = load_figures(run)
    assert (figures["completed"], figures["failed"]) == (3, 2)
    assert figures["errors"] == {"HTTP 503: busy": 2}
    assert figures["request_throughput"] == pytest.approx(0.3)
    assert figures["output_throughput"] == pytest.approx(0.7)
    assert figures["total_token_throughput"] == pytest.approx(30.7)
    assert figures["mean_ttft_ms"] == pytest.approx(2000)
    assert figures["p99_ttft_ms"] == pytest.approx(3000)
    # 3 s for two more tokens, 2 s for two more tokens; a single token has no time between any.
    assert figures["mean_tpot_ms"] == pytest.approx(1250)
    assert figures["median_itl_ms"] == pytest.approx(2000)
    assert figures["mean_itl_ms"] == pytest.approx(1e3 * (1 + 2 + 2) / 3)
    assert figures["median_e2el_ms"] == pytest.approx(4500)
    assert figures["hit_rate"] == pytest.approx(80 / 300)
    assert figures["cached_share_by_tier"] == pytest.approx(
        {"pool": 48 / 300, "cpu": 32 / 300, "ssd": 0.0}
    )


def test_a_run_in_which_all_failed() -> None:
    figures = load_figures(LoadRun([[]], ["gone"], seconds=1.0))
    assert (figures["completed"], figures["failed"], figures["output_throughput"]) == (0, 1, 0)
    assert "mean_ttft_ms" not in figures and "hit_rate" not in figures


def test_ratios_are_taken_within_a_round() -> None:
    report = Report("probe", "probe", environment={})
    rates = {
        "http": [100.0, 10.0, 90.0],  # the machine was busy in the second round
        "engine": [200.0, 20.0, 100.0],
        "transformers_serial": [25.0, 2.0, 30.0],
    }
    fill_comparison(report, rates, {"engine": 1.0, "transformers_serial": 0.5})
    assert report.ratios == {"http_vs_engine": 0.5, "tokens_vs_transformers_serial": 4.0}
    assert report.limits == {"engine_output_throughput": 100.0}
    assert report.figures["comparison"]["transformers_serial"] == {
        "output_throughput": 25.0, "rounds": [25.0, 2.0, 30.0], "same_text": 0.5,
    }  # fmt: skip


def test_a_peer_that_cannot_start(tmp_path: Path) -> None:
    with (
        Peer("stratakv.benchmarks.nothing", EMBEDDED_MODEL, 1, tmp_path / "log") as peer,
        pytest.raises(PeerFailed, match="nothing ended with code"),
    ):
        peer.wait_ready(30.0)
    assert "No module named" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_peer_whose_model_is_not_there(tmp_path: Path) -> None:
    with (
        Peer(PEER_FILE, tmp_path / "nowhere", 1, tmp_path / "log") as peer,
        pytest.raises(PeerFailed, match=r"engine_peer: ConfigError: .*nowhere"),
    ):
        peer.wait_ready(60.0)


@pytest.mark.slow
def test_the_engine_alone(tmp_path: Path) -> None:
    with Peer(PEER_FILE, EMBEDDED_MODEL, 1, tmp_path / "log") as peer:
        with pytest.raises(PeerFailed, match="did not answer in 0 s"):
            peer.wait_ready(0.0)
        peer.wait_ready(60.0)
        first = peer.run("all", [[5, 6, 7], [8] * 40], 4, 60.0)
        again = peer.run("all", [[5, 6, 7], [8] * 40], 4, 60.0)
    assert [len(ids) for ids in first.token_ids] == [4, 4]
    assert again.token_ids == first.token_ids
    assert first.tokens_per_second == pytest.approx(8 / first.seconds)


def test_users_at_once_have_prompts_of_their_own() -> None:
    coding = serve.Coding.of(EMBEDDED_MODEL)
    plan = Plan(EMBEDDED_MODEL, (), 1, 7, None, 8, 1, 1, 0)
    prompts = serve.unique_prompts(plan, coding)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 7
