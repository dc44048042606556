# SPDX-License-Identifier: Apache-2.0
"""Sections of `stratakv bench offload` that step engines: on a tiny plan, and what they refuse."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from stratakv.benchmarks.harness.peer import PeerFailed
from stratakv.benchmarks.offload import command as offload
from stratakv.benchmarks.offload import hybrid
from stratakv.benchmarks.offload import scale as offload_scale
from stratakv.benchmarks.offload import sections as sections
from stratakv.benchmarks.offload import workbench as offload_bench
from stratakv.benchmarks.offload.scale import COSTS, GATES, QUICK_COSTS, SECTIONS
from stratakv.benchmarks.offload.sections import read_seconds
from stratakv.benchmarks.offload.workbench import (
    MeasuredEngine,
    OtherTokens,
    Pairs,
    Prompts,
    Run,
    RunFailed,
    Step,
    count_ties,
    take_pairs,
)
from stratakv.benchmarks.offload.workbench import _Threads as Threads
from stratakv.connector.device import cpu
from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.tiers.base import StoreTier
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.testing.fault_plan import parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore

TINY = dataclasses.replace(
    QUICK_COSTS,
    pairs=2, warm_up=1, slab_blocks=32, requests=3, prompt_tokens=128, output_tokens=4,
    prefixes={96: 1}, mixes=(50,), convoy_requests=2, convoy_prefix=96, convoy_output=2,
    step_tokens=64, long_prompts=3, long_prompt_tokens=192,
    hybrid_prefix=96,
)  # fmt: skip


SMALL_HYBRID = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip


@pytest.fixture
def bench(tmp_path: Path) -> offload_bench.Bench:
    return offload_bench.Bench(EMBEDDED_MODEL, tmp_path, TINY, lambda _what: None)


@pytest.mark.slow
def test_all_sections_of_a_tiny_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sections, "QUICK_COSTS", TINY)
    monkeypatch.setattr(offload, "QUICK_COSTS", TINY)
    monkeypatch.setattr(hybrid, "CONFIG", hybrid.CONFIG | SMALL_HYBRID)
    told: list[str] = []

    def here(*arguments: Any) -> dict[str, Any]:
        *others, hear = arguments
        return sections.measure_here(*others, lambda what: (told.append(what), hear(what)))

    monkeypatch.setattr(offload, "measure_in_child", here)
    words = ["bench", "offload", "--quick", "--sections", ",".join(COSTS), "--out", str(tmp_path)]
    assert main(words) == 0
    written = json.loads((tmp_path / "offload.json").read_text())
    assert written["ratios"].keys() >= GATES.keys()
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in written["ratios"].values())
    figures = written["figures"]
    assert figures["sections"] == list(COSTS)
    no_hit = figures["no_hit"]
    assert no_hit["pairs"] == no_hit["writing_all"]["pairs"] == TINY.pairs
    assert no_hit["unadmitted_blocks"] > 0 == no_hit["writing_all"]["unadmitted_blocks"]
    assert list(figures["worst_case"]) == [
        f"50% hits, prefix 96, {speed} tier" for speed in ("normal", "slow")
    ]
    normal, slow = figures["worst_case"].values()
    assert normal["delay_seconds"] == 0 < slow["delay_seconds"]
    assert written["ratios"]["worst_case"] == min(normal["cpu_ratio"], slow["cpu_ratio"])
    assert figures["streaming"]["stored_blocks"] > 0
    assert len(told) == offload_scale.num_pairs(COSTS, TINY)
    assert (tmp_path / "offload-costs.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "offload.png").exists()
    assert "equal prompts gave equal tokens" in capsys.readouterr().out


def test_no_hit_is_measured_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figure is the median of them; all are in the table and the JSON, the first one first."""
    asked: list[list[str]] = []
    answers = iter([0.95, 0.99, 0.98])

    def measure(sections: list[str], *_: object) -> dict[str, Any]:
        asked.append(sections)
        ratios = {"no_hit_throughput": next(answers)}
        ratios |= {"convoy": 2.0} if "convoy" in sections else {}
        return {"figures": {name: {} for name in sections}, "ratios": ratios}

    monkeypatch.setattr(offload, "measure_in_child", measure)
    monkeypatch.setattr(offload, "QUICK_COSTS", dataclasses.replace(TINY, processes=3))
    words = ["bench", "offload", "--quick", "--sections", "no_hit,convoy", "--out", str(tmp_path)]
    assert main(words) == 0
    assert asked == [["no_hit", "convoy"], ["no_hit"], ["no_hit"]]
    written = json.loads((tmp_path / "offload.json").read_text())
    assert written["ratios"] == {"no_hit_throughput": 0.98, "convoy": 2.0}
    each = {"no_hit_throughput": [0.95, 0.99, 0.98], "convoy": [2.0]}
    assert written["figures"]["costs"]["processes"] == each
    shown = capsys.readouterr().out
    assert "0.980" in shown and "0.950 0.990 0.980" in shown


