# SPDX-License-Identifier: Apache-2.0
"""The servers of a run, in processes of their own: `stratakv cache-server` and redis-server."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..harness.comparison import WrongWork
from ..harness.served import Server, free_ports

_START_SECONDS = 60.0
_SHOWN_CHARACTERS = 500
REDIS = "redis-server"
OPENSSL = "openssl"


@contextlib.contextmanager
def cache_server(cpu_bytes: int, *flags: str) -> Iterator[Server]:
    """A cache server with so much memory. Raises ServerFailed where it does not start."""
    port, data_port = free_ports(2)
    command = [sys.executable, "-P", "-m", "stratakv.engine.cli.main", "cache-server"]
    command += ["--port", str(port), "--data-port", str(data_port), "--drain-seconds", "1"]
    command += ["--cpu-bytes", str(cpu_bytes), *flags]
    with (
        tempfile.TemporaryDirectory(prefix="stratakv-bench-") as folder,
        Server(command, port, Path(folder) / "log", _START_SECONDS) as server,
    ):
        yield server


@contextlib.contextmanager
def redis_server(binary: str) -> Iterator[Server]:
    """Redis without a disk. Raises ServerFailed where it does not start."""
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no"]
        with Server(command, port, Path(folder) / "log", _START_SECONDS) as server:
            yield server


def find_redis(given: str | None) -> tuple[str, str]:
    """The binary, or why there is none."""
    binary = shutil.which(given or REDIS)
    return (binary, "") if binary else ("", f"{given or REDIS} is not installed")


@contextlib.contextmanager
def certificate() -> Iterator[tuple[Path, Path]]:
    """A certificate of this host and its key, for a day. Raises WrongWork."""
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as folder:
        cert, key = Path(folder) / "cert.pem", Path(folder) / "key.pem"
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
        command = [OPENSSL, *words.split(), "-subj", "/CN=localhost"]
        command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        command += ["-keyout", str(key), "-out", str(cert)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )
        if done.returncode:
            raise WrongWork(f"openssl made no certificate: {done.stderr[-_SHOWN_CHARACTERS:]}")
        yield cert, key
