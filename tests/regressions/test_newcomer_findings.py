# SPDX-License-Identifier: Apache-2.0
"""Z: what a newcomer meets before anything runs; README.md has the ids."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.engine.cli.bench import BENCHMARKS
from stratakv.engine.cli.checks import python as python_checks
from stratakv.engine.cli.main import main
from stratakv.engine.core import process

from ..deploy_scripts import DEPLOY, run
from ..real_models import QWEN3_8B, SMALL, write_config

pytestmark = pytest.mark.regression

# Runs command after command in one process that nothing may import torch in, and that may start
# none; prints for each its exit code and what it wrote.
CHILD = """
import contextlib, io, json, subprocess, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch was asked for")

def start_nothing(*arguments, **options):
    raise AssertionError(f"{arguments} was started")

sys.meta_path.insert(0, Refuses())
subprocess.Popen = start_nothing
from stratakv import LLM
from stratakv.engine.cli.main import main
from stratakv.engine.core import process

def run(words):
    if words[0] == "LLM":
        try:
            LLM(words[1], **json.loads(words[2]))
        except Exception as error:
            return type(error).__name__ + ": " + str(error)
        return "nothing was refused"
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return f"{code} {written.getvalue()}"

print(json.dumps([run(words) for words in json.load(sys.stdin)]))
"""


def _weights(path: Path, **tensors: list[int]) -> Path:
    """A file of zeros."""
    header, data = {}, 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [data, data + size]}
        data += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What was said, by case."""
    root = tmp_path_factory.mktemp("models")
    small = QWEN3_8B | SMALL
    other = write_config(root / "other", {"architectures": ["GPT2LMHeadModel"]})
    bare = write_config(root / "bare", small)
    cut = write_config(root / "cut", small)
    (cut / "model.safetensors").write_bytes(bytes(range(64)))
    wrong = write_config(root / "wrong", small)
    _weights(wrong / "model.safetensors", **{"model.embed_tokens.weight": [2, 3]})
    quantised = write_config(root / "quantised", small)
    _weights(quantised / "model.safetensors", **{"model.layers.0.mlp.up_proj.qweight": [2, 3]})
    serve, port = "serve", ["--port", "0"]
    cases: dict[str, list[str]] = {
        "serve other": [serve, str(other), *port],
        "serve bare": [serve, str(bare), *port],
        "serve cut": [serve, str(cut), *port],
        "serve wrong": [serve, str(wrong), *port],
        "serve quantised": [serve, str(quantised), *port],
        "serve long": [serve, *port, "--max-model-len", "1000000"],
        "serve pool": [serve, *port, "--max-model-len", "4096", "--num-blocks", "9"],
        "serve fp8 pool": [
            serve, *port, "--max-model-len", "4096", "--num-blocks", "9", "--kv-cache-dtype", "fp8",
        ],
        "serve gpu pool": [
            serve, *port, "--device", "cuda", "--max-model-len", "4096", "--num-blocks", "9",
        ],
        "serve nowhere": [serve, str(root / "nowhere"), *port],
        "generate other": ["generate", str(other), "--prompt", "x"],
        "generate stdin": ["generate", str(bare), "--prompt", "-"],
        "LLM other": ["LLM", str(other), "{}"],
        "LLM bare": ["LLM", str(bare), '{"in_process": false}'],
        "plan": ["plan", "--no-probe", "--json"],
        **{f"bench {name}": ["bench", name, "--help"] for name in BENCHMARKS},
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHILD],
        input=json.dumps(list(cases.values())), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(
    ("case", "start", "part"),
    [
        ("serve other", "2 ", "not ['GPT2LMHeadModel']"),
        ("serve bare", "2 ", "has neither model.safetensors nor"),
        ("serve cut", "2 ", "is not a whole safetensors file"),
        ("serve wrong", "2 ", "lacks the tensor "),
        ("serve quantised", "2 ", "holds quantised weights (GPTQ or AWQ)"),
        ("serve long", "2 ", "--max-model-len 1000000 is too long"),
        ("serve pool", "2 ", "cannot hold one request of 4096 tokens"),
        ("serve fp8 pool", "2 ", "cannot hold one request of 4096 tokens"),
        ("serve gpu pool", "2 ", "cannot hold one request of 4096 tokens"),
        ("serve nowhere", "2 ", "is not a directory"),
        ("generate other", "2 ", "not ['GPT2LMHeadModel']"),
        ("generate stdin", "2 ", "has neither model.safetensors nor"),
        ("LLM other", "ConfigError: ", "not ['GPT2LMHeadModel']"),
        ("LLM bare", "ConfigError: ", "has neither model.safetensors nor"),
        ("plan", "0 ", '"architecture": "LlamaForCausalLM"'),
    ],
)
def test_z07_a_model_is_refused_without_torch_and_without_a_process(
    refusals: dict[str, str], case: str, start: str, part: str
) -> None:
    assert refusals[case].startswith(start) and part in refusals[case], refusals[case]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_z07_help_of_a_benchmark_needs_no_torch(refusals: dict[str, str], name: str) -> None:
    said = refusals[f"bench {name}"]
    assert said.startswith("0 usage: ") and f"stratakv bench {name}" in said, said


def test_z07_the_core_asks_what_the_front_asked() -> None:
    from stratakv.engine.core import engine_core
    from stratakv.engine.core.setup import model_check

    for name in ("blocks_of_pool", "check_backend", "demand_of"):
        assert getattr(engine_core, name) is getattr(model_check, name)


