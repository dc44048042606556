# SPDX-License-Identifier: Apache-2.0
"""Places of a user that may be missing: a home, a runtime directory, a folder for sockets."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.tiers.cache_server.transports import memory_server
from stratakv.tiers.cache_server.transports.memory_server import MemoryServer
from stratakv.tiers.cache_server.transports.session_server import SessionSettings
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.remote.credentials import Credentials
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.settings.values import ConfigError
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.own_token import find_token, leave_token

from ..tiers.cache_server.data_plane import BOOT_ID, Plane
from ..tiers.cache_server.rig import running_server

pytestmark = pytest.mark.regression
TOKEN = "a-token-of-some-length"


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that no table knows, without HOME."""

    def unknown(_: int) -> NoReturn:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_w06_a_path_that_is_given_needs_no_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"kv_offload": "cpu,ssd", "kv_offload_ssd_path": str(tmp_path / "ssd")}
    assert engine_config(EMBEDDED_MODEL, options).offload.ssd.paths == (tmp_path / "ssd",)
    with pytest.raises(ConfigError, match=r"has no home directory .* --kv-offload-ssd-path"):
        engine_config(EMBEDDED_MODEL, {"kv_offload": "cpu,ssd"})
    assert main(["cache", "ls", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["cache", "ls"]) == 2
    assert "has no home directory" in capsys.readouterr().err


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def test_w08_a_token_that_went_is_left_again(folders: Path) -> None:
    with running_server(token=TOKEN, own_token=TOKEN, data_port=None) as server:
        look = server.server.look_at_token
        assert find_token(server.port) == TOKEN
        shutil.rmtree(folders / "XDG_RUNTIME_DIR")  # as a logout does
        assert find_token(server.port) is None
        server.call(look(TOKEN))
        assert find_token(server.port) == TOKEN
        leave_token(server.port, "the-token-of-another-server")
        server.call(look(TOKEN))
        server.call(look(TOKEN))
    assert list(folders.rglob("*.token")), "that of another server stays"


def test_w08_a_token_that_cannot_be_left_is_told_once(
    folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_server(token=TOKEN, own_token=TOKEN, data_port=None) as server:
        shutil.rmtree(folders / "XDG_RUNTIME_DIR")
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", "/proc/none")
            patch.setenv("XDG_RUNTIME_DIR", "/proc/none")
            for _ in range(3):
                server.call(server.server.look_at_token(TOKEN))
        assert caplog.text.count("cannot be left again") == 1
        server.call(server.server.look_at_token(TOKEN))
        assert find_token(server.port) == TOKEN


def test_w08_a_refused_client_hears_which_file_is_missing(folders: Path) -> None:
    here = ServerAddress("127.0.0.1", 9400)
    said = Credentials().missing(here)
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        assert str(folders / name / "stratakv" / "cache-server-9400.token") in said
    assert Credentials().missing(ServerAddress("192.0.2.1", 9400)) == ""
    assert Credentials(token_file=folders / "token").missing(here) == ""
    leave_token(9400, TOKEN)
    assert Credentials().missing(here) == ""


def test_w09_a_socket_has_another_place_than_a_long_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("n" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    plane = Plane()
    try:
        assert not Path(plane.path).is_relative_to(long)
        assert list(long.iterdir()) == []
    finally:
        plane.close()
    assert not os.path.exists(os.path.dirname(plane.path))


def test_w09_where_no_place_is_left_the_flag_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ["/proc/none", str(tmp_path / "none")]
    monkeypatch.setattr(memory_server, "_parents", lambda: places)
    made = MemoryServer(SessionSettings(BOOT_ID, lambda _: None, Limits()))
    with pytest.raises(TierConfigError, match=r"/none: No such file .* --no-shared-memory"):
        made.start()
