# SPDX-License-Identifier: Apache-2.0
"""Windowed models whose blocks come from below the cpu tier: an SSD after a restart, and a cache
server that another engine filled. The same greedy tokens in float64 as transformers gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.settings.values import ConfigError

from .test_exactness import running_core, tiers
from .test_windowed_models import WINDOW, check_exact, model, small_pool, texts
from .tiers.cache_server.rig import server_process

__all__ = ["model", "texts"]

Texts = list[tuple[list[int], list[int]]]


def two_lives(model: Path, texts: Texts, offload: dict[str, Any], tier: str) -> None:
    found: Counter[str] = Counter()
    for life in range(2):
        with running_core(model, offload=offload, **small_pool(model)) as core:
            for index, text in enumerate(texts):
                [answer] = check_exact(core, [text], f"{life}-{index}-")
                if life and len(text[0]) > WINDOW:
                    found.update(answer.cached)
                    assert sum(answer.cached.values()) > 2 * WINDOW
    assert found[tier] > 2 * WINDOW


def test_from_the_ssd_after_a_restart(model: Path, texts: Texts, tmp_path: Path) -> None:
    two_lives(model, texts, tiers(tmp_path / "ssd", cpu_bytes=2**20), "ssd")


def test_from_a_cache_server(model: Path, texts: Texts) -> None:
    with server_process("--cpu-bytes", "64MiB") as cache:
        address = f"grpc://127.0.0.1:{cache.port}"
        offload = {
            "tiers": ("cpu", address), "cpu_bytes": 2**20, "load": "always", "require_tiers": True,
        }  # fmt: skip
        two_lives(model, texts, offload, "remote")


def test_both_at_once_is_refused(model: Path) -> None:
    offload = {"tiers": ("cpu",), "cpu_bytes": 2**20, "load": "both"}
    with (
        pytest.raises(ConfigError, match="layers see only the tokens of a window"),
        running_core(model, offload=offload, **small_pool(model)),
    ):
        raise AssertionError("it started")
