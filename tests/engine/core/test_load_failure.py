# SPDX-License-Identifier: Apache-2.0
"""Drills under a whole engine: a tier fails on purpose, and requests compute or fail as wished."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from .conftest import MakeCore, Reference, prompt_of, request, run

Tiers = dict[str, str]
PROMPT = prompt_of(100)


@pytest.fixture
def saved_tiers(make_core: MakeCore, small_tiers: Tiers) -> Tiers:
    """Tiers whose ssd holds the blocks of PROMPT, and whose cpu tier is empty."""
    core = make_core(**small_tiers)
    run(core, request("r", PROMPT))
    core.shutdown(10.0)
    return small_tiers


def test_without_faults_the_blocks_are_found(
    make_core: MakeCore, saved_tiers: Tiers, greedy_reference: Reference
) -> None:
    result = run(make_core(**saved_tiers), request("r", PROMPT))["r"]
    assert result.cached_tokens_by_tier == {"pool": 0, "ssd": 96}
    assert result.new_token_ids == greedy_reference(PROMPT, 6)


@pytest.mark.parametrize("load", ["always", "both"])
@pytest.mark.parametrize("fault", ["ssd:load:error=1", "load:miss=1", "load:partial=1"])
def test_a_failed_load_is_recomputed(
    make_core: MakeCore, saved_tiers: Tiers, greedy_reference: Reference, load: str, fault: str
) -> None:
    core = make_core(**saved_tiers | {"kv_offload_load": load, "kv_offload_faults": fault})
    result = run(core, request("r", PROMPT))["r"]
    assert result.new_token_ids == greedy_reference(PROMPT, 6)


@pytest.mark.parametrize("load", ["always", "both"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ssd:load:error=1", "did not come from ssd (InjectedFault)"),
        ("ssd:load:miss=1", "did not come from ssd (missed)"),
    ],
)
def test_a_failed_load_fails_its_request_and_no_other(
    make_core: MakeCore,
    saved_tiers: Tiers,
    greedy_reference: Reference,
    load: str,
    fault: str,
    words: str,
) -> None:
    core = make_core(
        kv_offload_load_failure="fail",
        **saved_tiers | {"kv_offload_load": load, "kv_offload_faults": fault},
    )
    other = prompt_of(30)
    results = run(core, request("fails", PROMPT), request("other", other))
    assert results["fails"].finish_reason == "error"
    assert words in (results["fails"].error or "")
    assert results["other"].new_token_ids == greedy_reference(other, 6)
    assert core.scheduler.manager.pool.is_idle
    errors = core.call("stats", "")["connector"]["tiers"]["ssd"]["errors"]
    assert any(name.startswith("injected_load_") for name in errors)


@pytest.mark.parametrize("wish", ["recompute", "fail"])
def test_damaged_blocks_are_computed_again_or_fail_their_request(
    make_core: MakeCore, saved_tiers: Tiers, greedy_reference: Reference, wish: str
) -> None:
    """Of each block some bytes are other ones on the disk."""
    damage_blocks(Path(saved_tiers["kv_offload_ssd_path"]))
    core = make_core(kv_offload_load_failure=wish, **saved_tiers | {"kv_offload_load": "always"})
    result = run(core, request("r", PROMPT))["r"]
    stats = core.call("stats", "")["connector"]["tiers"]["ssd"]
    assert sum(stats["rejected"].values()) > 0
    if wish == "fail":
        assert result.finish_reason == "error"
        assert "did not come from ssd" in (result.error or "")
    else:
        assert result.new_token_ids == greedy_reference(PROMPT, 6)
    assert core.scheduler.manager.pool.is_idle


def damage_blocks(directory: Path) -> None:
    """One other bit in every KiB of the file of blocks."""
    file = directory / "blocks"
    data = np.fromfile(file, np.uint8)
    data[512::1024] ^= 1
    data.tofile(file)


def test_a_drill_is_announced(
    make_core: MakeCore, small_tiers: Tiers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    make_core(**small_tiers)
    assert "on purpose" not in caplog.text
    make_core(**small_tiers | {"kv_offload_ssd_path": small_tiers["kv_offload_ssd_path"] + "2"},
              kv_offload_faults="ssd:load:delay=0.1,seed=3")  # fmt: skip
    assert "faults are injected on purpose into ssd" in caplog.text
