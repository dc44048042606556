# SPDX-License-Identifier: Apache-2.0
"""Policies, admission filter and codec of a cache server, by its flags and over real calls."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stratakv.engine.cli.main import main
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.contract import make_keys
from stratakv.tiers.contract import payload_of as noise_of
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.reopening_store import ReopeningStore
from stratakv.tiers.ssd.index.index_file import IndexFile, Row
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.tier_settings import SERVER_SSD, CpuSettings
from stratakv.tiers.wire.frames import State

from . import rig
from .calls import lookup
from .rig import load_blocks, running_server, server_process, store_blocks

SLOTS = 64  # of a tenant's memory
SMOOTH = BlockLayout(2, 16, 2, 64, "bfloat16")


def _smooth(key: bytes, layout: BlockLayout = SMOOTH) -> bytes:
    """Numbers of one exponent, which the lossless codec makes shorter."""
    data = bytearray(noise_of(key, layout))
    data[1::2] = bytes([61]) * (len(data) // 2)
    return bytes(data)


def _rows(folder: Path) -> list[Row]:
    (store,) = (each for each in folder.iterdir() if each.is_dir())
    assert check_store(store).is_clean
    index = IndexFile(store / "index", 0)
    try:
        return list(index.iter_rows())
    finally:
        index.close()


def test_blocks_that_were_packed_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a server that is started without the codec again."""
    monkeypatch.setattr(rig, "payload_of", _smooth)
    disk = ("--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", "8MiB")
    keys = make_keys(6)
    with server_process(*disk, "--ssd-codec", "lossless") as server:
        stub = server.stub()
        server.attach(stub, SMOOTH)
        store_blocks(stub, keys, SMOOTH)
        assert server.terminate() == 0
        rows = _rows(tmp_path / "ssd")
        assert len(rows) == 6
        assert all(0 < row.encoded_bytes < SMOOTH.page_bytes for row in rows)
        for codec in ("lossless", "none"):
            server.flags = (*server.flags, "--ssd-codec", codec)
            server.start()
            stub = server.stub()
            server.attach(stub, SMOOTH)
            assert load_blocks(stub, keys) == [_smooth(key) for key in keys]
            assert server.terminate() == 0


@pytest.mark.parametrize(
    ("admission", "refused"), [("all", 0), ("while-used", 0), ("doorkeeper", 16)]
)
@pytest.mark.slow
def test_a_filter_decides_what_is_written(tmp_path: Path, admission: str, refused: int) -> None:
    """Eight prompts of one block are asked for twice, sixteen once; all of them leave the memory.
    What is there in the end is written at the shutdown, whatever the filter says."""
    settings = {"cpu": CpuSettings(policy="lru"), "ssd": replace(SERVER_SSD, admission=admission)}
    keys = make_keys(24 + SLOTS)
    path = tmp_path / "ssd"
    with running_server(ssd_bytes=8 * 2**20, ssd_path=path, **settings) as server:
        stub = server.stub()
        server.attach(stub)
        for key in (*keys[:24], *keys[:8]):
            lookup(stub, key)
        for first in range(0, len(keys), 8):
            assert store_blocks(stub, keys[first : first + 8]) == [State.KEPT] * 8
            if first >= SLOTS // 2:  # before that nothing is written
                _let_the_disk_keep_up(server.tenant_store())
    assert len(_rows(path)) == len(keys) - refused


def _let_the_disk_keep_up(tenant_store: TenantStore) -> None:
    """Or blocks would leave the memory that were not written yet."""
    before = -1
    while (now := tenant_store.stats()["ssd"].stored_blocks) != before:
        before = now
        time.sleep(0.5)


def test_a_filter_that_learns_is_told_of_look_ups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of nothing else: neither of blocks that come in nor of those that go out."""
    told: list[int] = []
    monkeypatch.setattr(Hierarchy, "announce_prompt", lambda _self, chain: told.append(len(chain)))
    keys = make_keys(12)
    for admission in ("all", "while-used", "reuse"):
        settings = {"ssd": replace(SERVER_SSD, admission=admission)}
        path = tmp_path / admission
        with running_server(ssd_bytes=8 * 2**20, ssd_path=path, **settings) as server:
            stub = server.stub()
            server.attach(stub)
            store_blocks(stub, keys[:4])
            lookup(stub, b"".join(keys[4:]))
            load_blocks(stub, keys[:4])
        assert told == ([8] if admission == "reuse" else [])


def test_every_tenant_gets_the_policies(tmp_path: Path) -> None:
    settings = {
        "cpu": CpuSettings(policy="s3-fifo"),
        "ssd": replace(SERVER_SSD, policy="adaptive"),
    }
    for given, names in (
        ({}, ("AdaptivePolicy", "NoneType")),
        (settings, ("S3FifoPolicy", "AdaptivePolicy")),
    ):
        path = tmp_path / names[0]
        with running_server(ssd_bytes=4 * 2**20, ssd_path=path, **given) as server:
            server.attach(server.stub())
            tenant_store = server.tenant_store()
            (store,) = tenant_store._stores
            assert isinstance(store, ReopeningStore) and store.opened is not None
            policies = (tenant_store._slab._policy, store.opened._state.index._policy)
            assert tuple(type(policy).__name__ for policy in policies) == names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cpu-policy lur", "--cpu-policy takes lru or .*, not 'lur'; did you mean lru"),
        ("--ssd-policy arcs", "--ssd-policy takes lru or .*, not 'arcs'; did you mean arc"),
        ("--ssd-admission reused", "--ssd-admission takes .*, not 'reused'; did you mean reuse"),
        ("--ssd-codec losless", "--ssd-codec takes none or lossless, not .*; did you mean loss"),
        ("--ssd-codec fp8", "--ssd-codec takes none or lossless, not 'fp8'"),
        ("--ssd-policy arc", "--ssd-policy is for blocks on a disk; give --ssd-path too"),
        ("--ssd-admission reuse", "--ssd-admission is for blocks on a disk; give --ssd-path too"),
        ("--ssd-codec lossless", "--ssd-codec is for blocks on a disk; give --ssd-path too"),
    ],
)
def test_names_that_cannot_be(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert main(["cache-server", "--port", "0", *flags.split()]) == 2
    assert re.search(message, capsys.readouterr().err)
