# SPDX-License-Identifier: Apache-2.0
"""`--step-trace` and `stratakv trace`, from an engine to words and a timeline."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from stratakv import LLM, SamplingParams
from stratakv.engine.cli.main import main
from stratakv.engine.trace.records import (
    VERSION,
    DecisionRecord,
    EventRecord,
    HitRecord,
    StartRecord,
)

from ...pages import find_block


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of two prompts with one prefix, and of a longer one."""
    path = tmp_path_factory.mktemp("trace") / "steps.jsonl"
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with LLM(
        num_threads=1,
        num_blocks=12,
        max_model_len=160,
        kv_offload="cpu",
        kv_offload_cpu_bytes="16MiB",
        step_trace=path,
    ) as llm:
        for prompt in ([5] * 80, [5] * 80 + [6], [7] * 150):
            llm.generate([prompt], params)
    return path


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["trace", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_requests_are_listed_and_explained(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["explain", str(path), "--json"], capsys)
    assert code == 0
    first, second, third = [json.loads(line) for line in out.splitlines()]
    assert first["tokens_found"] == {}
    assert first["num_computed_tokens"] == 83
    assert second["tokens_found"] == {"pool": 80}
    assert second["num_computed_tokens"] == 4
    assert [each["finish_reason"] for each in (first, second, third)] == ["length"] * 3
    code, out, _ = run(["explain", str(path)], capsys)
    assert code == 0
    assert len(out.splitlines()) == 3
    code, out, _ = run(["explain", str(path), second["request_id"]], capsys)
    assert code == 0
    assert "It found 80 in the KV pool." in out
    assert "It computed 4 tokens in 4 steps." in out
    assert "with 4 tokens: it had as many tokens as it may have." in out


def test_the_example_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`docs/step-trace.md` shows what is said of a trace like this one."""
    late, early = "cmpl-5a1f", "cmpl-5a07"
    hit = HitRecord(850, 12.716, late, "", 320, 640, {"cpu": 640}, 1200, 1200, "cpu", True)
    steps = [239, *[1] * 64]
    records = [
        StartRecord(VERSION, "2026-11-24T10:00:00Z", "m", 16, 1000, "cpu"),
        EventRecord(811, 12.0, early, "queued", "", 4000),
        EventRecord(811, 12.1, early, "waits", "room", 4000),
        EventRecord(812, 12.204, late, "queued", "", 1200),
        EventRecord(840, 12.634, early, "scheduled", "", 4000),
        EventRecord(840, 12.634, late, "waits", "seats", 1200),
        hit,
        EventRecord(850, 12.716, late, "loading", "", 1200),
        EventRecord(852, 12.737, late, "loaded", "", 1200),
        EventRecord(852, 12.737, late, "scheduled", "", 1200),
        *(
            DecisionRecord(852 + step, 12.737, [], [], [late], [], {late: count}, count)
            for step, count in enumerate(steps)
        ),
        EventRecord(901, 13.9, late, "preempted", early, 1250),
        EventRecord(901, 13.9, late, "resumed", "", 1250),
        EventRecord(917, 14.514, late, "finished", "length", 1264),
    ]
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
    code, out, _ = run(["explain", str(path), "cmpl-5a1"], capsys)
    summary, _, events = out.partition("\n\n")
    assert code == 0 and len(events.splitlines()) == 8
    assert f"{summary}\n" == find_block("docs/step-trace.md", f"{late}: ").text


def test_the_snapshots_know_both_kinds_of_blocks(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records[0]["record"] == "start"
    assert records[0]["connector_name"] == "cpu"
    snapshots = [record for record in records if record["record"] == "snapshot"]
    last = snapshots[-1]
    assert last["gpu_blocks_total"] == 11
    assert last["cpu_blocks_total"] == last["cpu_blocks_free"] + last["cpu_blocks_cached"]
    assert last["cpu_blocks_cached"] > 0  # what the third prompt displaced
    assert {record["step"] for record in snapshots} == {
        record["step"] for record in records if record["record"] == "decision"
    }


def test_a_timeline_has_a_track_for_every_request(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "timeline.json"
    code, said, _ = run(["export", str(path), "--out", str(out)], capsys)
    assert code == 0
    assert str(out) in said
    events = json.loads(out.read_text())
    names = [event["args"]["name"] for event in events if event.get("name") == "thread_name"]
    assert len(names) == 4  # the steps and three requests
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} >= {"waiting", "running", "step 1"}
    assert all(event["dur"] >= 0 for event in spans)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["explan"], "did you mean explain"),
        ([], "takes explain, export"),
        (["explain", "FILE", "nobody"], "has no request 'nobody'"),
        (["explain", "/none/at/all"], "cannot be read"),
        (["export", "FILE", "--out", "/none/at/all"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_said(
    path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run([str(path) if word == "FILE" else word for word in words], capsys)
    assert code == 2
    assert reason in err
