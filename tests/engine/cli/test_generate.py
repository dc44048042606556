# SPDX-License-Identifier: Apache-2.0
"""`stratakv generate` prints what the Python API gives, and only that, on standard output."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.cli import generate
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


def test_sampling_flags_are_those_of_the_api(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them at once, with bad words that would be there."""
    params = SamplingParams(
        max_tokens=12, temperature=0.8, seed=4, min_p=0.01, repetition_penalty=1.2,
        presence_penalty=0.5, frequency_penalty=-0.5, ignore_eos=True,
    )  # fmt: skip
    with LLM(tiny_model, num_blocks=60, num_threads=1, dtype="float64") as llm:
        whole = llm.generate("Hello", params)[0].text
        bad = tuple(sorted(set(whole) - {"\ufffd", " "}))[:2]
        expected = llm.generate("Hello", msgspec.structs.replace(params, bad_words=bad))[0].text
    assert expected != whole
    flags = [
        "--max-tokens", "12", "--temperature", "0.8", "--seed", "4", "--min-p", "0.01",
        "--repetition-penalty", "1.2", "--presence-penalty", "0.5", "--frequency-penalty=-0.5",
        "--ignore-eos", "--bad-word", bad[0], "--bad-word", bad[1],
    ]  # fmt: skip
    assert main(["generate", str(tiny_model), "--prompt", "Hello", *flags, *FLAGS]) == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--min-p", "2"], "--min-p must be between 0 and 1, got 2"),
        (["--repetition-penalty", "x"], "--repetition-penalty takes a number, not 'x'"),
        (["--presence-penalty", "3"], "--presence-penalty must be between -2 and 2"),
        (["--frequency-penalty=-3"], "--frequency-penalty must be between -2 and 2"),
        (["--seed", "9" * 5000], "--seed takes a whole number, not '9999"),
        (["--max-tokens", "9" * 30], "--max-tokens must be a 64-bit integer"),
        (["--stop", "\udcff"], "--stop must be valid Unicode"),
        (["--extra-args", "a=1"], "--extra-args takes an object in JSON, not 'a=1'"),
        (["--extra-args", "[1]"], "--extra-args must be a map of texts to plain values"),
        (["--extra-args", '{"a": 1}'], "--extra-args cannot be used: extra_args are for"),
        (["--bad-word", ""], "--bad-word must be strings of 1 to 128 characters"),
        (["--bad-word", "  "], "--bad-word must be words that the model's tokens can spell"),
    ],
)
def test_sampling_that_cannot_be(
    tiny_model: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny_model), "--prompt", "x", *flags, *FLAGS]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"\xff", "standard input is no text"),
        (b"xxxxx", "standard input has more than 4 characters"),
    ],
)
def test_standard_input_that_is_no_prompt(
    given: bytes,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
    monkeypatch.setattr(generate, "MAX_PROMPT_CHARACTERS", 4)
    assert main(["generate", "--prompt", "-"]) == 2
    assert words in capsys.readouterr().err


def test_standard_input_that_is_closed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "--prompt", "-", *FLAGS, "--num-blocks", "300"]) == 2
    assert "--prompt cannot be used: it is empty" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny_model), "--prompt", "x" * 300, *FLAGS]) == 2
    assert "the prompt has 300 tokens and at most 255 fit" in capsys.readouterr().err


def test_a_pool_too_small_for_one_request(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(tiny_model), "--prompt", "x", "--num-blocks", "16"]
    assert main([*words, "--max-model-len", "256"]) == 2
    assert "which takes 17 blocks" in capsys.readouterr().err
    assert main([*words, "--max-tokens", "2"]) == 0, "of a length that nobody asked for"


def test_a_directory_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "config.json" in capsys.readouterr().err
