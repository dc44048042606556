# SPDX-License-Identifier: Apache-2.0
"""What systemd is told, at a real socket. The servers' own tests see when it is told:
`test_serve.py` and `tests/tiers/cache_server/test_reload.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from stratakv.engine.cli import systemd

from ...notify_socket import NotifySocket


@pytest.mark.parametrize("kind", ["file", "abstract"])
def test_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name = str(tmp_path / "notify") if kind == "file" else f"@stratakv-test-{os.getpid()}"
    monkeypatch.setenv(systemd.VARIABLE, name)
    with NotifySocket(name) as listening:
        systemd.tell_ready()
        assert listening.next() == {"READY": "1"}
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        systemd.tell_reloading()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        told = listening.next()
        assert told.pop("RELOADING") == "1"
        assert before <= int(told.pop("MONOTONIC_USEC")) <= after and not told
        systemd.tell_stopping()
        assert listening.next() == {"STOPPING": "1"}
        assert listening.is_quiet()


def test_without_systemd_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for value in (None, ""):
        monkeypatch.delenv(systemd.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(systemd.VARIABLE, value)
        systemd.tell_ready()
    assert not caplog.records


@pytest.mark.parametrize("name", ["/nobody/listens", "relative", "@" + "x" * 200])
def test_what_cannot_be_told_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv(systemd.VARIABLE, name)
    systemd.tell_ready()
    [record] = caplog.records
    assert f"systemd cannot be told READY=1 at NOTIFY_SOCKET={name}" in record.getMessage()


def test_one_that_does_not_listen_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its queue is full."""
    monkeypatch.setattr(systemd, "SEND_SECONDS", 0.01)
    monkeypatch.setenv(systemd.VARIABLE, str(tmp_path / "notify"))
    with NotifySocket(str(tmp_path / "notify")):
        for _ in range(10_000):
            systemd.tell_ready()
            if caplog.records:
                break
    assert "timed out" in caplog.records[0].getMessage()
