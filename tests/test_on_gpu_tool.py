# SPDX-License-Identifier: Apache-2.0
"""`tools/on_gpu.py`: limits, wheels, archives, what it refuses; and rehearsals of its steps."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "gpu.md").read_text()
REHEARSAL_SECONDS = 300  # of all steps on two cores
FITTING = f"1.0-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_{os.uname().machine}"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "tools" / "on_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "on_gpu", module)  # dataclasses look there
        spec.loader.exec_module(module)
    return module


def run_all(tool: ModuleType, commands: list[Any], tmp_path: Path, seconds: float) -> Any:
    """The step as it was written into the archive, and the names in it."""
    results = tmp_path / "results"
    results.mkdir()
    step = tool.Step("probe", True, {}, [])
    archive = tmp_path / "a.tar.gz"
    tool.run_step(commands, step, results, archive, dict(os.environ), time.monotonic() + seconds)
    return read_archive(archive, "probe")


def read_archive(archive: Path, step: str) -> tuple[dict[str, Any], set[str]]:
    with tarfile.open(archive) as tar:
        names = {name.removeprefix(f"on-gpu-{step}/") for name in tar.getnames()}
        file = tar.extractfile(f"on-gpu-{step}/on-gpu.json")
        assert file is not None
        return json.load(file), names


def python(tool: ModuleType, name: str, code: str, seconds: float = 60) -> Any:
    return tool.Command(name, ("-c", code, "{out}"), seconds)


def test_each_command_has_its_end_and_all_is_kept(tool: ModuleType, tmp_path: Path) -> None:
    says = "import sys, pathlib; pathlib.Path(sys.argv[1], 'x.png').touch(); print('said')"
    # The child of the one that hangs must go with it.
    hangs = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, "
        "flush=True); time.sleep(600)"
    )
    commands = [
        python(tool, "good", says),
        python(tool, "bad", "raise SystemExit('broken')"),
        python(tool, "slow", hangs, seconds=1.5),
        python(tool, "last", "print('still there')"),
    ]
    body, names = run_all(tool, commands, tmp_path, 600)
    ends = {each["name"]: (each["result"], each["last_line"]) for each in body["outcomes"]}
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


def test_what_does_not_fit_is_left_out(tool: ModuleType, tmp_path: Path) -> None:
    body, _ = run_all(tool, [python(tool, "late", "print()")], tmp_path, 1)
    [outcome] = body["outcomes"]
    assert outcome["result"] == "left out" and "time was spent" in outcome["last_line"]


def test_a_benchmark_is_told_its_time(tool: ModuleType, tmp_path: Path) -> None:
    command = tool.Command("told", ("-c", "import sys; print(sys.argv[1])", "{seconds}"), 100)
    body, _ = run_all(tool, [command], tmp_path, 1000)
    assert body["outcomes"][0]["last_line"] == "75"


def test_a_machine_that_is_taken_back_leaves_nothing(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
    monkeypatch.setattr(tool, "commands_of", lambda *_, **__: [python(tool, "probe", code)])
    monkeypatch.setattr(tool.tempfile, "mkdtemp", lambda **_: str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        tool.main(["probe", "--rehearse", "--out", str(tmp_path / "out")])
    assert ended.value.code == 128 + signal.SIGTERM
    assert not (tmp_path / "work").exists() and signal.getsignal(signal.SIGTERM) is before


def make_wheel(folder: Path, name: str, files: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in (files or {"carried_thing.py": "value = 41 + 1"}).items():
            wheel.writestr(place, text)
    return path


def test_a_carried_wheel_is_on_the_path(tool: ModuleType, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", f"carried_thing-{FITTING}.whl")
    (tmp_path / "work").mkdir()
    environment, names = tool.prepare(tmp_path / "work", tmp_path / "wheels", is_rehearsal=True)
    assert names == [f"carried_thing-{FITTING}.whl"]
    said = tool.ask_python(
        "import carried_thing, stratakv, importlib.util as u; "
        "print(carried_thing.value, stratakv.__file__, u.find_spec('fastapi'))",
        environment,
    )
    assert said == f"42 {tmp_path}/work/names/stratakv/__init__.py None", "fastapi is hidden"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no file that ends in .whl"),
        (["lmdb-3.0.0-cp27-cp27m-manylinux1_x86_64.whl"], "is not for this machine"),
        (["lmdb-3.0.0-cp312-cp312-win_arm64.whl"], "is not for this machine"),
        (["lmdb-3.0.0.whl"], "is not for this machine"),
        ([f"a-{FITTING}.whl", f"a-2{FITTING}.whl"], "keep one of them"),
    ],
)
def test_wheels_that_are_refused(
    tool: ModuleType, tmp_path: Path, names: list[str], message: str
) -> None:
    (tmp_path / "wheels").mkdir()
    for name in names:
        make_wheel(tmp_path / "wheels", name)
    with pytest.raises(tool.WrongUse, match=message):
        tool.unpack_wheels(tmp_path / "wheels", tmp_path / "site")


def test_a_wheel_writes_nothing_beside_its_folder(tool: ModuleType, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", f"evil-{FITTING}.whl", {"../outside.py": ""})
    with pytest.raises(tool.WrongUse, match=r"'../outside.py', which no wheel has"):
        tool.unpack_wheels(tmp_path / "wheels", tmp_path / "site")
    (tmp_path / "wheels" / f"evil-{FITTING}.whl").write_bytes(b"PK no more")
    with pytest.raises(tool.WrongUse, match="carry it again"):
        tool.unpack_wheels(tmp_path / "wheels", tmp_path / "site")


def test_wheels_that_fit(tool: ModuleType) -> None:
    machine = os.uname().machine
    assert tool.fits("1.0-py3-none-any.whl") and tool.fits("1.0-py2.py3-none-any.whl")
    assert tool.fits(f"1.0-cp39-abi3-manylinux_2_28_{machine}.whl")
    assert not tool.fits(f"1.0-cp39-cp39-manylinux_2_28_{machine}.whl")
    assert not tool.fits("1.0-py2-none-any.whl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "decode"], "--only takes one of probe, bench-ceilings, not decode"),
        (["--wheels", "/nowhere/at/all"], "--wheels takes a folder"),
        (["--budget", "5"], "--budget takes 20 seconds or more, not 5"),
    ],
)
def test_wrong_use(
    tool: ModuleType, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["probe", "--rehearse", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_package_that_was_not_carried_is_named(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "NOT_THERE", (*tool.NOT_THERE, "lmdb", "zmq"))
    assert tool.main(["probe", "--rehearse"]) == 2
    assert "has no lmdb, zmq; carry the wheels" in capsys.readouterr().err


def test_the_page_has_every_step_section_and_target(tool: ModuleType) -> None:
    from stratakv.benchmarks.gpu import command

    for step in tool.STEPS:
        assert f"tools/on_gpu.py {step} " in PAGE and f"| `{step}` |" in PAGE
    for section in command.SECTIONS:
        for target in section.targets:
            assert f"`{target.name}`" in PAGE and f"`{section.name}`" in PAGE, target.name
    ours = {each.name for each in command.SECTIONS}
    started = set()
    for step in tool.STEPS:
        for each in tool.commands_of(step, is_rehearsal=False, peers="there"):
            if "--sections" in each.words:
                started |= set(each.words[each.words.index("--sections") + 1].split(","))
    assert started == ours, "every section is measured in some step"
    carried = re.search(r"\^\(([a-z0-9|]+)\)==", PAGE)
    assert carried is not None
    assert carried[1].replace("pyzmq", "zmq").split("|") == list(tool.CARRIED)


def test_the_files_of_tests_are_there(tool: ModuleType) -> None:
    for place in (*tool.GPU_TESTS, *tool.ALONE_TESTS, tool.SANITIZER_TESTS):
        assert (ROOT / "tests" / place).exists(), place
    marked = {
        path.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and "mark.gpu" in path.read_text()
    }
    assert marked and all(path.startswith(tool.GPU_TESTS) for path in marked)


@pytest.mark.slow
def test_a_rehearsal_claims_nothing(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command: imports as a bare machine has them."""
    only = ["--rehearse", "--only", "probe", "--out", str(tmp_path)]
    assert tool.main(["probe", *only]) == 0, capsys.readouterr().out
    assert "nothing of it says anything about one" in capsys.readouterr().out
    body, names = read_archive(tmp_path / "on-gpu-probe.tar.gz", "probe")
    assert body["is_rehearsal"] and body["machine"]["device"] == "none: a rehearsal"
    assert "probe/probe.json" in names and "probe/log.txt" in names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_steps_are_rehearsed_within_five_minutes(
    tool: ModuleType, tmp_path: Path, scale: str
) -> None:
    if scale != "long":
        pytest.skip("takes minutes; run with --scale long")
    began = time.monotonic()
    for step in tool.STEPS:
        assert tool.main([step, "--rehearse", "--out", str(tmp_path)]) == 0, step
        body, names = read_archive(tmp_path / f"on-gpu-{step}.tar.gz", step)
        assert body["is_rehearsal"] and all(o["result"] == "ok" for o in body["outcomes"])
        assert {f"{each['name']}/log.txt" for each in body["outcomes"]} <= names
    assert time.monotonic() - began < REHEARSAL_SECONDS
