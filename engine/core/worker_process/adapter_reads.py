# SPDX-License-Identifier: Apache-2.0
"""The two ends of adapter reads in a worker process, which run in parallel with its steps.

    AdapterReads, executor   ── number, path ──►   AdapterReader, worker: a thread for each adapter
                             ◄── fingerprint ──    the adapter is kept under its number
    add_adapter(number), between two steps ──►     `take_adapter`

The messages are lines of JSON on a pair of sockets of their own, because each socket of the steps
belongs to one thread."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from ....tiers.settings.values import ConfigError
from ...worker.adapter_slots import ReadAdapter
from ..executor import ExecutorDied

logger = logging.getLogger(__name__)

READ_SECONDS = 600.0  # enough for a large adapter on a slow disk


class Ask(msgspec.Struct, array_like=True):
    """Read the adapter in the folder `path`; without a path, forget the adapter `number`."""

    number: int
    path: str | None = None


class Answer(msgspec.Struct, array_like=True):
    """The answer to an `Ask` with a path."""

    number: int
    fingerprint: bytes = b""
    rank: int = 0
    num_bytes: int = 0
    error: str = ""
    is_config_error: bool = False


_ask_decoder, _answer_decoder = msgspec.json.Decoder(Ask), msgspec.json.Decoder(Answer)


class AdapterReads:
    """The executor's end. Any thread may call `read_adapter`."""

    def __init__(self) -> None:
        self._socket, self._of_worker = socket.socketpair()
        self.worker_fd = self._of_worker.fileno()  # to be passed to the worker
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Answer]] = {}
        self._has_ended = False

    def start_receiving(self) -> None:
        """Receive answers from now on; the worker process has its end."""
        self._of_worker.close()
        threading.Thread(target=self._receive, name="stratakv-adapter-answers", daemon=True).start()

    def close(self) -> None:
        """End all reads, which raise ExecutorDied. Idempotent."""
        _close(self._socket)
        self._of_worker.close()

    def read_adapter(self, path: Path) -> ReadAdapter:
        """Wait until the worker has read an adapter. Raises ConfigError for an unusable adapter and
        after READ_SECONDS, and ExecutorDied if the worker has ended."""
        number, future = next(self._numbers), Future[Answer]()
        with self._lock:
            self._pending[number] = future
            self._send(Ask(number, str(path)))
        try:
            answer = future.result(READ_SECONDS)
        except TimeoutError:
            with self._lock:
                is_late = self._pending.pop(number, None) is not None
            if is_late:
                raise ConfigError(
                    f"{path} was not read within {READ_SECONDS:g} s; copy it to a faster disk, and "
                    "load it again"
                ) from None
            answer = future.result()
        if answer.is_config_error:
            raise ConfigError(answer.error)
        if answer.error:
            raise RuntimeError(answer.error)
        return ReadAdapter(path, answer.fingerprint, answer.rank, answer.num_bytes, number=number)

    def _send(self, ask: Ask) -> None:
        if not self._has_ended:
            try:
                self._socket.sendall(msgspec.json.encode(ask) + b"\n")
                return
            except OSError:
                pass  # the worker ends
        future = self._pending.pop(ask.number, None)
        if future is not None:
            future.set_exception(_ended())

    def _receive(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._save(_answer_decoder.decode(line))
        except OSError:
            pass  # the worker has closed the connection
        except Exception:
            logger.exception("answers about adapters are received no longer")
        with self._lock:
            self._has_ended = True
            for future in self._pending.values():
                future.set_exception(_ended())
            self._pending.clear()

    def _save(self, answer: Answer) -> None:
        with self._lock:
            future = self._pending.pop(answer.number, None)
            if future is not None:
                future.set_result(answer)
            elif not answer.error:
                self._send(Ask(answer.number))


class AdapterReader:
    """The worker's end. `read` reads an adapter, in any thread."""

    def __init__(self, fd: int, read: Callable[[Path], ReadAdapter]) -> None:
        self._socket = socket.socket(fileno=fd)
        self._read_adapter = read
        self._lock = threading.Lock()
        self._found: dict[int, ReadAdapter] = {}
        self._threads: set[threading.Thread] = set()
        threading.Thread(
            target=self._receive_asks, name="stratakv-adapter-asks", daemon=True
        ).start()

    def take_adapter(self, number: int) -> ReadAdapter:
        return self._found.pop(number)

    def close(self, timeout_seconds: float) -> None:
        """Wait for reads under way: a thread that is in torch when Python ends aborts it."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _close(self._socket)

    def _receive_asks(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._serve_ask(_ask_decoder.decode(line))
        except OSError:
            pass  # the executor has closed the connection
        except Exception:
            logger.exception("adapters are read no longer")
            _close(self._socket)  # ends the reads that the executor waits for

    def _serve_ask(self, ask: Ask) -> None:
        if ask.path is None:
            self._found.pop(ask.number, None)
            return
        thread = threading.Thread(
            target=self._read, args=(ask.number, Path(ask.path)), name="adapter-load", daemon=True
        )
        thread.start()
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}

    def _read(self, number: int, path: Path) -> None:
        try:
            found = self._read_adapter(path)
        except Exception as error:  # noqa: BLE001 - sent in the answer
            is_config = isinstance(error, ConfigError)
            words = str(error) if is_config else f"{type(error).__name__}: {error}"
            answer = Answer(number, error=words, is_config_error=is_config)
        else:
            self._found[number] = found
            answer = Answer(number, found.fingerprint, found.rank, found.num_bytes)
        with self._lock:
            try:
                self._socket.sendall(msgspec.json.encode(answer) + b"\n")
            except OSError:
                pass  # the executor has ended


def _close(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
    except OSError:
        pass  # the other process has ended, or the socket is closed
    end.close()


def _ended() -> ExecutorDied:
    return ExecutorDied("the worker process ended while it read an adapter; start the engine again")
