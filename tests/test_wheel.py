# SPDX-License-Identifier: Apache-2.0
"""A wheel holds the packages and their data, and nothing else of the repository.

The wheel is built twice: as here, and with a compiler that fails, which must not end it.

The other tests run on an editable install, which sees every file of the tree, packaged or not.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stratakv.kernels.cpu.library import FILE_NAME

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "connector", "engine", "kernels", "proto", "tiers")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info", "*.so")
LIBRARY = f"stratakv/kernels/cpu/{FILE_NAME}"

pytestmark = pytest.mark.slow


def _names_in_wheel(place: Path, **environment: str) -> set[str]:
    """Names in a wheel that is built from a copy, so that nothing is left in the repository."""
    copy, out = place / "repository", place / "wheel"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(out), str(copy)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return _names_in_wheel(tmp_path_factory.mktemp("source"))


def _expected() -> set[str]:
    names = {"stratakv/__init__.py", "stratakv/py.typed"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            # What benchmarks found stays in the repository.
            left_out = {"__pycache__", "results"} & set(path.parts) or path.suffix == ".so"
            if path.is_file() and not left_out:
                names.add(f"stratakv/{path.relative_to(ROOT).as_posix()}")
    return names


def test_wheel_holds_the_packages_and_their_data(wheel_names: set[str]) -> None:
    held = {name for name in wheel_names if ".dist-info/" not in name}
    assert held - {LIBRARY} == _expected()


@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)
def test_wheel_holds_the_library_where_it_can_be_built(wheel_names: set[str]) -> None:
    assert LIBRARY in wheel_names


def test_a_compiler_that_fails_ends_no_installation(tmp_path: Path) -> None:
    held = _names_in_wheel(tmp_path, CC="false", CXX="false")
    assert {name for name in held if ".dist-info/" not in name} == _expected()


def test_wheel_carries_licence_notice_and_command(wheel_names: set[str]) -> None:
    metadata = {name.split(".dist-info/")[1] for name in wheel_names if ".dist-info/" in name}
    assert {"licenses/LICENSE", "licenses/NOTICE", "entry_points.txt"} <= metadata
