# SPDX-License-Identifier: Apache-2.0
"""`tools/on_gpu.py`: limits, groups, wheels, archives, what it refuses; rehearsals of its steps."""

from __future__ import annotations

import os
import re
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .gpu_session_tool import imported_tool, python, read_archive

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "gpu.md").read_text()
REHEARSAL_SECONDS = 540  # of all steps on two cores
QUARTER_SECONDS = 240  # of the two that come first
FITTING = f"1.0-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}-linux_{os.uname().machine}"


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with imported_tool() as module:
        yield module


@pytest.fixture
def steps(tool: ModuleType) -> ModuleType:
    return sys.modules["gpu_session.steps"]


@pytest.fixture
def environment(tool: ModuleType) -> ModuleType:
    return sys.modules["gpu_session.environment"]


# The quarter of an hour


def longest(groups: list[Any]) -> float:
    return sum(max(each.seconds for each in group) for group in groups)


def test_the_two_steps_fit_into_a_quarter_of_an_hour(steps: ModuleType) -> None:
    limits = {name: steps.seconds_of(name, 900.0) for name in ("first", "figures")}
    assert limits == {"first": 280, "figures": 440}
    for name, limit in limits.items():
        groups = steps.groups_of(name, is_rehearsal=False)
        assert longest(groups) <= limit - 15, f"{name}: beside unpacking and packing"
    first, side_by_side = steps.groups_of("first", is_rehearsal=False)
    assert [each.name for each in first] == ["probe"] and first[0].seconds <= 75
    assert [each.name for each in side_by_side] == ["tokens", "tests-order", "tests-kernels"]
    start, gap = 90, 30
    assert start + sum(limits.values()) + gap <= 900


def test_figures_come_by_their_value(steps: ModuleType) -> None:
    groups = steps.groups_of("figures", is_rehearsal=False)
    found = [(steps.sections_of(each), each.seconds) for group in groups for each in group]
    assert found == [
        (["copy device", "engine-phases"], 130),
        (["decode", "prefill"], 95),
        (["prefill-library"], 40),
        (["engine-step"], 100),
        (["writes", "interference"], 60),
    ]
    assert all("--quick" in each.words for group in groups for each in group)


@pytest.mark.parametrize("name", ["first", "figures", "sanitize"])
def test_limits_are_shares_of_the_time_lent(steps: ModuleType, name: str) -> None:
    whole = steps.groups_of(name, is_rehearsal=False)
    half = steps.groups_of(name, is_rehearsal=False, lent=450.0)
    for group, smaller in zip(whole, half, strict=True):
        assert [each.seconds / 2 for each in group] == [each.seconds for each in smaller]
        assert [each.words for each in group] == [each.words for each in smaller]
    assert steps.seconds_of(name, 450.0) == steps.seconds_of(name, 900.0) / 2


