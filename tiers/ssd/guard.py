# SPDX-License-Identifier: Apache-2.0
"""Stands between the store and a damaged index: looks first, and moves aside what is not sound.

A damaged LMDB file ends the process that opens it, by SIGBUS or SIGABRT, so `scan.py` looks at it
in a child process with a time limit. Knows nothing of what the index says; losing it costs a cold
cache, serving from a damaged one could cost the engine.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from . import index_file

log = logging.getLogger(__name__)

_SCAN = Path(__file__).with_name("scan.py")


def make_safe(folder: Path, scan_timeout_seconds: float) -> bool:
    """True if the index in `folder` is sound or absent; False if it was damaged and moved aside.

    At most one damaged index is kept, for inspection, as `<folder>.bad-<n>`.
    """
    data = folder / index_file.DATA_FILE
    if not data.exists():
        # A crash right after the folder was made leaves nothing worth keeping.
        shutil.rmtree(folder, ignore_errors=True)
        return True
    reason = find_damage(folder, scan_timeout_seconds)
    if reason is None:
        return True
    aside = move_aside(folder)
    log.warning(
        "the index of the SSD tier is damaged (%s); it was moved to %s and the tier starts empty",
        reason,
        aside,
    )
    return False


def find_damage(folder: Path, timeout_seconds: float) -> str | None:
    """What is wrong with the index in `folder`, None if nothing is."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_SCAN), str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"looking at it took longer than {timeout_seconds:g} seconds"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"reading it ended by {signal.Signals(-done.returncode).name}"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return lines[-1] if lines else f"the scan ended with status {done.returncode}"


def move_aside(folder: Path) -> Path:
    """Rename the folder to the next `.bad-<n>`, and remove those that were there before."""
    earlier = set_aside(folder)
    numbers = [int(path.name.rpartition("-")[2]) for path in earlier]
    aside = folder.with_name(f"{folder.name}.bad-{max(numbers, default=0) + 1}")
    for path in earlier:
        shutil.rmtree(path)
    folder.rename(aside)
    return aside


def set_aside(folder: Path) -> list[Path]:
    """The folders that were moved aside."""
    found = folder.parent.glob(f"{folder.name}.bad-*")
    return [path for path in found if path.name.rpartition("-")[2].isdigit()]


def remove_larger(folder: Path, limit_bytes: int) -> None:
    """Remove what was set aside by a larger store, which would break the bound of this one."""
    for path in set_aside(folder):
        data = path / index_file.DATA_FILE
        if not data.exists() or data.stat().st_size > limit_bytes:
            shutil.rmtree(path)
