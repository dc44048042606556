# SPDX-License-Identifier: Apache-2.0
"""A wheel holds the packages and their data, and nothing else of the repository.

The other tests run on an editable install, which sees every file of the tree, packaged or not.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "connector", "engine", "kernels", "proto", "tiers")
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel that is built from a copy, so that nothing is left in the repository."""
    copy = tmp_path_factory.mktemp("source") / "repository"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def _expected() -> set[str]:
    names = {"stratakv/__init__.py", "stratakv/py.typed"}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            # What benchmarks found stays in the repository.
            if path.is_file() and not {"__pycache__", "results"} & set(path.parts):
                names.add(f"stratakv/{path.relative_to(ROOT).as_posix()}")
    return names


def test_wheel_holds_the_packages_and_their_data(wheel_names: set[str]) -> None:
    held = {name for name in wheel_names if ".dist-info/" not in name}
    assert held == _expected()


def test_wheel_carries_licence_notice_and_command(wheel_names: set[str]) -> None:
    metadata = {name.split(".dist-info/")[1] for name in wheel_names if ".dist-info/" in name}
    assert {"licenses/LICENSE", "licenses/NOTICE", "entry_points.txt"} <= metadata
