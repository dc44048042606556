# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench agents` at a size of seconds: what it counts, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from stratakv.benchmarks.agents.command import QUICK, SHORT, Scale, Scene, compare
from stratakv.benchmarks.agents.simulation import (
    BLOCK_SIZE,
    Job,
    Simulation,
    Turn,
    make_jobs,
    read_jobs,
)
from stratakv.benchmarks.trace.formats import TraceError
from stratakv.engine.cli.main import main


def test_what_is_computed_again_is_what_others_displaced() -> None:
    # Two jobs in turn, in a pool that holds one of them: each turn of the first is computed again.
    def job(name: str, start: float) -> Job:
        turns = [Turn(64, 16, "tool", 1.0)] * 3
        return Job(name, start, range(100 + 1000 * int(start), 356 + 1000 * int(start)), turns)

    alone = Simulation([job("a", 0.0)], "fcfs", 40, 0).run()
    assert alone.recomputed_tokens == 0
    both = [job("a", 0.0), job("b", 1.0)]
    fcfs = Simulation(both, "fcfs", 40, 0).run()
    assert fcfs.recomputed_tokens > 0
    assert fcfs.prompt_tokens == 2 * alone.prompt_tokens
    with_tier = Simulation(both, "fcfs", 40, 400).run()
    assert with_tier.recomputed_tokens == 0
    assert with_tier.reloaded_tokens > 0
    assert len(with_tier.first_token_seconds) == 6


def test_a_run_is_the_same_every_time() -> None:
    jobs = make_jobs(3, 6, dict(SHORT))
    first, second = [Simulation(jobs, "continuum", 400, 800).run() for _ in range(2)]
    assert first == second


def test_the_ratios_are_of_all_runs_together() -> None:
    runs = [make_jobs(seed, 8, dict(SHORT)) for seed in range(2)]
    figures = compare(runs, Scene("short", has_long_tools=False, num_blocks=400, tier_blocks=0))
    fcfs, continuum = figures["tokens"]["recomputed"]
    assert figures["ratios"]["recomputed"] == pytest.approx(continuum / fcfs)
    assert len(figures["p99_seconds"]) == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stratakv.benchmarks.agents.command.QUICK", Scale(1, 4, (300,), QUICK.gated // 2)
    )
    trace = tmp_path / "two_trace.jsonl.gz"
    with gzip.open(trace, "wt") as file:
        for time, session, ids in ((0, "a", [1, 2]), (50, "b", [9]), (4000, "a", [1, 2, 3])):
            record = {"timestamp": time, "session_id": session, "hash_ids": ids,
                      "output_length": 700, "input_length": 512}  # fmt: skip
            print(json.dumps(record), file=file)
    words = ["bench", "agents", "--quick", "--out", str(tmp_path), str(trace)]
    assert main(words) == 0
    report = json.loads((tmp_path / "agents.json").read_text())
    assert {"recomputed_over_fcfs_short_tools", "ttft_p99_over_fcfs"} <= set(report["ratios"])
    assert any(name.startswith("two, ") for name in report["figures"]["scenes"])
    assert (tmp_path / "agents.png").stat().st_size > 10_000


def test_recorded_sessions(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"session_id": "a", "timestamp": 500, "hash_ids": [4, 5], "output_length": 9}')
    [job] = read_jobs(path)
    assert (job.arrival_seconds, len(job.turns)) == (0.5, 1)
    assert job.turns[0].prompt is not None
    assert len(job.turns[0].prompt) == 2 * BLOCK_SIZE
    path.write_text('{"session_id": "a"}\n')
    with pytest.raises(TraceError, match=r"line 1 of x.jsonl: .*timestamp"):
        read_jobs(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_jobs(tmp_path / "none.jsonl")
