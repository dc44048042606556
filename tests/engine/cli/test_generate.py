# SPDX-License-Identifier: Apache-2.0
"""`stratakv generate` prints what the Python API gives, and only that, on standard output."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.cli.main import main

FLAGS = ["--num-blocks", "60", "--num-threads", "1", "--dtype", "float64"]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> str:
    """12 greedy tokens after `Hello`."""
    with LLM(tiny_model, num_blocks=60, num_threads=1, dtype="float64") as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return llm.generate("Hello", params)[0].text


def test_a_prompt_from_the_command_line(
    tiny_model: Path, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(tiny_model), "--prompt", "Hello", "--max-tokens", "12", "--ignore-eos"]
    assert main([*words, *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert out == expected + "\n"
    assert "[12 tokens in " in err
    assert "ended by length]" in err


def test_a_prompt_from_standard_input(
    tiny_model: Path,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    stop = expected[4:6]
    words = ["generate", str(tiny_model), "--prompt", "-", "--max-tokens", "12", "--ignore-eos"]
    assert main([*words, "--stop", stop, *FLAGS]) == 0
    out, err = capsys.readouterr()
    assert out == expected.partition(stop)[0] + "\n"
    assert "ended by stop]" in err


def test_a_prompt_that_does_not_fit(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny_model), "--prompt", "x" * 300, *FLAGS]) == 2
    assert "the prompt has 300 tokens and at most 255 fit" in capsys.readouterr().err


def test_a_pool_too_small_for_one_request(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny_model), "--prompt", "x", "--num-blocks", "16"]) == 2
    assert "it takes 17 blocks (--num-blocks 17" in capsys.readouterr().err


def test_a_directory_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "config.json" in capsys.readouterr().err
