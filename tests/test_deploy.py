# SPDX-License-Identifier: Apache-2.0
"""The deployment files start the program with flags that it has.

Images are not built and services not started here; what can be read and looked up is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import stratakv

from .free_ports import free_ports

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


def test_both_tell_systemd_when_they_are_ready() -> None:
    """As `tests/engine/cli/test_serve.py` and `tests/tiers/cache_server/test_reload.py` hear."""
    for unit in UNITS.values():
        assert "\nType=notify\n" in unit and re.search(r"^TimeoutStartSec=\d+min$", unit, re.M)


def test_the_cache_server_is_reloaded_by_the_signal_that_it_takes() -> None:
    assert "\nExecReload=/bin/kill -HUP $MAINPID\n" in CACHE_UNIT


# The image of the cache server


def _installed(package: str, *extras: str) -> set[str]:
    """The distributions that an installation of ours brings, by name."""
    found: set[str] = set()
    waiting = [(package, extras)]
    while waiting:
        name, wanted = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": each}) for each in ("", *wanted)):
                waiting.append((canonicalize_name(requirement.name), tuple(requirement.extras)))
    return found - {package}


def _only_these(folder: Path, names: set[str]) -> None:
    """Links to what these distributions have installed, and to the package itself."""
    folder.mkdir()
    for name in names:
        files = metadata.files(name)
        assert files is not None
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (folder / top).exists():  # google/ is shared
                (folder / top).symlink_to(str(metadata.distribution(name).locate_file(top)))
    (folder / "stratakv").symlink_to(Path(stratakv.__file__).parent)


def test_the_image_of_the_cache_server_needs_no_torch(tmp_path: Path) -> None:
    """It starts, keeps a disk, answers and ends with what its installation brings and no more."""
    text = (DEPLOY / "Containerfile.cache").read_text().replace("\\\n", " ")
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    names = _installed("stratakv", *extras.split(","))
    assert not names & {"torch", "numpy", "fastapi", "triton", "transformers"} and "grpcio" in names
    _only_these(tmp_path / "site", names)
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    words: list[str] = json.loads(command)
    assert words[words.index("--host") + 1] == "0.0.0.0"
    words[words.index("--host") + 1] = "127.0.0.1"  # or it would take TLS and credentials
    words[words.index("--ssd-path") + 1] = str(tmp_path / "tier")
    port, data_port = free_ports(2)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path / "site"),
        "PYTHONUNBUFFERED": "1",
        "STRATAKV_CACHE_SERVER_CPU_BYTES": "1MiB",
        "STRATAKV_CACHE_SERVER_SSD_BYTES": "16MiB",
        "STRATAKV_CACHE_SERVER_SSD_CODEC": "lossless",
        "STRATAKV_CACHE_SERVER_PORT": str(port),
        "STRATAKV_CACHE_SERVER_DATA_PORT": str(data_port),
    }
    program = [sys.executable, "-S", "-m", "stratakv.engine.cli.main"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    absent = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('numpy'))"
    said = subprocess.check_output([sys.executable, "-S", "-c", absent], timeout=60, **options)
    assert said == "None None\n"
    with subprocess.Popen([*program, *words], **pipes, **options) as server:
        try:
            assert server.stdout is not None
            assert "StrataKV cache server at" in server.stdout.readline()
            ping = [*program, "ping", f"grpc://127.0.0.1:{port}"]
            done = subprocess.run(ping, timeout=60, check=False, capture_output=True, **options)
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            server.terminate()
        assert server.wait(60) == 0
    assert "USER 10001:10001" in text and "install -d -m 0700" in text
