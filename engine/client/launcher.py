# SPDX-License-Identifier: Apache-2.0
"""Launches the engine core's process with its environment, a private directory and its settings.

The directory has the Unix sockets over which `process_client.py` and the core send messages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from ...tiers.processes.python_command import python_command
from ..config.engine_config import EngineConfig
from ..core.start import CoreStart, encode_start

# Limit of the directory's path, so that the path of a Unix socket in it fits into 107 bytes.
_MAX_DIRECTORY_BYTES = 90
# MALLOC_: with glibc's own thresholds, every large tensor is mapped, faulted in and unmapped again,
# which can cost more than filling the tensor. OpenMP: threads that spin at the end of each parallel
# loop cost a time slice for each operation if another process needs the processor (measured: 20
# times the whole work), so OpenMP's threads spin for microseconds only and then sleep.
CORE_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GOMP_SPINCOUNT": "1000",
}


class LaunchedCore:
    """An engine core's process. A thread calls `on_exit` with the exit status of the process."""

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        # mkdtemp gives only this user access to the directory, which protects the sockets in it.
        self.directory = Path(tempfile.mkdtemp(prefix="stratakv-"))
        if len(os.fsencode(self.directory)) > _MAX_DIRECTORY_BYTES:
            self.directory.rmdir()
            self.directory = Path(tempfile.mkdtemp(prefix="stratakv-", dir="/tmp"))
        self.to_core_endpoint = f"ipc://{self.directory}/to-core"
        self.from_core_endpoint = f"ipc://{self.directory}/from-core"

    def start(self, config: EngineConfig, log_level: str, log_json: bool) -> None:
        """Start the process. The caller must have bound the sockets."""
        self._process = subprocess.Popen(
            python_command("-m", "stratakv.engine.core.process"),
            stdin=subprocess.PIPE,
            stdout=2,  # standard error, because standard output may be for results
            env={**CORE_ENVIRONMENT, **os.environ},
            # Ctrl-C must reach only this process, which then sends the core a shutdown. The core
            # gets no session of its own: Linux schedules processes in groups by session, and the
            # compiler of grammars yields only to processes of its group.
            process_group=0,
        )
        threading.Thread(target=self._await_exit, name="core-exit", daemon=True).start()
        start = CoreStart(
            config, self.to_core_endpoint, self.from_core_endpoint, log_level, log_json
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode_start(start))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the core has exited already; `on_exit` reports the exit

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process id of the core. Raises RuntimeError before `start`."""
        if self._process is None:
            raise RuntimeError("the core process was not started")
        return self._process.pid

    def hang_up(self) -> None:
        """Close the core's standard input, by which the core detects its launcher's end."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # bytes were left to write, but the core has exited

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def remove_directory(self) -> None:
        """Remove the directory of the sockets. The caller must have closed the sockets."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _await_exit(self) -> None:
        assert self._process is not None
        self._on_exit(self._process.wait())


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was ended by {name}"
