# SPDX-License-Identifier: Apache-2.0
"""How much memory this process can still be given, by its host and by its container.

Knows nothing of who asks for it.
"""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
# Limit and use as a container sees its own: control groups version 2, then version 1.
CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
# Cached pages of files, which are given back when memory is needed.
_RECLAIMABLE = frozenset({"inactive_file", "active_file"})


def available_memory_bytes(meminfo: Path = MEMINFO, cgroups: Path = CGROUPS) -> int | None:
    """What can be had without swapping and without being killed for it; None if nobody says."""
    answers = [_host_bytes(meminfo), *(_left_bytes(cgroups, *files) for files in _CGROUP_FILES)]
    return min((answer for answer in answers if answer is not None), default=None)


def _host_bytes(meminfo: Path) -> int | None:
    """What the kernel believes it can hand out."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_bytes(cgroups: Path, limit: str, used: str, details: str) -> int | None:
    """What a control group leaves; None where there is none or it has no limit."""
    try:
        most, now = [int((cgroups / name).read_text(encoding="ascii")) for name in (limit, used)]
        rows = (cgroups / details).read_text(encoding="ascii").split("\n")
        pairs = [row.split() for row in rows if row]
        cached = sum(int(number) for name, number in pairs if name in _RECLAIMABLE)
    except (OSError, ValueError):  # not there, or the word "max"
        return None
    return max(0, most - (now - cached))
