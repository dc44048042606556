# SPDX-License-Identifier: Apache-2.0
"""Z: what a newcomer meets before anything runs; README.md has the ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stratakv.engine.cli.bench import BENCHMARKS

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
    from stratakv.engine.core import engine_core, model_check

    for name in ("blocks_of_pool", "check_backend", "demand_of"):
        assert getattr(engine_core, name) is getattr(model_check, name)
