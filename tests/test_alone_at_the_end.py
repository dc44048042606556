# SPDX-License-Identifier: Apache-2.0
"""Of two processes each file stays in one, and what runs alone comes when all others have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")
pytestmark = pytest.mark.slow

SCHEDULER = str(Path(__file__).with_name("alone_at_the_end.py"))
# Tests whose name ends in "alone" run alone. Each writes down its process, its file and both times.
CONFTEST = f"""
import contextlib, importlib.util, os, pathlib, time
import pytest
LATE = os.environ["CRASH"] == "before work comes"
IN_PLACES = os.environ["CRASH"] == "while another ends"
FOLDER = pathlib.Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER")

def wait_for(name):
    deadline = time.monotonic() + 20.0
    while not (FOLDER / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.001)
spec = importlib.util.spec_from_file_location("alone_at_the_end", {SCHEDULER!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def pytest_configure(config):
    config.option.loadscopereorder = False

def pytest_xdist_make_scheduler(config, log):
    global scheduler
    scheduler = module.AloneAtTheEnd(config, log, lambda nodeid: nodeid.endswith("alone"))
    return scheduler

def pytest_configure_node(node):
    send = node.send_runtest_some

    def send_when_it_has_crashed(indices):
        *before, _ = scheduler.assigned_work[node].values()
        crashes = any("test_1.py::test_after" in name for unit in before for name in unit)
        if LATE and crashes:
            with contextlib.suppress(EOFError):
                node.channel.waitclose(30.0)
        send(indices)

    node.send_runtest_some = send_when_it_has_crashed

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name.endswith("alone"))
    if IN_PLACES and WORKER == "gw2":  # in the place of the one that crashed
        (FOLDER / "another collects").touch()
        wait_for("another has ended")

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    if IN_PLACES and WORKER in ("gw0", "gw1"):
        (FOLDER / "another ends").touch()
        wait_for("another collects")

def pytest_unconfigure():
    if IN_PLACES and WORKER in ("gw0", "gw1"):
        (FOLDER / "another has ended").touch()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    began = time.monotonic()
    yield
    with (FOLDER / "log").open("a") as log:
        print(WORKER, item.path.name, item.name, began, time.monotonic(), file=log)
"""
FILE = """
import os, time
import pytest
from conftest import IN_PLACES, wait_for

@pytest.mark.parametrize("number", range(4))
def test_one(number):
    time.sleep({seconds})

def test_alone():
    pass

def test_another_alone():
    if {crashes} == "alone":
        os._exit(3)

def test_after():
    if {crashes} == "beside others":
        if IN_PLACES:
            wait_for("another ends")
        os._exit(3)

def test_last():
    pass
"""


def run(
    folder: Path, *, crashes: str = "", processes: int = 2, when: str = "any time"
) -> tuple[int, str, list[list[str]]]:
    """The exit status, the closing line and what the tests wrote down. `when` one crashes: before
    its next file comes, or when there is none and another one is about to end, so that what takes
    its place has not collected yet when that has ended."""
    (folder / "conftest.py").write_text(CONFTEST)
    for number in range(4):
        content = FILE.format(seconds=0.01 * number, crashes=repr(crashes if number == 1 else ""))
        (folder / f"test_{number}.py").write_text(content)
    pytest_script = Path(sys.executable).with_name("pytest")
    done = subprocess.run(
        [
            pytest_script, "-q", "-p", "xdist", "-n", str(processes), "--max-worker-restart", "1",
            folder,
        ],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CRASH": when},
    )  # fmt: skip
    print(done.stdout)  # why, where it was no test that failed
    log = (folder / "log").read_text()
    return (
        done.returncode,
        done.stdout.splitlines()[-1],
        [line.split() for line in log.splitlines()],
    )


@pytest.mark.parametrize("processes", [2, 3])
def test_what_runs_alone_runs_when_all_others_have_ended(tmp_path: Path, processes: int) -> None:
    status, closing, log = run(tmp_path, processes=processes)
    assert status == 0 and closing.startswith("32 passed")
    alone = [line for line in log if line[2].endswith("alone")]
    others = [line for line in log if line not in alone]
    assert len(alone) == 8 and len(others) == 24
    assert max(float(line[4]) for line in others) <= min(float(line[3]) for line in alone)
    assert len({line[0] for line in alone}) == 1
    for number in range(4):
        assert len({line[0] for line in others if line[1] == f"test_{number}.py"}) == 1


@pytest.mark.parametrize(
    ("place", "when"),
    [
        ("alone", "any time"),
        ("beside others", "any time"),
        ("beside others", "before work comes"),
        ("beside others", "while another ends"),
    ],
)
def test_a_test_that_ends_its_process_fails_once_and_all_others_run(
    tmp_path: Path, place: str, when: str
) -> None:
    status, closing, _ = run(tmp_path, crashes=place, when=when)
    assert status != 0 and closing.startswith("1 failed, 31 passed")
