# SPDX-License-Identifier: Apache-2.0
"""Windowed models whose blocks come from below the cpu tier: an SSD after a restart, and damaged
there, and a cache server that another engine filled. The same greedy tokens in float64 as
transformers gives."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.cli.main import main
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.block import ALIGNMENT, pack_key
from stratakv.tiers.record import decode_header
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.ssd.disk.space import HEADER_PAGE_BYTES

from .leftovers import settle
from .test_exactness import running_core, tiers
from .test_windowed_models import BLOCK, WINDOW, check_exact, model, small_pool, texts
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
                settle(core)
    assert found[tier] > 2 * WINDOW


def test_from_the_ssd_after_a_restart(model: Path, texts: Texts, tmp_path: Path) -> None:
    two_lives(model, texts, tiers(tmp_path / "ssd", cpu_bytes=2**20), "ssd")


def test_a_damaged_block_of_a_window_is_found_mended_and_computed_again(
    model: Path, texts: Texts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ssd"
    options = {"offload": tiers(path, cpu_bytes=2**20), **small_pool(model)}
    long = texts[1]
    with running_core(model, **options) as core:
        check_exact(core, [long], "first")
        windows = [g for g, kind in enumerate(core._groups.attention) if not kind.is_full]
        digests = digests_of(core, long[0])
    assert main(["check", str(path)]) == 0
    # The block in which its last window begins, which a hit of its whole length needs.
    first = (len(long[0]) - WINDOW) // BLOCK
    damage(path / "blocks", pack_key(digests[first], windows[-1]))
    capsys.readouterr()
    assert main(["check", str(path)]) == 1
    of_group = f", a block of cache group {windows[-1]}" if windows[-1] else ""
    assert f"its record is not the row's{of_group} (checksum)" in capsys.readouterr().out
    assert main(["check", str(path), "--fix"]) == 1
    assert main(["check", str(path)]) == 0
    with running_core(model, **options) as core:
        [answer] = check_exact(core, [long], "again")
        # A shorter hit needs that block too, up to those that end before it.
        assert 0 < sum(answer.cached.values()) <= first * BLOCK


def damage(blocks: Path, key: bytes) -> None:
    """Change a byte of the only record that has this key."""
    data = bytearray(blocks.read_bytes())
    starts = range(0, len(data), ALIGNMENT)
    headers = {start: decode_header(data[start : start + ALIGNMENT]) for start in starts}
    [start] = [start for start, header in headers.items() if header and header.key == key]
    data[start + HEADER_PAGE_BYTES] ^= 1
    blocks.write_bytes(data)


def digests_of(core: EngineCore, text: list[int]) -> list[bytes]:
    hasher = core._request_builder._hasher
    return Request("named", text, SamplingParams(), block_hasher=hasher).block_hashes


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
