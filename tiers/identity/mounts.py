# SPDX-License-Identifier: Apache-2.0
"""The file system of a path, from the kernel's table of mounts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A row of the table of mounts."""

    point: str
    kind: str  # the type of file system, such as ext4, tmpfs, fuse.sshfs
    source: str
    options: frozenset[str]  # options of the mount and of its file system
    is_image: bool  # whether the file system is read-only or lies in a file


def mount_of(path: Path, mounts: Path = MOUNTS) -> Mount | None:
    """Return the innermost mount above a path; None if unknown. May raise OSError."""
    real, best = Path(os.path.realpath(path)), None  # does not raise for a circle of links
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields.split()[4])
        kind, source, *super_options = rest.split()
        # Of two mounts at one mount point, the later mount is visible.
        if real.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            options = ",".join([fields.split()[5], *super_options])
            is_image = "ro" in ",".join(super_options).split(",") or "/dev/loop" in source
            best = Mount(point, kind, source, frozenset(options.split(",")), is_image)
    return best
