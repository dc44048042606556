# SPDX-License-Identifier: Apache-2.0
"""Commands of a step of `tools/on_gpu.py`: limits, signals, logs, and the archive of results."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .gpu_session_tool import imported_tool, python, read_archive

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with imported_tool() as module:
        yield module


@pytest.fixture
def steps(tool: ModuleType) -> ModuleType:
    return sys.modules["gpu_session.steps"]


@pytest.fixture
def running(tool: ModuleType) -> ModuleType:
    return sys.modules["gpu_session.running"]


def run_all(running: ModuleType, groups: list[Any], tmp_path: Path, seconds: float) -> Any:
    """The step as it was written into the archive, and the names in it."""
    results = tmp_path / "results"
    results.mkdir()
    step = running.Step("probe", True, {}, [])
    archive = tmp_path / "a.tar.gz"
    deadline = time.monotonic() + seconds
    running.run_step(groups, step, results, archive, dict(os.environ), deadline)
    return read_archive(archive, "probe")


def ends_of(body: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["result"], each["last_line"]) for each in body["outcomes"]}


# Waits until a file is there, of which only another command can be the reason.
AWAITS = (
    "import pathlib, sys, time\n"
    "def await_(test):\n"
    "    while not test(): time.sleep(0.02)\n"
    "here = pathlib.Path(sys.argv[1])\n"
    "there = here.parent\n"
)


def test_each_command_has_its_end_and_all_is_kept(
    steps: ModuleType, running: ModuleType, tmp_path: Path
) -> None:
    says = "import sys, pathlib; pathlib.Path(sys.argv[1], 'x.png').touch(); print('said')"
    # The child of the one that hangs must go with it.
    hangs = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, "
        "flush=True); time.sleep(600)"
    )
    groups = [
        (python(steps, "good", says),),
        (python(steps, "bad", "raise SystemExit('broken')"),),
        (python(steps, "slow", hangs, seconds=1.5),),
        (python(steps, "last", "print('still there')"),),
    ]
    body, names = run_all(running, groups, tmp_path, 600)
    ends = ends_of(body)
    child = int(ends["slow"][1])
    assert ends == {
        "good": ("ok", "said"),
        "bad": ("failed", "broken"),
        "slow": ("timed out", str(child)),
        "last": ("ok", "still there"),
    }
    wait_until_gone(child)
    assert {"good/log.txt", "good/x.png", "slow/log.txt", "on-gpu.json"} <= names


def wait_until_gone(process: int) -> None:
    """It was killed; whoever inherits it may still have to reap it."""
    for _ in range(600):
        stat = Path(f"/proc/{process}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {process} outlives the command that started it")


def test_a_group_runs_side_by_side_and_one_at_its_limit_leaves_the_others(
    steps: ModuleType, running: ModuleType, tmp_path: Path
) -> None:
    """`first` and `second` wait for each other, and end only when the hanging one was ended: its
    folder is in the archive then."""
    meets = AWAITS + (
        "(here / 'is-there').touch()\n"
        "await_(lambda: (there / sys.argv[2] / 'is-there').exists())\n"
        "import tarfile\n"
        "archive = there.parent / 'a.tar.gz'\n"
        "def names(): return tarfile.open(archive).getnames() if archive.exists() else []\n"
        "await_(lambda: 'on-gpu-probe/hangs/log.txt' in names())\n"
    )
    group = (
        steps.Command("first", ("-c", meets, "{out}", "second"), 120),
        python(steps, "hangs", "import time; time.sleep(600)", seconds=1),
        steps.Command("second", ("-c", meets, "{out}", "first"), 120),
    )
    body, names = run_all(running, [group], tmp_path, 600)
    ends = ends_of(body)
    assert next(iter(ends)) == "hangs" and ends["hangs"][0] == "timed out"
    assert sorted(ends) == ["first", "hangs", "second"]
    assert all(ends[name][0] == "ok" for name in ("first", "second")), ends
    assert {"first/log.txt", "second/log.txt", "hangs/log.txt"} <= names


def test_pytest_that_reaches_its_limit_has_written_what_it_found(
    steps: ModuleType, running: ModuleType, tmp_path: Path
) -> None:
    """A group is ended when the first test has failed and the second waits."""
    test = tmp_path / "test_two.py"
    test.write_text(
        "import pathlib, time\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_slow():\n"
        f"    pathlib.Path({str(tmp_path / 'waits')!r}).touch()\n"
        "    time.sleep(600)\n"
    )
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={out}/junit.xml")
    started = running.Running(
        steps.Command("tests-order", (*words, f"--rootdir={tmp_path}", str(test)), 600),
        600, tmp_path, dict(os.environ),
    )  # fmt: skip
    while not (tmp_path / "waits").exists():
        assert started.look() is None
        time.sleep(0.05)
    outcome = started.end("timed out")
    findings = sys.modules["gpu_session.findings"]
    assert findings.find_wrong(tmp_path, [outcome]) == ["tests-order: test_wrong: assert 1 == 2"]


def test_a_file_that_is_too_large_is_named_and_not_carried(
    steps: ModuleType, running: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "MOST_FILE_BYTES", 1000)
    code = "import pathlib, resource, sys; out = pathlib.Path(sys.argv[1]); " + (
        "(out / 'core.1').write_bytes(b'x' * 1001); (out / 'small').write_bytes(b'x' * 1000); "
        "print(resource.getrlimit(resource.RLIMIT_CORE))"
    )
    body, names = run_all(running, [(python(steps, "bad", code),)], tmp_path, 600)
    assert "bad/small" in names and "bad/core.1" not in names
    assert ends_of(body)["bad"] == ("ok", "(0, 0)")
    assert body["notes"] == ["bad/core.1 has 1001 bytes and was left out"]


def test_what_does_not_fit_is_left_out(
    steps: ModuleType, running: ModuleType, tmp_path: Path
) -> None:
    group = (python(steps, "late", "print()"), python(steps, "later", "print()"))
    body, names = run_all(running, [group], tmp_path, 1)
    assert [each["result"] for each in body["outcomes"]] == ["left out"] * 2
    assert "time was spent" in body["outcomes"][0]["last_line"] and names == {"on-gpu.json"}


@pytest.mark.parametrize(("seconds", "told"), [(200, "175"), (100, "75"), (40, "30")])
def test_a_benchmark_is_told_its_time(
    steps: ModuleType, running: ModuleType, tmp_path: Path, seconds: float, told: str
) -> None:
    command = steps.Command("told", ("-c", "import sys; print(sys.argv[1])", "{seconds}"), seconds)
    body, _ = run_all(running, [(command,)], tmp_path, 1000)
    assert body["outcomes"][0]["last_line"] == told


def test_a_log_that_is_too_large_loses_its_middle(running: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(b"begin\n" + b"x" * running.MOST_LOG_BYTES + b"\nend\n")
    running.shorten(log)
    text = log.read_text()
    assert text.startswith("begin\n") and text.endswith("\nend\n") and "bytes were left out" in text
    assert len(text) < running.MOST_LOG_BYTES
    running.shorten(log)
    assert log.read_text() == text


def test_a_machine_that_is_taken_back_keeps_what_there_was_and_leaves_nothing_behind(
    tool: ModuleType, steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = AWAITS + (
        "import os, signal\n"
        "await_((there / 'beside' / 'had.txt').exists)\n"
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    )
    has = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'had.txt').touch(); time.sleep(600)"
    group = (python(steps, "probe", asks), python(steps, "beside", has))
    monkeypatch.setattr(tool, "groups_of", lambda *_, **__: [group])
    monkeypatch.setattr(tool.tempfile, "mkdtemp", lambda **_: str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        tool.main(["probe", "--rehearse", "--out", str(tmp_path / "out")])
    assert ended.value.code == 128 + signal.SIGTERM
    assert not (tmp_path / "work").exists() and signal.getsignal(signal.SIGTERM) is before
    body, names = read_archive(tmp_path / "out" / "on-gpu-probe.tar.gz", "probe")
    assert {each["result"] for each in body["outcomes"]} == {"cut off"}
    assert "beside/had.txt" in names
