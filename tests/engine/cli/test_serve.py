# SPDX-License-Identifier: Apache-2.0
"""`stratakv serve` as a process: its ready line, its answers, and every way it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.cli.serve import bind
from stratakv.engine.config import ConfigError

FLAGS = ["--port", "0", "--num-blocks", "60", "--num-threads", "1", "--log-level", "warning"]
READY = re.compile(r"StrataKV serves tiny at (http://127\.0\.0\.1:\d+) ")


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "stratakv.engine.cli.main", "serve", str(model),
         "--served-model-name", "tiny", *FLAGS, *flags],
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The URL of the ready line."""
    assert process.stdout is not None
    found = READY.match(process.stdout.readline())
    assert found, process.communicate()
    return found[1]


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(url + path, data, headers)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return json.load(answer)


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def test_a_life(tiny_model: Path, small_tiers: dict[str, str]) -> None:
    """Ready, an answer, Ctrl-C: exit code 0, and the blocks are there in the next life."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in small_tiers.items()]
    body = {"prompt": [7] * 100, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answers = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with serving(tiny_model, *flags) as process:
            url = wait_ready(process)
            assert ask(url, "/v1/models")["data"][0]["id"] == "tiny"
            answers.append(ask(url, "/v1/completions", body))
            process.send_signal(number)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
    first, second = answers
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    details = [answer["usage"]["prompt_tokens_details"] for answer in answers]
    assert details[0]["cached_tokens"] == 0
    assert details[1]["cached_tokens_by_tier"]["ssd"] == 96


def test_the_end_of_the_core_is_the_end_of_the_server(tiny_model: Path) -> None:
    with serving(tiny_model) as process:
        wait_ready(process)
        [core] = children(process.pid)
        os.kill(core, signal.SIGKILL)
        assert process.wait(15) == 1
        assert process.stderr is not None
        assert "the engine core was ended by SIGKILL" in process.stderr.read()


def test_a_signal_ends_a_start(tiny_model: Path) -> None:
    with serving(tiny_model) as process:
        deadline = time.monotonic() + 20
        while not (cores := children(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert not Path(f"/proc/{cores[0]}").exists()


def test_what_a_socket_can_be_bound_to() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.getsockname()[1] > 0
        with pytest.raises(ConfigError, match="is in use"):
            bind("127.0.0.1", sock.getsockname()[1])
    with bind("localhost", 0) as sock:
        assert sock.family in (socket.AF_INET, socket.AF_INET6)
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.1 is no address of this machine"):
        bind("203.0.113.1", 0)
