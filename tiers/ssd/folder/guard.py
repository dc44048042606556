# SPDX-License-Identifier: Apache-2.0
"""Protects a store from a damaged index: checks the index before use, and moves it aside if
damaged.

A damaged LMDB file can kill the process that opens it, by SIGBUS or SIGABRT. So `scan.py` checks
and reads the file in a child process with a time limit. A store without its index only starts
empty; a damaged index could kill the engine."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ...processes.python_command import python_command
from ..index.index_file import DATA_FILE, SLOT_BYTES, VALUE_BYTES, IndexDamaged, RowBatch
from .scan import UNABLE

# Signals that reading a damaged file can cause; another signal was sent by another process.
_DEADLY_READS = ("SIGBUS", "SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")
_SCAN = Path(__file__).with_name("scan.py")
# The scan is run as a module, whose bytecode is cached; a script would be compiled each time.
_RUN_SCAN = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
import scan
sys.exit(scan.main(sys.argv[1:]))
"""
_MOST_ROWS_IN_BATCH = 65536
_SLOWEST_ROWS_PER_SECOND = 20_000  # rate of a slow scan; a fast scan reads 30 times as many
_PIPE_BYTES = 1024**2  # so large that the child can write while a batch is processed


def read_rows(folder: Path, timeout_seconds: float) -> Iterator[RowBatch]:
    """Yield all rows of the index in `folder`, then an empty batch. After the empty batch the
    caller can process all rows while the child reads the file a second time. Raises IndexDamaged,
    perhaps after some batches, so the rows can be trusted only when the iteration has ended. Raises
    OSError if lack of memory or a slow disk prevented the read; the index may then be undamaged and
    stays in place. `timeout_seconds` bounds the wait for the first rows. The bound grows with the
    number of rows so far, because the child reads all rows again at the end."""
    words = [str(_SCAN.parent), str(folder), *filter(None, sys.path)]
    command = python_command("-S", "-c", _RUN_SCAN, *words)
    watch = _Watch(timeout_seconds)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        # A host may forbid the larger pipe; opening then takes a little longer.
        with contextlib.suppress(OSError):
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        thread = threading.Thread(
            target=watch.run, args=(child,), name="stratakv-ssd-scan", daemon=True
        )
        thread.start()
        try:
            for batch in _batches(child.stdout):
                watch.saw(len(batch.slots) // SLOT_BYTES)
                yield batch
                watch.saw(0)
            text = child.stderr.read(65536).decode(errors="replace")
            status = child.wait()
        finally:
            watch.over.set()
            thread.join()
            child.kill()
    if watch.is_late:
        raise OSError(
            f"the scan of its index stood still for {watch.max_wait_seconds():g} seconds; give it "
            "a quicker disk, or remove the index to begin empty"
        )
    if status < 0:
        name = signal.Signals(-status).name
        if name not in _DEADLY_READS:
            raise OSError(f"the scan of its index was ended by {name}")
        raise IndexDamaged(f"reading it ended by {name}")
    if status == UNABLE:
        raise OSError(f"its index could not be scanned: {text.strip()}")
    if status:
        lines = text.strip().splitlines()
        raise IndexDamaged(lines[-1] if lines else f"the scan ended with status {status}")


class _Watch:
    """Kills a silent child. `run` has its own thread; only the reading thread calls `saw`."""

    def __init__(self, timeout_seconds: float) -> None:
        self.over = threading.Event()
        self.is_late = False
        self._timeout_seconds = timeout_seconds
        self._rows = 0
        self._seen_at = time.monotonic()

    def saw(self, num_rows: int) -> None:
        self._rows += num_rows
        self._seen_at = time.monotonic()

    def max_wait_seconds(self) -> float:
        """Seconds without output after which the child is killed, which grow with the rows read."""
        return self._timeout_seconds + self._rows / _SLOWEST_ROWS_PER_SECOND

    def run(self, child: subprocess.Popen[bytes]) -> None:
        """Wait until `over` is set, or kill the child after too long a time without output."""
        while True:
            left = self._seen_at + self.max_wait_seconds() - time.monotonic()
            if left <= 0:
                self.is_late = True
                child.kill()
                return
            if self.over.wait(left):
                return


def _batches(stream: IO[bytes]) -> Iterator[RowBatch]:
    """Yield whole batches. Stop at an incomplete batch; the child's exit status has the cause."""
    while len(head := stream.read(4)) == 4:
        count = int.from_bytes(head, "little")
        if count > _MOST_ROWS_IN_BATCH:
            return
        slots, values = stream.read(count * SLOT_BYTES), stream.read(count * VALUE_BYTES)
        if len(values) != count * VALUE_BYTES:
            return
        yield RowBatch(slots, values)
        if not count:
            return


def move_aside(folder: Path) -> Path:
    """Rename a damaged index to `<folder>.bad-<n>`, for inspection. Remove older ones."""
    earlier = set_aside(folder)
    numbers = [int(path.name.rpartition("-")[2]) for path in earlier]
    aside = folder.with_name(f"{folder.name}.bad-{max(numbers, default=0) + 1}")
    for path in earlier:
        shutil.rmtree(path)
    folder.rename(aside)
    return aside


def set_aside(folder: Path) -> list[Path]:
    found = folder.parent.glob(f"{folder.name}.bad-*")
    return [path for path in found if path.name.rpartition("-")[2].isdigit()]


def remove_larger(folder: Path, limit_bytes: int) -> None:
    """Remove set-aside indexes larger than `limit_bytes`: the store would exceed its capacity."""
    for path in set_aside(folder):
        data = path / DATA_FILE
        if not data.exists() or data.stat().st_size > limit_bytes:
            shutil.rmtree(path)
