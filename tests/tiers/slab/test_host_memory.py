# SPDX-License-Identifier: Apache-2.0
"""The memory that can be had is the least of what host and container leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.tiers.slab.host_memory import available_memory_bytes

GIB = 2**30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    return path


def group(directory: Path, prefix: str, limit: str, used: str, most: str, now: int) -> Path:
    """The files of a control group that has cached one GiB of files."""
    (directory / prefix).mkdir(parents=True)
    (directory / prefix / limit).write_text(most + "\n")
    (directory / prefix / used).write_text(f"{now}\n")
    stat = f"anon 123\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\nshmem {GIB}\n"
    (directory / prefix / "memory.stat").write_text(stat)
    return directory


def version_2(directory: Path, most: str, now: int) -> Path:
    return group(directory, "", "memory.max", "memory.current", most, now)


def version_1(directory: Path, most: str, now: int) -> Path:
    limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    return group(directory, "memory", limit, used, most, now)


Write = Callable[[Path, str, int], Path]


def test_a_host_without_containers(meminfo: Path, tmp_path: Path) -> None:
    assert available_memory_bytes(meminfo, tmp_path / "nothing") == 8 * GIB


@pytest.mark.parametrize("write", [version_1, version_2])
@pytest.mark.parametrize(
    ("limit", "used", "left"), [(4, 2, 3), (2, 4, 0), (100, 2, 8)], ids=["some", "none", "all"]
)
def test_a_container_with_a_limit(
    write: Write, limit: int, used: int, left: int, meminfo: Path, tmp_path: Path
) -> None:
    groups = write(tmp_path / "groups", str(limit * GIB), used * GIB)
    assert available_memory_bytes(meminfo, groups) == left * GIB


def test_a_container_without_a_limit(meminfo: Path, tmp_path: Path) -> None:
    groups = version_2(tmp_path / "groups", "max", GIB)
    assert available_memory_bytes(meminfo, groups) == 8 * GIB


@pytest.mark.parametrize(
    ("row", "prefix", "limit", "used"),
    [
        ("0::", ".", "memory.max", "memory.current"),
        ("4:cpu,memory:", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
    ids=["version 2", "version 1"],
)
def test_u01_a_group_inside_others(
    row: str, prefix: str, limit: str, used: str, meminfo: Path, tmp_path: Path
) -> None:
    """A service of systemd: the smallest of the limits on the way up counts."""
    groups, own = tmp_path / "groups", tmp_path / "own"
    group(groups, f"{prefix}/system.slice", limit, used, str(3 * GIB), GIB)
    group(groups, f"{prefix}/system.slice/a.service", limit, used, str(7 * GIB), GIB)
    own.write_text(f"1:pids:/elsewhere\n{row}/system.slice/a.service\n")
    assert available_memory_bytes(meminfo, groups, own) == 3 * GIB
    own.write_text(f"{row}/\n")
    assert available_memory_bytes(meminfo, groups, own) == 8 * GIB


def test_nobody_says(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", tmp_path / "none") is None


def test_this_host_says_something() -> None:
    available = available_memory_bytes()
    assert available is not None
    assert available > 0
