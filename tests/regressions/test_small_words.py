# SPDX-License-Identifier: Apache-2.0
"""What is said where little went wrong: addresses, repeated warnings, places that are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.engine.cli.main import main
from stratakv.engine.router.router_settings import read_node
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.remote.membership import parse_address
from stratakv.tiers.remote.server_link import ServerLink
from stratakv.tiers.settings import readers
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.wire.listen import is_loopback
from stratakv.tiers.wire.status import Retry

pytestmark = pytest.mark.regression


def test_w10_two_causes_that_alternate_are_told_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link: Any = SimpleNamespace(address="grpc://there:1", _told=set())
    link._is_news = lambda what: ServerLink._is_news(link, what)
    for number in range(200):
        ServerLink._warn_not_used(link, Retry.LATER, ("no route", "refused")[number % 2])
    assert len(caplog.records) == 2
    for number in range(1000):
        ServerLink._warn_not_used(link, Retry.LATER, f"text {number}")
    assert len(link._told) <= 32


def test_w10_addresses() -> None:
    assert parse_address("grpc://[fe80::1%lo]:9400").host == "fe80::1%lo"
    assert is_loopback("LOCALHOST") and is_loopback("localhost")
    with pytest.raises(TierConfigError, match=r"in brackets: grpc://\[::1\]:9400$"):
        parse_address("grpc://::1:9400")
    for host in ("[::1%]", "[::1%l/o]", "[%lo]x"):
        with pytest.raises(TierConfigError):
            parse_address(f"grpc://{host}:9400")
    with pytest.raises(ConfigError, match=r"stands in brackets, as in http://\[::1\]:8000"):
        read_node("--decode", "http://::1:8000")


def test_w10_bytes_that_are_no_utf8_are_called_so() -> None:
    with pytest.raises(ConfigError, match="some of its bytes are no UTF-8"):
        readers.text("--name", "a\udcff")
    with pytest.raises(ConfigError, match="leave them out"):
        readers.text("--name", "a\x00")


def test_w10_a_working_directory_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    assert main(["generate", "--prompt", "x"]) == 2
    assert "the working directory is gone" in capsys.readouterr().err


def test_w10_a_full_disk_behind_standard_error_ends_no_command(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        code = (
            "import sys; from stratakv.engine.cli import main\n"
            "main._lose_what_standard_error_cannot_take()\n"
            "print('lost', file=sys.stderr, flush=True); print('lost too', file=sys.stderr)\n"
            "print('kept')"
        )
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=full, cwd=tmp_path, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, b"kept\n")
