# SPDX-License-Identifier: Apache-2.0
"""FileState: five numbers, at least one of which changes when a file is written or replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileState(NamedTuple):
    """The state of a file. Equal states mean that the file is the same and unchanged."""

    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileState:
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )


def state_of(path: Path) -> FileState | None:
    try:
        return FileState.from_stat(os.stat(path))
    except OSError:
        return None
