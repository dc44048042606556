# SPDX-License-Identifier: Apache-2.0
"""A whole engine over a tier that hangs or is down: it starts, serves and ends."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from stratakv.engine.core.engine_core import MIN_COPY_SECONDS, EngineCore
from stratakv.tiers.hierarchy import writes

from .conftest import MakeCore, Reference, prompt_of, request, run

Tiers = dict[str, str]


def ssd_traffic(core: EngineCore) -> dict[str, object]:
    traffic = core.call("stats", "")["connector"]["traffic"]["ssd"]
    assert isinstance(traffic, dict)
    return traffic


@pytest.mark.parametrize("faults", ["store:hang=1", "store:error=1", "store:hang=1,lookup:error=1"])
def test_a_shutdown_does_not_wait_for_a_tier_that_takes_nothing(
    make_core: MakeCore,
    small_tiers: Tiers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    faults: str,
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(writes, "STALL_SECONDS", 0.4)
    monkeypatch.setattr(writes, "OPEN_STALL_SECONDS", 0.3)
    core = make_core(**small_tiers, kv_offload_faults=faults)
    run(core, request("r", prompt_of(200)))
    began = time.monotonic()
    core.shutdown(60.0)
    assert time.monotonic() - began < 30.0


def test_a_shutdown_without_time_ends_at_once(make_core: MakeCore, small_tiers: Tiers) -> None:
    core = make_core(**small_tiers, kv_offload_faults="store:hang=1")
    run(core, request("r", prompt_of(200)))
    began = time.monotonic()
    core.shutdown(0.0)
    assert time.monotonic() - began < MIN_COPY_SECONDS + 20.0


def test_an_engine_starts_without_a_tier_that_is_down(
    make_core: MakeCore,
    small_tiers: Tiers,
    greedy_reference: Reference,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    core = make_core(**small_tiers | {"kv_offload_ssd_path": "/proc/nothing/ssd"})
    (line,) = [text for text in caplog.messages if "ssd" in text]
    assert line.startswith("serving without the ssd tier until it can be opened")
    assert "/proc/nothing/ssd" in line
    assert run(core, request("r", prompt_of(50)))["r"].new_token_ids == greedy_reference(
        prompt_of(50), 6
    )
    assert core.call("stats", "")["connector"]["tiers"]["ssd"]["errors"]["down"] >= 1
    began = time.monotonic()
    core.shutdown(30.0)
    assert time.monotonic() - began < 20.0


def test_what_can_never_work_is_refused_at_the_start(
    make_core: MakeCore, small_tiers: Tiers, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="is in the way of one"):
        make_core(**small_tiers | {"kv_offload_ssd_path": str(tmp_path / "file")})
