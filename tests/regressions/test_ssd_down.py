# SPDX-License-Identifier: Apache-2.0
"""A tier that is down when the engine starts (U5): it says so, or does not start."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.connector.costs.calibration import in_words
from stratakv.connector.costs.economics import Economics
from stratakv.connector.parts import Parts
from stratakv.engine.cli.serve import _tell_start
from stratakv.engine.config.engine_options import EMBEDDED_MODEL, engine_config
from stratakv.engine.config.server_options import ServerConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import PROTOCOL_VERSION, Ready
from stratakv.tiers.settings.values import ConfigError

from ..nursery_site import nursery_client

pytestmark = pytest.mark.regression

NOWHERE = "/sys/stratakv"  # where nobody can make a directory
OPTIONS = {
    "kv_offload": "cpu,ssd",
    "kv_offload_cpu_bytes": "16MiB",
    "kv_offload_ssd_path": NOWHERE,
    "kv_offload_ssd_bytes": "64MiB",
    "max_model_len": 256,
    "num_blocks": 64,
}


@pytest.fixture
def core(caplog: pytest.LogCaptureFixture) -> Iterator[EngineCore]:
    caplog.set_level(logging.INFO)
    made = EngineCore(engine_config(EMBEDDED_MODEL, OPTIONS))
    yield made
    made.shutdown()


def told(ready: Ready, options: dict[str, object], caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        _tell_start(engine_config(EMBEDDED_MODEL, options), ServerConfig(), ready, sock)
    [line] = [message for message in caplog.messages if message.startswith("tiers below")]
    return line


def test_u05_a_tier_that_is_down_is_not_told_as_there(
    core: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    """It was listed with a rate that nobody had measured."""
    messages = [record.getMessage() for record in caplog.get_records("setup")]
    [estimates] = [message for message in messages if message.startswith("offload: ")]
    assert "ssd is down" in estimates
    assert "ssd loads" not in estimates and "(ssd)" not in estimates
    line = told(core.ready(), OPTIONS, caplog)
    assert "ssd 64MiB" in line and "down" in line.partition("ssd")[2]
    assert "down" not in line.partition("ssd")[0]


def test_u05_no_cache_server_is_told_as_well(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    options: dict[str, object] = {"kv_offload": "cpu,grpc://host:9400"}
    ready = Ready(PROTOCOL_VERSION, 64, 100, 10, 16, [], tiers_down=["remote"])
    assert "grpc://host:9400 (down" in told(ready, options, caplog)
    assert "remote: grpc://host:9400 (down)" in capsys.readouterr().out
    ready.tiers_down = []
    assert "down" not in told(ready, options, caplog)


def test_u05_estimates_of_what_is_up_stay() -> None:
    hierarchy: Any = SimpleNamespace(tiers=["cpu", "ssd"], block_bytes=1000)
    economics = Economics(hierarchy, Parts(16))
    economics.prefill.record_prefill(1000, 0, 0.1)
    assert in_words(economics, ["ssd"]).startswith("prefill 10,000 tokens/s, cpu loads 4 GB/s")
    assert in_words(economics, ["ssd"]).endswith("(cpu)")


def test_u05_require_tiers_makes_the_start_fail() -> None:
    with pytest.raises(ConfigError, match=r"cannot write to /sys/stratakv .*--require-tiers"):
        EngineCore(engine_config(EMBEDDED_MODEL, {**OPTIONS, "require_tiers": True}))


def test_u05_require_tiers_asks_for_cache_servers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratakv.tiers.assemble.REQUIRED_SECONDS", 0.1)
    options = {
        **{name: value for name, value in OPTIONS.items() if "ssd" not in name},
        "kv_offload": "cpu,grpc://127.0.0.1:1",
        "require_tiers": True,
    }
    with pytest.raises(ConfigError, match=r"grpc://127\.0\.0\.1:1 could be attached"):
        EngineCore(engine_config(EMBEDDED_MODEL, options))


def test_u05_serve_with_require_tiers_says_why_and_ends(tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-P", "-m", "stratakv.engine.cli.main", "serve"]
    done = nursery_client.run(
        [*command, "--port=0", *flags, "--require-tiers"], cwd=tmp_path, timeout=120
    )
    assert done.returncode == 2
    assert not done.stdout
    assert "cannot write to /sys/stratakv" in done.stderr.splitlines()[-1]
    assert "--require-tiers" in done.stderr.splitlines()[-1]