def test_a_section_that_there_is_not_is_left_out_and_said(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = tool.read_arguments(["figures", "--rehearse"])
    tool_sections = ["ceilings", "copy device", "engine-phases", "decode", "prefill", "engine-step"]
    groups, notes = tool.choose_groups(args, [*tool_sections, "writes", "interference"])
    assert [each.name for [each] in groups] == [
        "bench-copy-device", "bench-decode", "bench-engine-step", "bench-writes",
    ]  # fmt: skip
    [note] = notes
    assert "has no section prefill-library" in note
    groups, notes = tool.choose_groups(args, [*tool_sections, "prefill-library", "writes"])
    assert [each.name for [each] in groups][2] == "bench-prefill-library" and len(notes) == 1


# The commit


@pytest.mark.parametrize(
    ("given", "known"), [(["--commit", "0123abc-dirty"], "0123abc-dirty"), ([], "")]
)
def test_results_name_their_commit_or_say_that_they_have_none(
    tool: ModuleType, steps: ModuleType, environment: ModuleType, tmp_path: Path, given: list[str],
    known: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    says = "import os; print(os.environ.get('STRATAKV_COMMIT', 'none'))"
    command = python(steps, "probe", says)
    monkeypatch.setattr(tool, "groups_of", lambda *_, **__: [(command,)])
    monkeypatch.setenv("STRATAKV_COMMIT", "of-somebody-else")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-git"))  # as where no .git has come
    out = tmp_path / "out"
    assert tool.main(["probe", "--rehearse", *given, "--out", str(out)]) == 0
    body, _ = read_archive(out / "on-gpu-probe.tar.gz", "probe")
    assert body["machine"]["commit"] == known
    assert body["outcomes"][0]["last_line"] == (known or "none")
    said = capsys.readouterr()
    assert ("NO COMMIT is known" in said.err) is (not known)
    assert ("note: NO COMMIT is known" in said.out) is (not known)
    assert bool(body["notes"]) is (not known)
    assert [path.name for path in out.iterdir()] == ["on-gpu-probe.tar.gz"], "and nothing beside it"


# Wheels and what else is refused


def make_wheel(folder: Path, name: str, files: dict[str, str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in (files or {"carried_thing.py": "value = 41 + 1"}).items():
            wheel.writestr(place, text)
    return path


def test_a_carried_wheel_is_on_the_path(environment: ModuleType, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", f"carried_thing-{FITTING}.whl")
    (tmp_path / "work").mkdir()
    variables, names = environment.prepare(
        tmp_path / "work", tmp_path / "wheels", is_rehearsal=True
    )
    assert names == [f"carried_thing-{FITTING}.whl"]
    said = environment.ask_python(
        "import carried_thing, stratakv, importlib.util as u; "
        "print(carried_thing.value, stratakv.__file__, u.find_spec('fastapi'))",
        variables,
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
    environment: ModuleType, tmp_path: Path, names: list[str], message: str
) -> None:
    (tmp_path / "wheels").mkdir()
    for name in names:
        make_wheel(tmp_path / "wheels", name)
    with pytest.raises(environment.WrongUse, match=message):
        environment.unpack_wheels(tmp_path / "wheels", tmp_path / "site")


def test_a_wheel_writes_nothing_beside_its_folder(environment: ModuleType, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", f"evil-{FITTING}.whl", {"../outside.py": ""})
    with pytest.raises(environment.WrongUse, match=r"'../outside.py', which no wheel has"):
        environment.unpack_wheels(tmp_path / "wheels", tmp_path / "site")
    (tmp_path / "wheels" / f"evil-{FITTING}.whl").write_bytes(b"PK no more")
    with pytest.raises(environment.WrongUse, match="carry it again"):
        environment.unpack_wheels(tmp_path / "wheels", tmp_path / "site")


def test_wheels_that_fit(environment: ModuleType) -> None:
    machine = os.uname().machine
    assert environment.fits("1.0-py3-none-any.whl") and environment.fits("1.0-py2.py3-none-any.whl")
    assert environment.fits(f"1.0-cp39-abi3-manylinux_2_28_{machine}.whl")
    assert not environment.fits(f"1.0-cp39-cp39-manylinux_2_28_{machine}.whl")
    assert not environment.fits("1.0-py2-none-any.whl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "decode"], "--only takes one of probe, bench-ceilings, not decode"),
        (["--seconds", "100"], "--seconds takes 240 or more, not 100"),
        (["--commit", "what I had"], "--commit takes a commit as `git describe"),
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
    tool: ModuleType, environment: ModuleType, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(environment, "NOT_THERE", (*environment.NOT_THERE, "lmdb", "zmq"))
    assert tool.main(["probe", "--rehearse"]) == 2
    assert "has no lmdb, zmq; carry the wheels" in capsys.readouterr().err


# The page


def test_the_page_has_every_step_section_and_target(
    steps: ModuleType, environment: ModuleType
) -> None:
    from stratakv.benchmarks.gpu import command

    for step in steps.STEPS:
        assert f"tools/on_gpu.py {step} " in PAGE and f"| `{step}` |" in PAGE
    for section in command.SECTIONS:
        for target in section.targets:
            assert f"`{target.name}`" in PAGE and f"`{section.name}`" in PAGE, target.name
    ours = {each.name for each in command.SECTIONS}
    started = set()
    for step in steps.STEPS:
        for group in steps.groups_of(step, is_rehearsal=False, peers="there"):
            for each in group:
                started |= set(steps.sections_of(each))
                if step in ("first", "figures"):
                    assert f"`{each.name}`" in PAGE and f" {each.seconds:g} s |" in PAGE
    assert started == ours, "every section is measured in some step"
    carried = re.search(r"\^\(([a-z0-9|]+)\)==", PAGE)
    assert carried is not None
    assert carried[1].replace("pyzmq", "zmq").split("|") == list(environment.CARRIED)


def test_the_page_has_the_versions_that_are_tested() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|", PAGE, re.M)
    assert len(rows) == 4
    assert all(pinned[name] == version for name, version in rows)
    serve = re.search(r"\^\((annotated[\w|-]+)\)==", PAGE)
    assert serve is not None and set(serve[1].split("|")) <= pinned.keys()


def test_the_places_that_the_page_names_are_there() -> None:
    """Constants that a figure moves, each in the file behind it."""
    named = re.findall(r"`([A-Z_]+)`[^(|]*\(`([\w/]+\.py)`\)", PAGE)
    assert {name for name, _ in named} == {"FEW_PROGRAMS", "PIECE_BYTES", "QUICK_BLOCKS"}
    named += [
        ("PROGRAM_TILES", "kernels/attention/paged_decode_launch.py"),
        ("SLAB_PRIOR", "connector/costs/economics.py"),
        ("STORE_PRIOR", "connector/costs/economics.py"),
        ("self.locked = Way.BATCHED", "connector/device/cuda_copier.py"),
    ]
    for name, file in named:
        assert file in PAGE and name.removeprefix("self.locked = ") in PAGE
        assert f"{name} " in (ROOT / file).read_text(), (name, file)


def test_the_files_of_tests_are_there(steps: ModuleType) -> None:
    places = (*steps.GPU_TESTS, *steps.ALONE_TESTS, *steps.ORDER_TESTS, *steps.KERNEL_TESTS)
    for place in (*places, steps.SANITIZER_TESTS):
        assert (ROOT / "tests" / place).exists(), place
    marked = {
        path.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and "mark.gpu" in path.read_text()
    }
    assert marked and all(path.startswith(steps.GPU_TESTS) for path in marked)


@pytest.mark.slow
def test_a_rehearsal_claims_nothing(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first command: imports as a bare machine has them."""
    only = ["--rehearse", "--only", "probe", "--out", str(tmp_path)]
    assert tool.main(["first", *only]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "nothing of it says anything about one" in said and "figures" not in said
    body, names = read_archive(tmp_path / "on-gpu-first.tar.gz", "first")
    assert body["is_rehearsal"] and body["machine"]["device"] == "none: a rehearsal"
    assert "probe/probe.json" in names and "probe/log.txt" in names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_steps_are_rehearsed_in_minutes(tool: ModuleType, tmp_path: Path, scale: str) -> None:
    if scale != "long":
        pytest.skip("takes minutes; run with --scale long")
    steps = sys.modules["gpu_session.steps"]
    began = time.monotonic()
    for step in steps.STEPS:
        assert tool.main([step, "--rehearse", "--out", str(tmp_path)]) == 0, step
        body, names = read_archive(tmp_path / f"on-gpu-{step}.tar.gz", step)
        assert body["is_rehearsal"] and all(o["result"] == "ok" for o in body["outcomes"])
        assert {f"{each['name']}/log.txt" for each in body["outcomes"]} <= names
        if step == "figures":
            assert time.monotonic() - began < QUARTER_SECONDS
    assert time.monotonic() - began < REHEARSAL_SECONDS
