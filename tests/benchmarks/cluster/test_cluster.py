# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench cluster`: one case of its quick form, its link, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from stratakv.benchmarks.cluster import command
from stratakv.benchmarks.cluster.cases import (
    FULL,
    QUICK,
    WIDE_MODEL,
    WIDE_TOKEN_BYTES,
    Pairs,
    Prompts,
    Scale,
    _check_handed,
    _check_loaded,
    make_arrivals,
    second_token,
)
from stratakv.benchmarks.cluster.link import LINK_HOST, Bucket, Link
from stratakv.benchmarks.harness.comparison import WrongWork
from stratakv.benchmarks.harness.load_client import StreamedAnswer
from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.harness.served import HOST, free_ports
from stratakv.engine.cli.main import main


def test_a_prompt_is_handed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cluster", "--quick", "--cases", "handover", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "cluster.json").read_text())
    names = ["handover_over_recompute", "whole_over_recompute", "computed_once"]
    assert list(written["ratios"]) == names
    assert written["ratios"]["computed_once"] == 1.0
    assert all(0 < ratio < 100 for ratio in written["ratios"].values())
    pairs = written["figures"]["pairs"]["handover_over_recompute"]
    assert len(pairs["hand-over"]) == len(pairs["computing"]) == QUICK.pairs
    assert (tmp_path / "cluster.png").read_bytes().startswith(b"\x89PNG")
    assert "handover_over_recompute" in capsys.readouterr().out


def test_the_link_keeps_its_rate_and_carries_both_ways(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await writer.drain()
        writer.close()

    async def through(port: int) -> bytes:
        async with await asyncio.start_server(echo, HOST, port):
            reader, writer = await asyncio.open_connection(LINK_HOST, port)
            writer.write(b"bytes")
            answer = await reader.read()
            writer.close()
            return answer

    [port] = free_ports(1)
    with Link([port], tmp_path, 80e6) as link:
        assert link.bare_seconds(10**6) >= 0.09  # a tenth of a second, less the burst
        assert asyncio.run(through(port)) == b"bytes"
        link.set_rate(0)
        assert link.bits_per_second == 0
        assert link.bare_seconds(10**6) > 0


def test_a_bucket_without_a_rate_lets_all_through() -> None:
    bucket = Bucket()
    bucket.take(10**12)
    bucket.bytes_per_second = 1e6
    began = time.monotonic()
    bucket.take(20_000)
    assert time.monotonic() - began >= 0.015


def test_arrivals_follow_from_the_seed_and_have_both_kinds() -> None:
    for scale in (QUICK, FULL):
        arrivals = make_arrivals(scale, 3)
        assert arrivals == make_arrivals(scale, 3)
        assert arrivals != make_arrivals(scale, 4)
        lengths = {len(each.prompt) for each in arrivals}
        assert lengths == {scale.prompt_tokens, scale.chat_tokens[0]}
        assert all(a.at_seconds <= b.at_seconds for a, b in pairwise(arrivals))
        assert arrivals[-1].at_seconds < scale.arrival_seconds


def test_the_first_of_a_pair_alternates_and_the_first_pair_is_not_counted() -> None:
    pairs, calls = Pairs(), []

    def run(side: str, number: int) -> float:
        calls.append(side)
        if side == "ours":
            pairs.see(number=number)
        return number + 1.0

    pairs.take(2, lambda n: run("ours", n), lambda n: run("other", n))
    assert calls == ["ours", "other", "other", "ours", "ours", "other"]
    assert pairs.ours == pairs.others == [2.0, 3.0]
    assert pairs.seen == {"number": [1, 2]}


def test_what_was_not_done_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = StreamedAnswer(prompt_tokens=100, cached_tokens=100, event_seconds=[1.0, 3.0])
    _check_loaded(answer, 0)
    assert second_token(answer) == 3.0
    with pytest.raises(WrongWork, match="computed 1 of 100"):
        _check_loaded(answer, 1)
    answer.cached_tokens = 96
    with pytest.raises(WrongWork, match="computed 0 of 100"):
        _check_loaded(answer, 0)
    _check_handed((1, 0))
    with pytest.raises(WrongWork, match="2 prompts and not 1, 1 of them"):
        _check_handed((2, 1))
    prompts = Prompts(4)
    prompts.check(0, [1, 2])
    assert prompts.prompt(0) == Prompts(4).prompt(0) != prompts.prompt(1)
    with pytest.raises(WrongWork, match="was given the tokens"):
        prompts.check(0, [1, 3])

    def fail(_scale: Scale, _scratch: Path, _stack: object) -> Pairs:
        raise WrongWork("the decode node computed the prompt")

    wrong = command.CASES["wire"]._replace(take=fail)
    monkeypatch.setattr(command, "CASES", {**command.CASES, "wire": wrong})
    assert main(["bench", "cluster", "--cases", "wire", "--out", str(tmp_path)]) == 1
    assert "bench cluster: the decode node computed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pairs", "0"), "--pairs takes 1 to 1000, not 0"),
        (("--cases", "wir"), "--cases takes names by commas, not 'wir'; did you mean wire"),
    ],
)
def test_what_is_refused(
    options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cluster", *options, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_case_has_its_gate_and_its_place_in_the_report() -> None:
    report = Report("cluster", "stratakv bench cluster", figures={"pairs": {}, "spreads": {}})
    for case in command.CASES.values():
        seen = {"whole_seconds": [4.0, 4.0], "computed_once": [1.0, 1.0], "link_reached": [0.9]}
        command.add_pairs(report, case, Pairs([1.0, 3.0], [2.0, 2.0], seen))
        assert report.ratios[case.ratio] == 1.0
        assert report.figures["spreads"][case.ratio] == (0.75, 1.25)
    assert command.GATES.keys() | {command.WHOLE} == report.ratios.keys()
    layers, heads, size = (
        WIDE_MODEL[key] for key in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    )
    assert 2 * layers * heads * size * 4 == WIDE_TOKEN_BYTES
