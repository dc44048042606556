# SPDX-License-Identifier: Apache-2.0
"""Whole engines that load, compute, or do both at once: the same greedy tokens in float64."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from stratakv.connector.costs.economics import STORE_PRIOR
from stratakv.engine.core.engine_core import EngineCore
from stratakv.tiers import assemble
from stratakv.tiers.testing.fault_plan import parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore

from .leftovers import check_nothing_left, is_busy
from .test_exactness import ask, documents, prompt, running_core
from .tiny_models import greedy_reference, make_llama

TOKENS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("choice"))


@pytest.fixture(scope="module")
def texts(model: Path) -> list[tuple[list[int], list[int]]]:
    return documents(model)


def offload(path: Path, **changes: Any) -> dict[str, Any]:
    tiers = {"tiers": ("cpu", "ssd"), "cpu_bytes": 2**20, "ssd_path": path, "ssd_bytes": 64 * 2**20}
    return tiers | changes


def counts(core: EngineCore) -> dict[str, Any]:
    return dict(core.call("stats", "")["scheduler"])


def check_end(core: EngineCore) -> None:
    core.step()
    while core.has_work() or is_busy(core):
        core.step()
    check_nothing_left(core)


@pytest.mark.parametrize("tiers", [("cpu",), ("cpu", "ssd")])
def test_both_at_once(
    model: Path, tmp_path: Path, texts: list[tuple[list[int], list[int]]], tiers: tuple[str, ...]
) -> None:
    settings = offload(tmp_path, tiers=tiers, load="both", cpu_bytes=64 * 2**20)
    budget = {"max_num_batched_tokens": 24}
    with running_core(model, cache={"num_blocks": 36}, offload=settings, scheduler=budget) as core:
        for round_number in range(3):
            for index, (text, expected) in enumerate(texts):
                [answer] = ask(core, [text], tag=f"{round_number}-{index}-")
                assert answer.token_ids == expected
                if round_number:
                    assert 0 < answer.cached["cpu"] < 168
        assert counts(core)["meetings"] == 2 * len(texts)
        check_end(core)


def test_both_at_once_from_the_ssd_in_one_batch(
    model: Path, tmp_path: Path, texts: list[tuple[list[int], list[int]]]
) -> None:
    """Requests that share nothing and requests that share a prefix, more than there is room for."""
    root = prompt(3, 120)
    mixed = [root + prompt(50 + i, 20 + i) for i in range(4)]
    prompts = [*texts, *[(text, greedy_reference(model, text, TOKENS)) for text in mixed]]
    settings = offload(tmp_path, load="both")
    budget = {"max_num_batched_tokens": 16}
    with running_core(model, cache={"num_blocks": 48}, offload=settings, scheduler=budget) as core:
        for round_number in range(4):
            answers = ask(core, [text for text, _ in prompts], tag=f"{round_number}-")
            assert [answer.token_ids for answer in answers] == [said for _, said in prompts]
        seen = counts(core)
        assert seen["meetings"] > 0
        assert seen["preemptions"] > 0, "the pool was meant to be too small"
        check_end(core)


@pytest.mark.parametrize("load", ["auto", "both", "always"])
def test_a_store_that_fails_and_dawdles(
    model: Path,
    tmp_path: Path,
    texts: list[tuple[list[int], list[int]]],
    load: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = assemble.open_ssd
    plan = parse_faults("load:error=0.2,load:miss=0.1,load:delay=0.001..0.03")
    monkeypatch.setattr(
        assemble,
        "open_ssd",
        lambda *args, **options: FaultyStore(real(*args, **options), plan, seed=7),
    )
    with running_core(
        model, cache={"num_blocks": 36}, offload=offload(tmp_path, load=load)
    ) as core:
        for round_number in range(4):
            for index, (text, expected) in enumerate(texts):
                [answer] = ask(core, [text], tag=f"{round_number}-{index}-")
                assert answer.token_ids == expected
        check_end(core)


@pytest.mark.parametrize("load", ["auto", "both"])
def test_several_at_once_from_a_store_that_fails_and_dawdles(
    model: Path,
    tmp_path: Path,
    texts: list[tuple[list[int], list[int]]],
    load: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some computed, some loaded, some both, all of them asked together."""
    real = assemble.open_ssd
    plan = parse_faults("load:error=0.2,load:miss=0.1,load:delay=0.001..0.03")
    monkeypatch.setattr(
        assemble,
        "open_ssd",
        lambda *args, **options: FaultyStore(real(*args, **options), plan, seed=11),
    )
    settings = offload(tmp_path, load=load)
    budget = {"max_num_batched_tokens": 24}
    with running_core(model, cache={"num_blocks": 60}, offload=settings, scheduler=budget) as core:
        for round_number in range(4):
            answers = ask(core, [text for text, _ in texts], tag=f"{round_number}-")
            assert [answer.token_ids for answer in answers] == [said for _, said in texts]
        if load == "both":
            assert counts(core)["meetings"] > 1
        check_end(core)


def test_a_tier_that_is_too_slow_is_left_alone(
    model: Path,
    tmp_path: Path,
    texts: list[tuple[list[int], list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a request pays for a store that takes ages is about what computing takes."""
    # Or computing may be known to be the quicker one from the start.
    monkeypatch.setattr(EngineCore, "_try_offload", lambda _core: None)
    with running_core(model, cache={"num_blocks": 36}, offload=offload(tmp_path)) as core:
        for index, (text, _) in enumerate(texts):
            ask(core, [text], tag=f"{index}-")
    real, plan = assemble.open_ssd, parse_faults("load:delay=4.0")
    monkeypatch.setattr(
        assemble, "open_ssd", lambda *args, **options: FaultyStore(real(*args, **options), plan)
    )
    with running_core(model, cache={"num_blocks": 36}, offload=offload(tmp_path)) as core:
        began = time.monotonic()
        for index, (text, expected) in enumerate(texts):
            [answer] = ask(core, [text], tag=f"slow-{index}-")
            assert answer.token_ids == expected
            assert not answer.cached.get("ssd")
        # To wait for each would take 20 seconds.
        assert time.monotonic() - began < 10.0
        stats = core.call("stats", "")["connector"]
        assert stats["failures"]["slow"] >= 1
        assert stats["estimates"]["fixed_seconds"]["ssd"] > 2 * STORE_PRIOR[0]