@pytest.mark.slow
def test_the_process_of_its_own(tmp_path: Path, one_layer: Path) -> None:
    told: list[str] = []
    found = sections.measure_in_child(["streaming"], one_layer, tmp_path, True, told.append)
    assert told == ["streaming"] * (QUICK_COSTS.pairs + QUICK_COSTS.warm_up)
    assert found["ratios"].keys() == {"step_time_while_streaming", "step_cpu_while_streaming"}


def test_a_process_that_fails_tells_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child"
    child.write_text("""#!/bin/sh\necho '{"done": "this"}'; echo '{"error": "no disk"}'\n""")
    child.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(child))
    told: list[str] = []
    with pytest.raises(PeerFailed, match="no disk"):
        sections.measure_in_child(["convoy"], EMBEDDED_MODEL, tmp_path, True, told.append)
    assert told == ["this"]
    child.write_text("#!/bin/sh\necho out of memory >&2\nexit 9\n")
    words = ["bench", "offload", "--quick", "--sections", "convoy", "--out", str(tmp_path)]
    assert main(words) == 1
    reason = " ".join(capsys.readouterr().err.split())
    assert "bench offload: the measuring process ended with code 9 out of memory" in reason
    assert not (tmp_path / "offload.json").exists()


def test_sections_are_chosen_by_name() -> None:
    assert offload_scale.chosen_sections(None, quick=True) == ["phases"]
    assert offload_scale.chosen_sections(None, quick=False) == list(SECTIONS)
    assert offload_scale.chosen_sections("convoy, no_hit", quick=True) == ["no_hit", "convoy"]
    with pytest.raises(ConfigError, match="did you mean convoy"):
        offload_scale.chosen_sections("convoi", quick=True)
    with pytest.raises(
        ConfigError, match="--sections takes names by commas, not ''; there are: phases"
    ):
        offload_scale.chosen_sections("", quick=True)


