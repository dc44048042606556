# SPDX-License-Identifier: Apache-2.0
"""The memory that is available to this process, on its host and in its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
# The files with limit, use and details of a control group, of version 2 and of version 1.
_FILES_V2 = ("memory.max", "memory.current", "memory.stat")
_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
# Counters of cached pages of files, which the kernel frees when memory is needed.
_RECLAIMABLE = frozenset({"inactive_file", "active_file"})


def available_memory_bytes(
    meminfo: Path = MEMINFO, cgroups: Path = CGROUPS, own: Path = OWN_CGROUP
) -> int | None:
    """Return the bytes that this process can use without a swap or a kill; None if unknown."""
    places = _groups_above(cgroups, own)
    answers = [_host_bytes(meminfo), *(_left_bytes(place, *files) for place, files in places)]
    return min((answer for answer in answers if answer is not None), default=None)


def _groups_above(cgroups: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Return the control groups of this process, up to the root, because each may have a limit. In
    a container, the container's group is the root."""
    paths = {"": "/", "memory": "/"}
    try:
        rows = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError):
        rows = []
    for _, controllers, path in (row for row in rows if len(row) == 3):
        paths.update({name: path for name in controllers.split(",") if name in paths})
    for name, path in paths.items():
        files = _FILES_V1 if name else _FILES_V2
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents) if inner.name else (inner,):
            yield cgroups / name / group, files


def _host_bytes(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_bytes(group: Path, limit: str, used: str, details: str) -> int | None:
    """Return the bytes left below the limit of a control group; None without a group or a limit."""
    try:
        most, now = [int((group / name).read_text(encoding="ascii")) for name in (limit, used)]
        rows = (group / details).read_text(encoding="ascii").split("\n")
        pairs = [row.split() for row in rows if row]
        cached = sum(int(number) for name, number in pairs if name in _RECLAIMABLE)
    except (OSError, ValueError):  # a missing file, or the word "max"
        return None
    return max(0, most - (now - cached))
