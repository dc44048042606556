# SPDX-License-Identifier: Apache-2.0
"""Server processes of a benchmark: `stratakv serve`, `stratakv cache-server` and Redis.

The time to the first token of a served model is measured by a client over plain HTTP. The client
sends one request at a time, so that no other request changes the time.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Self

from ...tiers.processes.python_command import python_command
from .comparison import WrongWork
from .load_client import GREEDY, RequestFailed, StreamedAnswer, ask

HOST = "127.0.0.1"
_POLL_SECONDS = 0.02
_TAIL_BYTES = 4000
_START_SECONDS = 60.0
REDIS = "redis-server"
OPENSSL = "openssl"


class ServerFailed(RuntimeError):
    """A server did not start or answered with an error; the message has its log's last lines."""


class Server:
    """A server process that listens at a port of this host; a context manager."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, start_seconds: float = 120.0
    ) -> None:
        self.port = port
        self._log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
        self.pid = self._process.pid
        try:
            self._wait_until_ready(start_seconds)
        except BaseException:
            self._process.kill()
            self._process.wait(timeout=10)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_seconds: float = 60.0) -> None:
        """Send SIGTERM, and wait until the server has written its tiers back and ended. Raises
        ServerFailed after `timeout_seconds`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
            raise ServerFailed(f"did not stop in {timeout_seconds:.0f} s\n{self._tail()}") from None

    def _check_ready(self) -> None:
        """Raise OSError while the process does not listen at its port."""
        socket.create_connection((HOST, self.port), 2.0).close()

    def _wait_until_ready(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise ServerFailed(f"the server ended with code {code}\n{self._tail()}")
            try:
                self._check_ready()
                return
            except (OSError, http.client.HTTPException, ServerFailed):
                time.sleep(_POLL_SECONDS)
        raise ServerFailed(f"not ready after {timeout_seconds:.0f} s\n{self._tail()}")

    def _tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")


class ServedModel(Server):
    """A `stratakv serve` process, and requests to the process."""

    def __init__(self, arguments: Sequence[str], log: Path, start_seconds: float = 120.0) -> None:
        [port] = free_ports(1)
        command = python_command("-m", "stratakv.engine.cli.main", "serve", *arguments)
        command += ["--host", HOST, "--port", str(port), "--enable-dev-routes"]
        super().__init__(command, port, log, start_seconds)

    def reset(self, tiers: str = "all") -> None:
        """Empty the pool's prefix cache and, if `tiers` is `all`, the tiers."""
        self._exchange("POST", f"/reset_prefix_cache?tiers={tiers}")

    def metric(self, name: str) -> float:
        """Return the sum of one metric's values over all labels."""
        text = self._exchange("GET", "/metrics").decode()
        rows = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in rows)

    def warm_up(self) -> None:
        """Send a first request, which includes lazy initialisation and is not measured."""
        self.ask([1, 2, 3], 2)

    def ask(
        self, prompt: Sequence[int], max_tokens: int, timeout_seconds: float = 120.0
    ) -> StreamedAnswer:
        """Stream a greedy completion of token ids. The answer's times start just before the
        connection is opened."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True}
        path = "/v1/completions"
        try:
            return asyncio.run(ask(HOST, self.port, path, body | GREEDY, timeout_seconds))
        except RequestFailed as error:
            raise ServerFailed(f"{error}\n{self._tail()}") from error

    def _check_ready(self) -> None:
        self._exchange("GET", "/health", timeout_seconds=2.0)

    def _exchange(self, method: str, path: str, timeout_seconds: float = 30.0) -> bytes:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_seconds)
        with closing(connection):
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise ServerFailed(f"{method} {path}: HTTP {response.status} {body[:500]!r}")
            return body


def free_ports(count: int) -> list[int]:
    """Return ports of this host that are free now; another process may still take the ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def cache_server(cpu_bytes: int, *flags: str) -> Iterator[Server]:
    """Start a cache server with `cpu_bytes` of memory. Raises ServerFailed if it does not start."""
    port, data_port = free_ports(2)
    words = f"--port {port} --data-port {data_port} --drain-seconds 1 --cpu-bytes {cpu_bytes}"
    command = python_command("-m", "stratakv.engine.cli.main", "cache-server", *words.split())
    with (
        tempfile.TemporaryDirectory(prefix="stratakv-bench-") as folder,
        Server([*command, *flags], port, Path(folder) / "log", _START_SECONDS) as server,
    ):
        yield server


@contextmanager
def redis_server(binary: str) -> Iterator[Server]:
    """Start Redis without persistence. Raises ServerFailed if it does not start."""
    [port] = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="stratakv-bench-") as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        command += ["--save", "", "--appendonly", "no"]
        with Server(command, port, Path(folder) / "log", _START_SECONDS) as server:
            yield server


def find_redis(given: str | None) -> tuple[str, str]:
    """Return the path of the Redis binary and "", or "" and the reason why no binary was found."""
    binary = shutil.which(given or REDIS)
    return (binary, "") if binary else ("", f"{given or REDIS} is not installed")


@contextmanager
def certificate() -> Iterator[tuple[Path, Path]]:
    """Yield a certificate for this host, valid for a day, and its key. Raises WrongWork."""
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
            raise WrongWork(f"openssl made no certificate: {done.stderr[-_TAIL_BYTES:]}")
        yield cert, key
