# SPDX-License-Identifier: Apache-2.0
"""deploy/two-engines.sh: the demonstration, its end by a signal, and a start that cannot work."""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from .deploy_scripts import DEPLOY, children_of, end, run, started
from .pages import check_form, find_block

COMMAND = [str(DEPLOY / "two-engines.sh"), "--port", "0", "--cache-port", "0"]
COMMAND += ["--cache-bytes", "64MiB"]
ANSWER = re.compile(r"(\w+) engine: (\d+) prompt tokens, (\d+) cached (\{.*\}), \d+ ms\n")


@pytest.fixture(autouse=True)
def _this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    # A pool is filled with zeros at the start: 1 GiB, unless told otherwise.
    monkeypatch.setenv("STRATAKV_KV_CACHE_MEMORY_BYTES", "24MiB")


def test_the_demonstration() -> None:
    done = run([*COMMAND, "--demo"])
    assert (done.returncode, done.stderr) == (0, "")
    first, second = ANSWER.findall(done.stdout)
    assert first[0] == "first" and first[2:] == ("0", "{}")
    assert second[0] == "second"
    # The last full block of the continuation is the first one's last but for the new words.
    assert int(second[2]) >= int(first[1]) - 16
    assert second[3] == f'{{"remote": {second[2]}}}'
    check_form(find_block("deploy/README.md", "first engine: ").text, done.stdout)


@pytest.mark.usefixtures("no_nursery")  # all are to end, also those that it would start
def test_a_signal_ends_all_of_them() -> None:
    with started(COMMAND) as process:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if "Ctrl-C ends all three" in line:
                break
        (*_, port) = re.findall(r"http://127\.0\.0\.1:(\d+)/v1", "".join(told))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as response:
            assert response.status == 200
        assert len(children_of(process.pid)) == 3
        end(process, signal.SIGINT)


@pytest.mark.usefixtures("no_nursery")  # all are to end, also those that it would start
def test_a_signal_while_they_start_ends_all_of_them() -> None:
    with started(COMMAND) as process:
        deadline = time.monotonic() + 60
        while len(children_of(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        end(process, signal.SIGTERM)


def test_a_port_that_is_taken_and_a_model_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, told in (
            (["--port", str(port)], "the first engine ended with code 2"),
            (["--model", str(tmp_path / "nothing")], "the first engine ended with code 2"),
            (["--cache-bytes", "much"], "the cache server ended with code 2"),
        ):
            done = run([*COMMAND, *words])
            assert done.returncode == 1
            assert told in done.stderr