@pytest.mark.parametrize("given", [[], ["--python", "its-python"]])
def test_z03_an_import_that_takes_long_is_a_warning(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def be_slow(command: list[str], **options: float) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(python_checks.subprocess, "run", be_slow)
    words = ["doctor", "vllm", "--cpu-bytes", "1MiB", "--region-bytes", "1MiB", *given]
    assert main(words) == 0, "nothing is known to be wrong"
    said = capsys.readouterr().out
    [line] = [each for each in said.splitlines() if " python: " in each]
    assert line.startswith("warning ") and "has not imported vLLM within 180 s" in line
    assert "--python" not in said and "\n0 problems, " in said


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The scripts in a clone, whose python3 has no StrataKV."""
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("kube*", "__*"))
    (tmp_path / "bin").mkdir()
    _program(tmp_path / "bin" / "python3", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHON", raising=False)
    return tmp_path


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", ["cluster.sh", "two-engines.sh"])
def test_z04_the_python_of_the_clone_is_found(clone: Path, script: str) -> None:
    _program(clone / ".venv/bin/python", f'exec {sys.executable} "$@"')
    done = run([str(clone / "deploy" / script), "--help"])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "usage: " in done.stdout


@pytest.mark.parametrize("script", ["cluster.sh", "two-engines.sh"])
def test_z04_without_any_it_says_what_to_name(
    clone: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run([str(clone / "deploy" / script), "--help"])
    assert done.returncode == 2
    assert "StrataKV is not installed for python3; name the Python" in done.stderr
    assert "PYTHON=" in done.stderr
    monkeypatch.setenv("PYTHON", "/nowhere/python")
    done = run([str(clone / "deploy" / script), "--help"])
    assert done.returncode == 2 and "not installed for /nowhere/python" in done.stderr


def _planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", "--no-probe", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_z06_a_size_is_shown_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    said = _planned(capsys, "--memory", "24GiB", "--cpu", "16GiB", "--ssd", "1.5 TiB")
    for part in ("memory 24 GiB 100.0%", "pool 24.0 GiB ", "cpu 16 GiB ", "ssd 1.5 TiB "):
        assert part in said
    assert " 28.0 GB/s " in said, "rates are in powers of 1000"
    assert " MB" not in said
    mixed = _planned(capsys, "--memory", "24GB", "--cpu", "16GiB", "--reserve", "1000000000")
    for part in ("memory 24 GB 100.0%", "weights 21.9 MB", "cpu 16 GiB ", "activations 1.00 GB"):
        assert part in mixed


def test_z06_the_verdict_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    said = _planned(capsys, "--memory", "24GiB")
    assert "tiers do not pay here: no prefix is loaded from cpu or ssd or network sooner" in said
    assert "4,096 tokens are computed in 219 µs and loaded from cpu in 899 µs" in said
    assert "reference figures" in said and "never" not in said
    some = _planned(capsys, "--memory", "24GiB", "--prefill-tokens-per-second", "1e6",
                    "--ssd-bandwidth", "1MB")  # fmt: skip
    assert "computing it: from cpu always, from ssd never, from network always" in some


@pytest.mark.parametrize("is_there", [False, True])
def test_z09_a_start_says_that_torch_is_imported(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from stratakv.engine.core import engine_core

    monkeypatch.setattr(engine_core, "EngineCore", lambda config: "the core")
    if not is_there:
        monkeypatch.delitem(sys.modules, "torch")
    server: Any = SimpleNamespace(_start=SimpleNamespace(config=None))
    with caplog.at_level(logging.INFO):
        assert process.CoreServer._build(server) == "the core"
    assert caplog.messages == ([] if is_there else ["importing torch"])


@pytest.mark.parametrize(
    ("given", "level"), [("debug", "DEBUG"), ("info", "WARNING"), ("error", "ERROR")]
)
def test_z09_uvicorn_says_nothing_of_its_own_start(
    given: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stratakv.engine.api.http.http_server import make_server

    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "level", logger.level)
    make_server(lambda *_: None, log_level=given, shutdown_seconds=1.0)  # type: ignore[arg-type]
    assert logging.getLevelName(logger.level) == level


def _installed(tmp_path: Path, pip: str) -> subprocess.CompletedProcess[str]:
    """`make env` with programs that only say something."""
    for name in ("python", "stratakv"):
        _program(tmp_path / "venv/bin" / name, "echo much; echo more >&2")
    _program(tmp_path / "venv/bin/pip", pip)
    words = [f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}", f"INSTALL_LOG={tmp_path}/log"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "--no-print-directory", *words, "env"], cwd=DEPLOY.parent, env=environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_z09_an_installation_is_one_line(tmp_path: Path) -> None:
    done = _installed(tmp_path, "seq 100; seq 100 >&2")
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert f"installing StrataKV and what its tests need into {tmp_path}/venv" in done.stderr
    assert "much" in (tmp_path / "log").read_text()
    again = _installed(tmp_path, "exit 1")
    assert (again.returncode, again.stderr) == (0, ""), "nothing is missing"


def test_z09_an_installation_that_fails_shows_why(tmp_path: Path) -> None:
    done = _installed(tmp_path, "seq 100; echo no space left >&2; exit 3")
    assert done.returncode != 0
    assert "no space left" in done.stderr and f"is in {tmp_path}/log" in done.stderr
    assert done.stderr.count("\n") < 30
    assert not list((tmp_path / "venv").glob(".installed-*"))
