# SPDX-License-Identifier: Apache-2.0
"""Small attacks: files that are somebody else's, heads that are too long, numbers too large."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import h11
import numpy as np
import pytest

from stratakv.engine.api.http.http_protocol import MAX_HEADER_BYTES, _BoundedHeads
from stratakv.engine.config.cache_server_options import read_options, server_settings
from stratakv.engine.request.prompt_embeds import EmbedsError, read_embeds, write_embeds
from stratakv.engine.trace.records import DroppedRecord
from stratakv.engine.trace.trace_writer import TraceWriter
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.ssd.store import SsdStore

from ..tiers.blocks import SMALL

pytestmark = pytest.mark.regression


@pytest.mark.parametrize("name", ["blocks", "lock", "identity", "index/data.mdb"])
def test_y08_a_hard_link_is_not_written_over(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ssd"
    SsdStore(path, SMALL, 2**20).close(1.0)
    victim = tmp_path / "victim"
    victim.write_bytes(b"somebody else's")
    victim.chmod(0o644)
    (path / name).unlink()
    os.link(victim, path / name)
    for create in (True, False):
        with pytest.raises(TierConfigError, match="has another name somewhere"):
            SsdStore(path, SMALL, 2**20, create=create)
    assert victim.read_bytes() == b"somebody else's"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o644


def test_y09_a_trace_follows_no_link_and_is_its_users_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("x\n")
    (tmp_path / "link").symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("link", "no link|none is followed"),
        ("hard", "another name"),
        ("pipe", "no ordinary file"),
    ):
        with pytest.raises(ConfigError, match=words):
            TraceWriter(tmp_path / name)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match="no ordinary file"):
        TraceWriter(tmp_path / "pipe")
    os.close(reader)
    assert victim.read_text() == "x\n"
    old = os.umask(0o022)
    try:
        (tmp_path / "old").touch(0o644)
        for name in ("old", "new"):
            writer = TraceWriter(tmp_path / name)
            writer.put(DroppedRecord(1))
            writer.close()
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
            assert json.loads((tmp_path / name).read_text())["count"] == 1
    finally:
        os.umask(old)


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o622])
def test_y10_a_tenants_file_that_others_may_write(tmp_path: Path, mode: int) -> None:
    """At the start and at each SIGHUP: both come through here."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[[tenant]]\nname = "ann"\ncpu_bytes = "1MiB"\ntoken_sha256 = ["{"0" * 64}"]\n'
    )
    path.chmod(0o644)
    options = read_options({"tenants": str(path), "cpu_bytes": "2MiB"}, {})
    running = server_settings(options)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*; run: chmod go-w"):
        server_settings(options, running)
    with pytest.raises(ConfigError, match="which other users can write"):
        server_settings(options)


def _heads(*sizes: int) -> bytes:
    """Requests whose heads have so many bytes."""
    whole = b""
    for size in sizes:
        start, end = b"GET / HTTP/1.1\r\nhost: a\r\nx: ", b"\r\n\r\n"
        whole += start + b"x" * (size - len(start) - len(end)) + end
    return whole


def _first_event(connection: h11.Connection) -> Any:
    event = connection.next_event()
    if isinstance(event, h11.Request):
        assert isinstance(connection.next_event(), h11.EndOfMessage)
    return event


def test_y11_a_whole_head_is_counted_too() -> None:
    connection = _BoundedHeads(h11.SERVER, MAX_HEADER_BYTES)
    connection.receive_data(_heads(MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1))
    assert isinstance(_first_event(connection), h11.Request)
    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.start_next_cycle()
    with pytest.raises(h11.RemoteProtocolError) as raised:
        connection.next_event()
    assert raised.value.error_status_hint == 431
    assert isinstance(connection.send(h11.Response(status_code=400, headers=[])), bytes)


def test_y12_embeddings_beyond_the_models_numbers() -> None:
    largest = float(np.finfo(np.float32).max)
    for value, kind in ((1e308, np.float64), (-1e39, np.float64)):
        data = write_embeds(np.array([[1.0, value]], kind))
        with pytest.raises(EmbedsError, match=r"up to 3\.40282e\+38, and element 1 of token 0"):
            read_embeds(data, 2, 4, largest)
        assert read_embeds(data, 2, 4).tolist() == [[1.0, value]], "in float64 it is a number"
    data = write_embeds(np.array([[largest, -largest]], np.float64))
    assert read_embeds(data, 2, 4, largest).shape == (1, 2)
    with pytest.raises(EmbedsError, match="up to 65504"):
        read_embeds(write_embeds(np.array([[7e4, 0]], np.float32)), 2, 4, 65504.0)
    with pytest.raises(EmbedsError, match="are finite numbers"):
        read_embeds(write_embeds(np.array([[np.nan, 0]], np.float32)), 2, 4, largest)
