# SPDX-License-Identifier: Apache-2.0
"""U9: what the command line says of sizes, and of options that are not built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stratakv.engine.config.engine_options import engine_config

from .refusals import refused

pytestmark = pytest.mark.regression


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--kv-offload cpu --kv-offload-cpu-bytes 100kB", ["at least 1MiB, not 100kB"]),
        ("--kv-offload cpu,ssd --kv-offload-ssd-bytes 1.5MB", ["at least 16MiB, not 1.5MB"]),
        ("--kv-offload cpu,ssd --kv-offload-ssd-bytes 0.5MiB", ["at least 16MiB, not 512KiB"]),
        ("--kv-offload cpu,ssd --kv-offload-ssd-bytes 65537", ["not 65537 bytes (64 KiB)"]),
        (
            "--port 0 --kv-offload cpu --kv-offload-cpu-bytes 500TiB",
            ["was given 500 TiB and the host has ", "iB of memory available"],
        ),
        (
            "--port 0 --kv-offload cpu,ssd --kv-offload-cpu-bytes 8MiB --kv-offload-ssd-path ./s "
            "--kv-offload-ssd-bytes 500TiB",
            ["takes 500 TiB in ", "iB are free; lower its size by ", "MiB or more"],
        ),
    ],
)
def test_u09_sizes_are_said_in_units(
    words: str,
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["serve", *words.split(), "--log-level", "error", "--num-blocks", "70"]
    said = refused([*command, "--max-model-len", "1024"], parts, capsys)
    assert not re.search(r"\d{7,} bytes", said)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--model ./x", ["the model is an argument and no option: stratakv serve ./x"]),
        ("--model=./x", ["the model is an argument and no option: stratakv serve ./x"]),
        ("--tensor-parallel-size 2", ["takes 1 here, not '2'", "are not built"]),
        ("-tp 2", ["-tp is an option of vLLM that is not built here", "one device"]),
        ("--data-parallel-size=2", ["--data-parallel-size is an option of vLLM", "one device"]),
        ("--quantization fp8", ["--quantization", "not built here", "--dtype"]),
        ("--lora-dtype", ["--lora-dtype", "not built here: see --lora-modules"]),
        ("--spec-token-tree x", ["--spec-token-tree", "not built here"]),
        ("--tool-parser-plugin a.py", ["not built here", "see --tool-call-parser"]),
        ("--no-enable-log-requests", ["--no-enable-log-requests", "not built here", "--log-level"]),
        (
            "--limit-mm-per-prompt {}",
            ["not built here: chats take 16 pictures", "see --media-domain"],
        ),
    ],
)
def test_u09_options_that_are_not_built_are_called_that(
    words: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["serve", *words.split()], parts, capsys)
    assert "did you mean" not in said


def test_u09_the_same_in_files_variables_and_the_python_api(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("lora-dtype: auto\n")
    refused(["serve", "--config", str(path)], ["lora_dtype of ", "not built here"], capsys)
    with pytest.raises(ValueError, match="'quantization' is an option of vLLM that is not built"):
        engine_config(None, {"quantization": "fp8"})
    monkeypatch.setenv("STRATAKV_REASONING_PARSER", "x")
    refused(["serve"], ["STRATAKV_REASONING_PARSER is an option of vLLM"], capsys)


def test_u09_dashes_make_no_two_options_alike(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["serve", "--mode", "x"], ["there is no option --mode"], capsys)
    assert "did you mean" not in said
    refused(["serve", "--max-num-seq", "9"], ["did you mean --max-num-seqs?"], capsys)
