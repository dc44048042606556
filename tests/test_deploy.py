# SPDX-License-Identifier: Apache-2.0
"""The deployment files start the program with flags that it has.

Images are not built and services not started here; what can be read and looked up is.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
UNIT = (DEPLOY / "stratakv.service").read_text()
CONTAINERFILE = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
MALLOC = re.compile(r"\b(MALLOC_[A-Z_]+)=(\d+)")


def _unit_command() -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    program, *arguments = shlex.split(line)
    assert program.endswith("/stratakv")
    return [argument for argument in arguments if argument != "$STRATAKV_ARGS"]


def _container_command() -> list[str]:
    (entrypoint,) = re.findall(r"^ENTRYPOINT (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    (command,) = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert json.loads(entrypoint) == ["stratakv"]
    return list(json.loads(command))


@pytest.mark.parametrize("command", [_unit_command(), _container_command()], ids=["unit", "image"])
def test_every_flag_exists(command: list[str]) -> None:
    script = Path(sys.executable).with_name("stratakv")
    done = subprocess.run(
        [str(script), command[0], "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for flag in (argument for argument in command if argument.startswith("--")):
        assert re.search(rf"{re.escape(flag)}(?![\w-])", done.stdout), f"{flag} is not in the help"


def test_both_set_the_same_malloc_thresholds() -> None:
    assert dict(MALLOC.findall(UNIT)) == dict(MALLOC.findall(CONTAINERFILE)) != {}


def test_the_image_runs_as_an_ordinary_user() -> None:
    last_stage = CONTAINERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*", last_stage, re.MULTILINE)


def test_the_store_is_closed_to_other_users() -> None:
    assert "StateDirectoryMode=0700" in UNIT
    assert "UMask=0077" in UNIT
    assert "install -d -m 0700" in CONTAINERFILE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit_without_complaint(tmp_path: Path) -> None:
    unit = tmp_path / "stratakv.service"
    # The program is not installed here, and its absence would be the one complaint.
    unit.write_text(UNIT.replace("/opt/stratakv/bin/stratakv", "/bin/true"))
    command = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
