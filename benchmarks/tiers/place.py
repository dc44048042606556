# SPDX-License-Identifier: Apache-2.0
"""Where the benchmark works: a folder on the disk that is checked first and gone afterwards, and
the host's pool of huge pages.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...tiers.settings.values import ConfigError
from ...tiers.shared_memory import HUGE_PAGE_BYTES

MOUNTS = Path("/proc/self/mountinfo")
MEMINFO = Path("/proc/meminfo")
_IN_MEMORY = ("tmpfs", "ramfs")


@contextlib.contextmanager
def working_folder(path: Path, needed_bytes: int) -> Iterator[Path]:
    """A new folder below `path`, removed with all it holds. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        kind = file_system_of(path)
        if kind in _IN_MEMORY:
            raise ConfigError(
                f"--path {path} is on {kind}, which is memory and says nothing of a disk; choose "
                "a folder on the disk to be measured"
            )
        free = shutil.disk_usage(path).free
        if free < needed_bytes:
            raise ConfigError(
                f"--path {path} has {free:,} bytes free and the benchmark takes {needed_bytes:,}; "
                "make room or choose another folder"
            )
        folder = tempfile.TemporaryDirectory(prefix="stratakv-bench-", dir=path)
    except OSError as error:
        raise ConfigError(
            f"--path {path} cannot be written to ({error.strerror}); choose another folder"
        ) from error
    with folder as name:
        yield Path(name)


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The kind of file system that `path` is on; None where the kernel does not say."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return None


def check_huge_pages(needed_bytes: int, meminfo: Path = MEMINFO) -> None:
    """Raises ConfigError where the host's pool has not so much free."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(found.get("HugePages_Free", "0"))
    needed = -(-needed_bytes // HUGE_PAGE_BYTES)
    if free < needed:
        raise ConfigError(
            f"--huge-pages takes {needed} free pages of the host's pool, which has {free}; run "
            f"`sysctl vm.nr_hugepages={needed}` or leave the option out"
        )
