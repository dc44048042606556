# SPDX-License-Identifier: Apache-2.0
"""`make tritons` after a download that broke off."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As pip does: what a folder holds already it leaves as it is, and calls that a success.
PIP = """#!/bin/sh
while [ "$1" != --target ]; do shift; done
test -d "$2/triton" || { mkdir -p "$2/triton" && touch "$2/triton/whole"; }
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="runs make")
def test_what_a_download_that_broke_off_left_is_not_taken_for_a_package(tmp_path: Path) -> None:
    pip, folder = tmp_path / "pip", tmp_path / "tritons" / "3.6.0"
    pip.write_text(PIP)
    pip.chmod(0o700)
    (tmp_path / "tritons" / "3.6.0.part" / "triton").mkdir(parents=True)
    variables = [f"BIN={tmp_path}", f"OTHER_TRITON={folder}", "STAMP=Makefile"]
    subprocess.run(["make", *variables, "tritons"], cwd=ROOT, check=True, timeout=60)
    assert (folder / "triton" / "whole").exists()
    assert list(folder.parent.iterdir()) == [folder]
