# SPDX-License-Identifier: Apache-2.0
"""deploy/two-engines.sh: the demonstration, its end by a signal, and a start that cannot work."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "deploy" / "two-engines.sh"
COMMAND = [str(SCRIPT), "--port", "0", "--cache-port", "0", "--cache-bytes", "64MiB"]
SECONDS = 240.0
ANSWER = re.compile(r"(\w+) engine: (\d+) prompt tokens, (\d+) cached (\{.*\}), \d+ ms\n")


@pytest.fixture(autouse=True)
def _this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_demonstration() -> None:
    done = subprocess.run(
        [*COMMAND, "--demo"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second = ANSWER.findall(done.stdout)
    assert first[0] == "first" and first[2:] == ("0", "{}")
    assert second[0] == "second"
    # The last full block of the continuation is the first one's last but for the new words.
    assert int(second[2]) >= int(first[1]) - 16
    assert second[3] == f'{{"remote": {second[2]}}}'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_them(number: signal.Signals) -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line)
            if "Ctrl-C ends all three" in line:
                break
        (*_, port) = re.findall(r"http://127\.0\.0\.1:(\d+)/v1", "".join(told))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            assert response.status == 200
        started = children_of(process.pid)
        assert len(started) == 3
        everybody = started + [child for pid in started for child in children_of(pid)]
        process.send_signal(number)
        assert process.wait(60) == 0
        deadline = time.monotonic() + 10
        while any(map(is_running, everybody)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, everybody))
    finally:
        watchdog.cancel()
        if process.poll() is None:
            for pid in children_of(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.kill()
        process.wait()


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
            done = subprocess.run(
                [*COMMAND, *words], capture_output=True, text=True, timeout=SECONDS, check=False
            )
            assert done.returncode == 1
            assert told in done.stderr
