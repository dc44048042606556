# SPDX-License-Identifier: Apache-2.0
"""What is handed out: the source distribution, the wheel that is made of it, and both at work in an
environment of their own, with the compiled library and without it.

The other tests run on an editable install, which sees every file of the tree, packaged or not.
Objects of an equal library are taken from where `make` has kept them: setup.py says how.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from stratakv.kernels.cpu.library import FILE_NAME
from stratakv.tiers.native.native_library import FILE_NAME as NATIVE_NAME

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "connector", "engine", "kernels", "proto", "tiers")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info", "*.so")
LIBRARIES = {f"stratakv/kernels/cpu/{FILE_NAME}", f"stratakv/tiers/native/{NATIVE_NAME}"}
NO_COMPILER = {"CC": "false", "CXX": "false"}
BUILD_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
CAN_COMPILE = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)

pytestmark = pytest.mark.slow


def _run(*command: str | Path, cwd: Path | None = None, **environment: str) -> tuple[str, str]:
    """What a command says, and to standard error."""
    kept = {"KEEP_OBJECTS_IN": str(ROOT / "build" / "objects")}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=cwd,
        env={**kept, **os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, of a copy, so that nothing is left in the repository."""
    place = tmp_path_factory.mktemp("source")
    copy, out = place / "repository", place / "dist"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    _run(sys.executable, "-c", BUILD_SDIST, out, cwd=copy)
    shutil.rmtree(copy)
    (made,) = out.glob("*.tar.gz")
    return made


def _wheel(source: Path, out: Path, **environment: str) -> Path:
    command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps")
    _run(*command, "--no-build-isolation", "--wheel-dir", out, source, **environment)
    (wheel,) = out.glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    return wheel


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return _wheel(source, source.parent / "with")


@pytest.fixture(scope="module")
def plain_wheel(source: Path) -> Path:
    """Built where the compiler fails."""
    return _wheel(source, source.parent / "without", **NO_COMPILER)


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def _generated(wheel: Path, place: Path) -> tuple[str, str]:
    """An answer of the installed command, and its log. Where it is installed has nothing else of
    ours, and sees what we depend on."""
    venv.create(place, symlinks=True)
    python, command = place / "bin" / "python", place / "bin" / "stratakv"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    _run(*pip, "--no-index", "--no-compile", wheel)
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    options = ("--max-tokens", "12", "--temperature", "0", "--num-blocks", "64")
    answer, log = _run(
        command, "generate", "--prompt", "The cache keeps", *options, "--log-level", "info",
        cwd=place, PYTHONPATH="",
    )  # fmt: skip
    assert f"loading {packages}/stratakv/engine/models/embedded" in log
    return answer, log


def _expected() -> set[str]:
    names = {"stratakv/__init__.py", "stratakv/py.typed"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            # What benchmarks found stays in the repository.
            left_out = {"__pycache__", "results"} & set(path.parts) or path.suffix == ".so"
            if path.is_file() and not left_out:
                names.add(f"stratakv/{path.relative_to(ROOT).as_posix()}")
    return names


def test_wheel_holds_the_packages_and_their_data(wheel: Path) -> None:
    held = {name for name in _names(wheel) if ".dist-info/" not in name}
    assert held - LIBRARIES == _expected()


def test_a_compiler_that_fails_ends_no_build(plain_wheel: Path) -> None:
    held = {name for name in _names(plain_wheel) if ".dist-info/" not in name}
    assert held == _expected()


@CAN_COMPILE
def test_both_wheels_give_the_same_answer_and_one_says_what_it_lacks(
    wheel: Path, plain_wheel: Path, tmp_path: Path
) -> None:
    assert set(_names(wheel)) >= LIBRARIES
    answer, log = _generated(wheel, tmp_path / "with")
    assert "attention on the CPU by kernels for " in log or "this processor has no AVX2" in log
    plain_answer, plain_log = _generated(plain_wheel, tmp_path / "without")
    said = [line for line in plain_log.splitlines() if "attention on the CPU" in line]
    assert len(said) == 1 and "by torch, without compiled kernels: they were not built" in said[0]
    assert answer == plain_answer and len(answer.split()) > 3


def test_wheel_carries_licence_notice_and_command(wheel: Path) -> None:
    names = _names(wheel)
    metadata = {name.split(".dist-info/")[1] for name in names if ".dist-info/" in name}
    assert {"licenses/LICENSE", "licenses/NOTICE", "entry_points.txt"} <= metadata
