# SPDX-License-Identifier: Apache-2.0
"""Processes of StrataKV commands on this machine, for the demos two_engines.py and cluster.py.

The module needs only an installed StrataKV.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

HOST = "127.0.0.1"
COMMAND = [sys.executable, "-P", "-m", "stratakv.engine.cli.main"]
START_SECONDS, END_SECONDS, ANSWER_SECONDS = 180.0, 30.0, 120.0
PAUSE_SECONDS = 0.2
# Requests to this machine go through no proxy, even if the environment names an HTTP proxy.
STRAIGHT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STORY = (
    "The lighthouse keeper wrote down every ship that passed, its flag, its course and the "
    "weather, and in the evening he read the day aloud to himself. "
)


class Failed(Exception):
    """A program did not start or did not answer; the message names the program."""


class Told(Exception):
    """A signal has requested the end of this process."""


class Program:
    """The process of a program, with its output in a file."""

    def __init__(self, name: str, words: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as sink:
            # Each program has its own process group, so that Ctrl-C does not end all at once.
            self._process = subprocess.Popen(
                [*COMMAND, *words],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def check(self) -> None:
        """Raise Failed if the program has ended."""
        code = self._process.poll()
        if code is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-5:]
            raise Failed("\n".join([f"the {self.name} ended with code {code}:", *lines]))

    def wait_for_port(self, port: int) -> None:
        """Wait until a process listens at the port. Raises Failed after START_SECONDS."""
        self._wait(lambda: socket.create_connection((HOST, port), 1.0).close())

    def wait_for_health(self, port: int) -> None:
        """Wait until the program reports its health. Raises Failed after START_SECONDS."""
        self._wait(lambda: get(port, "/health", 2.0))

    def end(self) -> None:
        """Send SIGTERM; kill the program if it has not ended after END_SECONDS."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait(self, attempt: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check()
            try:
                attempt()
                return
            except OSError:
                time.sleep(PAUSE_SECONDS)
        raise Failed(f"the {self.name} was not ready in {START_SECONDS:.0f} s; see {self.log}")


class Programs(list[Program]):
    """The programs in the order of their start; their logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def start(self, name: str, words: list[str]) -> Program:
        """Start a program, with its own log, and append it."""
        with _signals_later():  # so that a program that runs is in the list
            self.append(Program(name, words, self._folder / f"{name.replace(' ', '-')}.log"))
        return self[-1]

    def start_cache_server(self, port: int, data_port: int, cpu_bytes: str) -> None:
        """Start a cache server, and wait until it listens at `port`."""
        words = ["cache-server", "--port", str(port), "--data-port", str(data_port)]
        self.start("cache server", [*words, "--cpu-bytes", cpu_bytes]).wait_for_port(port)

    def start_engine(
        self, name: str, port: int, model: str | None, cache_port: int, *flags: str
    ) -> Program:
        """Start an engine with a small CPU tier and, below it, the cache server at `cache_port`."""
        words = ["serve", *([] if model is None else [model]), "--host", HOST, "--port", str(port)]
        tiers = ["--kv-offload", f"cpu,grpc://{HOST}:{cache_port}"]
        return self.start(name, [*words, *tiers, "--kv-offload-cpu-bytes", "128MiB", *flags])

    def end(self) -> None:
        """End all programs, the last one first, so that the cache server gets all blocks."""
        for number in SIGNALS:  # a second signal must not interrupt the ending
            signal.signal(number, signal.SIG_IGN)
        for program in reversed(self):
            program.end()


@contextlib.contextmanager
def programs() -> Iterator[Programs]:
    """Yield an empty list for programs. On exit, all programs in the list are ended."""
    with tempfile.TemporaryDirectory(prefix="stratakv-deploy-") as folder:
        started = Programs(Path(folder))
        try:
            yield started
        finally:
            started.end()


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Delay signals: a signal inside the context raises Told at the context's end."""
    came: list[int] = []
    before = [signal.signal(number, lambda *_: came.append(1)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
    if came:
        raise Told


def run(work: Callable[[], object]) -> int:
    """Run `work`, which a signal ends early; return the exit code."""

    def tell(*_: object) -> None:
        raise Told

    for number in SIGNALS:
        signal.signal(number, tell)
    try:
        work()
    except Told:
        return 0
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def free_ports(count: int) -> list[int]:
    """Return ports at which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def get(port: int, path: str, seconds: float) -> str:
    """Return the body of the answer to a GET request to this machine, as text."""
    with STRAIGHT.open(f"http://{HOST}:{port}{path}", timeout=seconds) as response:
        body: bytes = response.read()
        return body.decode()
