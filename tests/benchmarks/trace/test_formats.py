# SPDX-License-Identifier: Apache-2.0
"""Traces from files: what is read of them, and every refusal with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stratakv.benchmarks.trace import formats
from stratakv.benchmarks.trace.formats import TraceError, read_trace, trace_files, trace_name


def line(ids: list[Any], timestamp: float = 0, **fields: Any) -> str:
    written = {"timestamp": timestamp, "input_length": 512 * len(ids), "output_length": 7,
               "hash_ids": ids} | fields  # fmt: skip
    return json.dumps({key: value for key, value in written.items() if value is not None})


def test_both_formats(tmp_path: Path) -> None:
    lines = [line([900, 7], 0, input_length=700), "", line([900, 7, 3], 1500, session_id="trace_1")]
    text = "\n".join(lines) + "\n"
    plain, packed = tmp_path / "a_trace.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    (tmp_path / "README.md").write_text("no trace")
    assert trace_files([tmp_path]) == [plain, packed]
    assert trace_files([packed, tmp_path, packed]) == [packed, plain]
    assert [trace_name(path) for path in (plain, packed)] == ["a", "b"]
    for path in (plain, packed):
        trace = read_trace(path)
        assert [prompt.chain for prompt in trace.prompts] == [[0, 1], [0, 1, 2]]
        assert [prompt.arrival_seconds for prompt in trace.prompts] == [0.0, 1.5]
        assert [prompt.tokens for prompt in trace.prompts] == [700, 3 * 512]
        assert (trace.num_accesses, trace.num_blocks, trace.seconds) == (5, 3, 1.5)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "line 2: .*truncated"),
        ("[1, 2]", "line 2: Expected `object`, got `array`"),
        (line([1], hash_ids=None), "line 2: .*missing required field `hash_ids`"),
        (line([1, -2]), r"line 2: .*\$.hash_ids"),
        (line([1, "2"]), r"line 2: Expected `int`, got `str` - at `\$.hash_ids"),
        (line([1, 2.5]), r"line 2: Expected `int`, got `float`"),
        (line([1, True]), r"line 2: Expected `int`, got `bool`"),
        (line([1], -1.0), r"line 2: .*\$.timestamp"),
        (line([1], 1e300), r"line 2: .*\$.timestamp"),
        (line([1], input_length=-1), r"line 2: .*\$.input_length"),
        (line([1], input_length=1025), "line 2: 1 hash_ids for input_length 1025; expected 2 full"),
        (line([1], input_length=100, output_length=2**60), r"line 2: .*\$.output_length"),
        (line([1, 2, 3], input_length=1024), "line 2: 3 hash_ids for input_length 1024"),
        (line([1, 1], 6), "line 2: id 1 follows another id than before"),
        (line([2, 1], 6), "line 2: id 1 follows another id than before"),
        (line([1], 4.0), "line 2: timestamp 4 comes after 5; sort the lines"),
    ],
)
def test_a_line_that_is_refused(bad: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line([1], 5.0) + "\n" + bad + "\n")
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"timestamp": "\xff"}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1"):
        read_trace(path)


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("MAX_LINE_BYTES", "line 1 is longer than 100 bytes"),
        ("MAX_FILE_BYTES", "unpacks to more than 100 bytes"),
    ],
)
def test_what_unpacks_to_too_much(
    limit: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line without an end, or lines without an end: a small file, refused after the limit."""
    path = tmp_path / "t.jsonl.gz"
    unpacked = b" " * 10**7 if limit == "MAX_LINE_BYTES" else b"\n" * 10**7
    path.write_bytes(gzip.compress(unpacked))
    monkeypatch.setattr(formats, limit, 100)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


@pytest.mark.parametrize("limit", ["MAX_REQUESTS", "MAX_ACCESSES"])
def test_too_many(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text((line([1]) + "\n") * 3)
    monkeypatch.setattr(formats, limit, 2)
    with pytest.raises(TraceError, match=r"line 3: more than .* cut the trace"):
        read_trace(path)


def test_packed_bytes_that_are_cut_or_none(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    whole = gzip.compress((line([1]) + "\n").encode() * 50)
    damaged = whole[:20] + bytes([whole[20] ^ 0xFF]) + whole[21:]
    for content in (whole[:-12], b"not gzip at all", damaged):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"cannot be read|line 1"):
            read_trace(path)


def test_paths_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, other = tmp_path / "t.jsonl", tmp_path / "lengths.csv"
    empty.write_text("\n\n")
    other.write_text("TIMESTAMP,ContextTokens\n")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(empty)
    with pytest.raises(TraceError, match=r"lengths\.csv is not named \*\.jsonl"):
        trace_files([other])
    with pytest.raises(TraceError, match="neither a file nor a folder"):
        trace_files([tmp_path / "nothing"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="holds no file named"):
        trace_files([tmp_path / "folder"])
    monkeypatch.setattr(formats, "MAX_FILES", 0)
    with pytest.raises(TraceError, match="1 traces are too many"):
        trace_files([tmp_path])
