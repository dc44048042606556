# SPDX-License-Identifier: Apache-2.0
"""The servers of a run, in processes of their own: `stratakv cache-server` and redis-server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..harness.comparison import WrongWork
from ..harness.served import free_ports

_START_SECONDS = 60.0
_EXIT_SECONDS = 10.0
_PAUSE_SECONDS = 0.02
_SHOWN_CHARACTERS = 500
REDIS = "redis-server"
OPENSSL = "openssl"


class Server(NamedTuple):
    """One that listens at a port of 127.0.0.1."""

    port: int
    pid: int


@contextlib.contextmanager
def cache_server(cpu_bytes: int, *flags: str) -> Iterator[Server]:
    """A cache server with so much memory. Raises WrongWork where it does not start."""
    port, data_port = free_ports(2)
    command = [sys.executable, "-P", "-m", "stratakv.engine.cli.main", "cache-server"]
    ports = ["--port", str(port), "--data-port", str(data_port), "--drain-seconds", "1"]
    with _running([*command, *ports, "--cpu-bytes", str(cpu_bytes), *flags], port) as server:
        yield server


@contextlib.contextmanager
def redis_server(binary: str) -> Iterator[Server]:
    """Redis without a disk. Raises WrongWork where it does not start."""
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        with _running([*command, "--save", "", "--appendonly", "no"], port) as server:
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


@contextlib.contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[Server]:
    """A process, once its port takes connections."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            if not _takes_connections(process, port):
                output.seek(0)
                words = output.read()[-_SHOWN_CHARACTERS:]
                raise WrongWork(f"{Path(command[0]).name} did not start: {words}")
            yield Server(port, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_EXIT_SECONDS)


def _takes_connections(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), _START_SECONDS).close()
            return True
        time.sleep(_PAUSE_SECONDS)
    return False
