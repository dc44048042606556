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
CACHE_UNIT = (DEPLOY / "stratakv-cache.service").read_text()
UNITS = {"stratakv.service": UNIT, "stratakv-cache.service": CACHE_UNIT}
MOST_EXPOSURE = 25  # tenths, as `systemd-analyze security` rates it
CONTAINERFILE = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
MALLOC = re.compile(r"\b(MALLOC_[A-Z_]+)=(\d+)")


def _unit_command(unit: str = UNIT) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *arguments = shlex.split(line)
    assert program.endswith("/stratakv")
    return [argument for argument in arguments if not argument.startswith("$")]


def _container_command() -> list[str]:
    (entrypoint,) = re.findall(r"^ENTRYPOINT (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    (command,) = re.findall(r"^CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert json.loads(entrypoint) == ["stratakv"]
    return list(json.loads(command))


@pytest.mark.parametrize(
    "command",
    [_unit_command(), _unit_command(CACHE_UNIT), _container_command()],
    ids=["unit", "cache-unit", "image"],
)
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
    for unit in UNITS.values():
        assert "StateDirectoryMode=0700" in unit
        assert "UMask=0077" in unit
    assert "install -d -m 0700" in CONTAINERFILE


needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed"
)


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_reads_the_unit_without_complaint(tmp_path: Path, name: str) -> None:
    unit = tmp_path / name
    # The program is not installed here, and its absence would be the one complaint.
    unit.write_text(UNITS[name].replace("/opt/stratakv/bin/stratakv", "/bin/true"))
    command = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_a_service_is_exposed_to_little(name: str) -> None:
    words = ["security", "--offline=yes", f"--threshold={MOST_EXPOSURE}", str(DEPLOY / name)]
    done = subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_cache_server_is_reloaded_by_the_signal_that_it_takes() -> None:
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in CACHE_UNIT