@pytest.mark.parametrize("name", ["worst_case", "convoy"])
def test_loads_that_bring_other_bytes_end_it(
    name: str, bench: offload_bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cpu._copy_runs

    def wrong(source: Any, target: Any, runs: list[tuple[int, int, int]]) -> None:
        real(source, target, [(0, to, length) for _, to, length in runs])

    monkeypatch.setattr(cpu, "_copy_runs", wrong)
    with pytest.raises(OtherTokens, match="with tiers answered"):
        sections.MEASURE[name](bench)


@pytest.mark.slow
def test_a_pool_that_nothing_leaves_is_no_figure(
    bench: offload_bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MeasuredEngine.stats
    monkeypatch.setattr(MeasuredEngine, "stats", lambda self: real(self) | {"stored_blocks": 7})
    # The pool has room for as many again.
    bench.scale = dataclasses.replace(
        TINY, prompt_tokens=32, output_tokens=2, requests=4, pairs=1, warm_up=0
    )
    with pytest.raises(RunFailed, match="only 0 left it"):
        sections.no_hit(bench)


def test_tiers_that_have_nothing_are_no_worst_case(
    bench: offload_bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sections, "prime", lambda bench, _engine, prefix, _count: [bench.tokens(prefix)]
    )
    bench.scale = dataclasses.replace(TINY, mixes=(50,), pairs=1, warm_up=0)
    with pytest.raises(RunFailed, match="never found to have a block"):
        sections.worst_case(bench)


def test_a_store_can_be_wrapped(bench: offload_bench.Bench) -> None:
    stores: list[FaultyStore] = []

    def wrap(store: StoreTier) -> StoreTier:
        stores.append(FaultyStore(store, parse_faults("load:error=1")))
        return stores[-1]

    options = {"num_blocks": 12, "max_model_len": 140}
    # On a busy machine computing may be quicker than loading.
    with bench.tiered(options, 18, 200, wrap, kv_offload_load="always") as engine:
        known = offload_bench.prime(bench, engine, 96, 4)
        run = engine.run([known[0] + bench.tokens(32)], offload_bench.greedy(2))
        assert not run.cached_tokens.get("ssd")
        assert engine.stats()["tiers"]["ssd"]["errors"]["injected_load_error"] > 0
        stores[0].plan = parse_faults("")
        run = engine.run([known[1] + bench.tokens(32)], offload_bench.greedy(2))
        assert run.cached_tokens["ssd"] > 0


class Fake:
    """An engine that answers what it is told to, and notes when it is asked."""

    def __init__(self, name: str, seconds: float, asked: list[str]) -> None:
        self.name, self.seconds, self.asked = name, seconds, asked
        self.chances: dict[int, float] = {}

    def run(self, prompts: Prompts) -> Run:
        self.asked.append(self.name)
        return Run([[1] for _ in prompts], {}, self.seconds, 2 * self.seconds)

    def likeliest(self, _context: list[int], _count: int) -> dict[int, float]:
        return self.chances


class Found:
    """An engine of which nothing is asked but what it has found."""

    def stats(self) -> dict[str, Any]:
        return {"lookup_hits": {}}


def fake(name: str = "plain", seconds: float = 1.0, asked: list[str] | None = None) -> Any:
    return Fake(name, seconds, [] if asked is None else asked)


def test_sides_take_turns() -> None:
    asked: list[str] = []
    told: list[None] = []
    pairs = take_pairs(
        fake("tiers", 2.0, asked), fake("plain", 1.0, asked), lambda number: [[number]],
        lambda engine, prompts: cast("Any", engine).run(prompts),
        pairs=3, warm_up=1, told=lambda: told.append(None),
    )  # fmt: skip
    assert asked == ["plain", "tiers", "tiers", "plain"] * 2
    assert len(pairs.without) == 3 and len(told) == 4
    assert (pairs.cpu_ratio, pairs.wall_ratio) == (0.5, 0.5)
    figures = pairs.figures(10)
    assert figures["cpu_quartiles"] == (0.5, 0.5)
    assert figures["cpu_seconds_per_token_with_tiers"] == 0.2
    assert figures["wall_seconds_without"] == 2.0


@pytest.mark.parametrize("near", [True, False])
def test_what_is_left_open_takes_more_pairs_once(near: bool) -> None:
    seen: list[int] = []

    def needs_more(taken: Pairs) -> bool:
        seen.append(len(taken.without))
        return near

    numbers: list[int] = []
    pairs = take_pairs(
        fake(), fake(), lambda number: [[numbers.append(number) or number]],
        lambda engine, prompts: cast("Any", engine).run(prompts),
        pairs=3, warm_up=1, told=lambda: None, more=4, needs_more=needs_more,
    )  # fmt: skip
    assert seen == [3]
    assert len(pairs.without) == len(pairs.with_tiers) == (7 if near else 3)
    assert numbers == list(range(8 if near else 4)), "mixes go on"


def test_the_ratio_is_the_median_of_ratios() -> None:
    runs = [[Run([], {}, seconds) for seconds in side] for side in ([4.0, 1.0, 2.0], [2.0] * 3)]
    assert Pairs(runs[0], runs[1]).cpu_ratio == 1.0


def test_neighbours_are_compared_together() -> None:
    def runs(*seconds: float) -> list[Run]:
        return [Run([], {}, each, each) for each in seconds]

    # Every second request is a hit, which costs a quarter: half of the pairs say nothing of a mix.
    pairs = Pairs(runs(1, 4, 1, 4), runs(4, 4, 4, 4), window=2)
    assert pairs.cpu_ratio == 8 / 5 and pairs.ratios("cpu_seconds") == [8 / 5] * 3
    assert pairs.figures(10)["window"] == 2


def test_a_mix_has_its_share_of_hits_in_every_window(bench: offload_bench.Bench) -> None:
    asked: list[bool] = []

    class Noting(offload_bench.Bench):
        def pairs(self, what: str, *others: Any) -> Pairs:
            prompts_of, window = others[2], others[4]
            asked.extend(prompts_of(number)[0][0] == "known" for number in range(3 * window))
            return Pairs([Run([], {}, 1.0, 1.0)], [Run([], {}, 1.0, 1.0)])

    for mix, (hits, window) in offload_scale.MIXES.items():
        asked.clear()
        sections._cell(
            Noting(EMBEDDED_MODEL, bench.scratch, TINY, lambda _what: None),
            "a cell", cast("Any", Found()), cast("Any", None), mix, 96,
            itertools.repeat(cast("Any", ["known"])),
        )  # fmt: skip
        assert 100 * hits == mix * window
        for start in range(2 * window):
            assert sum(asked[start : start + window]) == hits


def test_ties_are_counted_and_nothing_else() -> None:
    plain = fake()
    plain.chances = {7: -0.6931, 8: -0.6932}
    assert count_ties(plain, [[1], [2]], [[5, 7], [3]], [[5, 8], [3]]) == 1
    plain.chances = {7: -0.5, 8: -0.6}
    with pytest.raises(OtherTokens, match=r"answered \[5, 7\], without them \[5, 8\]"):
        count_ties(plain, [[1]], [[5, 7]], [[5, 8]])
    plain.chances = {7: -0.6931, 9: -0.6932}
    with pytest.raises(OtherTokens):
        count_ties(plain, [[1]], [[5, 7]], [[5, 8]])
    with pytest.raises(OtherTokens):
        count_ties(plain, [[1]], [[5]], [[5, 8]])


def test_an_engine_tells_its_likeliest_tokens(bench: offload_bench.Bench) -> None:
    with bench.plain({"num_blocks": 12, "max_model_len": 140}) as engine:
        prompt = bench.tokens(40)
        [[first]] = engine.run([prompt], offload_bench.greedy(1)).token_ids
        likeliest = engine.likeliest(prompt, 2)
        assert len(likeliest) == 2 and max(likeliest, key=lambda t: likeliest[t]) == first
        assert engine.run([prompt], offload_bench.greedy(1)).cached_tokens == {"pool": 0}
        with pytest.raises(RunFailed, match="a request failed: the prompt has 140"):
            engine.run([bench.tokens(140)], offload_bench.greedy(1))


def test_an_engine_without_tiers_finds_nothing() -> None:
    sections.expect_nothing_cached(Pairs([], [Run([], {"pool": 0})]), "this")
    with pytest.raises(RunFailed, match="this: the engine without tiers found 16"):
        sections.expect_nothing_cached(Pairs([], [Run([], {"pool": 16})]), "this")


def test_steps_are_compared_with_the_same_steps() -> None:
    def step(tokens: int, seconds: float, stored: int) -> Step:
        return Step(tokens, seconds, seconds / 2, stored)

    run = Run([], steps=[step(8, 9.0, 0), step(8, 2.0, 1), step(8, 4.0, 3), step(3, 1.0, 1)])
    other = Run([], steps=[step(8, 1.0, 0), step(8, 1.0, 0), step(8, 3.0, 0), step(3, 1.0, 0)])
    found = sections.full_steps(run, other, 8)
    assert (found["steps"], found["stored_blocks"]) == (2, 4)
    assert (found["wall_with"], found["wall_without"]) == (3.0, 2.0)
    assert (found["cpu_with"], found["cpu_without"]) == (1.5, 1.0)
    with pytest.raises(RunFailed, match="nothing left the pool"):
        sections.full_steps(other, run, 8)
    with pytest.raises(RunFailed, match="the same steps"):
        sections.full_steps(run, Run([], steps=other.steps[1:]), 8)


def test_other_threads_are_charged() -> None:
    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    threads = Threads()
    burn(0.05)
    own = threads.take()
    helper = threading.Thread(target=burn, args=(0.05,))
    helper.start()
    helper.join()
    assert own < 0.03, "the stepping thread is charged elsewhere"
    assert threads.take() >= 0.05


def test_the_disk_is_probed_with_real_blocks(bench: offload_bench.Bench, tmp_path: Path) -> None:
    seconds = read_seconds(tmp_path / "probe", bench.layout, 3)
    assert 0 < seconds < 5


def test_an_engine_that_never_answers(
    bench: offload_bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratakv.benchmarks.offload.workbench.RUN_SECONDS", 0.05)
    with bench.plain({"num_blocks": 12, "max_model_len": 140}) as engine:
        monkeypatch.setattr(engine.core, "has_work", lambda: False)
        monkeypatch.setattr(engine.core, "idle_seconds", lambda: 0.01)
        with pytest.raises(RunFailed, match="1 requests had no answer"):
            engine.run([bench.tokens(40)], offload_bench.greedy(1))
        assert isinstance(engine, MeasuredEngine)


def test_a_model_that_is_too_short() -> None:
    offload_scale.check_context(EMBEDDED_MODEL, COSTS, QUICK_COSTS)
    long = dataclasses.replace(QUICK_COSTS, convoy_prefix=5000)
    offload_scale.check_context(EMBEDDED_MODEL, ["worst_case"], long)
    with pytest.raises(ConfigError, match="context of 4096 tokens and the sections convoy take 50"):
        offload_scale.check_context(EMBEDDED_MODEL, ["convoy"], long)
