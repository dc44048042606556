# SPDX-License-Identifier: Apache-2.0
"""deploy/cluster.sh: the demonstration, a signal while it starts, and a start that cannot work."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from .deploy_scripts import DEPLOY, children_of, end, run, started
from .pages import check_form, find_block

COMMAND = [str(DEPLOY / "cluster.sh"), "--demo"]
ROW = re.compile(r"^ *(\d+) \| +(\d+) \| +(\d+) \| +(\d+) \| +\d+ ms \| +\d+ ms$", re.MULTILINE)
BLOCK_TOKENS = 16
DISAGGREGATE_ABOVE = 512


@pytest.fixture(autouse=True)
def _this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", sys.executable)
    # A pool is filled with zeros at the start: 1 GiB, unless told otherwise.
    monkeypatch.setenv("STRATAKV_KV_CACHE_MEMORY_BYTES", "64MiB")


def test_the_demonstration() -> None:
    done = run(COMMAND)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = [tuple(map(int, row)) for row in ROW.findall(done.stdout)]
    assert len(rows) == 3
    for prompt, by_prefill, loaded, by_decode in rows:
        assert prompt > DISAGGREGATE_ABOVE
        assert by_prefill == prompt
        assert loaded + by_decode == prompt
        assert by_decode <= BLOCK_TOKENS
    shown = find_block("deploy/README.md", "prompt | computed").text
    check_form(shown, done.stdout)
    assert ROW.findall(shown) == ROW.findall(done.stdout), "tokens as the page has them"
    assert done.stdout.endswith("All 3 answers through the cluster are those of one node.\n")


@pytest.mark.usefixtures("no_nursery")  # all are to end, also those that it would start
def test_a_signal_while_the_nodes_start_ends_all_of_them() -> None:
    with started(COMMAND) as process:
        deadline = time.monotonic() + 60
        while len(children_of(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        end(process, signal.SIGINT)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = run([*COMMAND, "--model", str(tmp_path / "nothing")])
    assert done.returncode == 1
    assert re.search("the (prefill|decode) node ended with code 2", done.stderr)
    assert "Traceback" not in done.stderr
