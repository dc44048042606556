# SPDX-License-Identifier: Apache-2.0
"""The entry point of a core process: reads settings from standard input, then runs the loop over
ZMQ.

    input thread   blocks on the socket, decodes, fills the loop's bounded queue
    watch thread   blocks on standard input and signals: end of file or a signal ends the loop
    main thread    steps the core; sends one message of outputs per step

Heavy packages are imported after the output socket is open, so that the client gets the error if a
package is missing."""

from __future__ import annotations

import logging
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import zmq

from ...tiers.settings.values import ConfigError
from .. import logs
from ..collector import settle_collector
from ..config.optional_packages import explain_missing_module
from ..request.core_messages import Fatal, FromCore, encoder, refuse, to_core_decoder
from .loop import CoreLoop
from .start import CoreStart, read_start, tell_import

if TYPE_CHECKING:
    from .engine_core import EngineCore

# The name is written out, because `__name__` is __main__ in this process.
logger = logging.getLogger("stratakv.engine.core.process")

_HIGH_WATER_MESSAGES = 1024
_LINGER_MILLISECONDS = 2000
# The longest wait to send the last message to a client; the tiers must still be written then.
_LAST_WORDS_SECONDS = 5.0
_POLL_MILLISECONDS = 500
# Added to the time for an orderly shutdown, for the step that is running.
_GRACE_SECONDS = 15.0
EXIT_FAILED = 1
EXIT_CONFIG = 2


class CoreServer:
    """The sockets and threads of a core process."""

    def __init__(self, start: CoreStart) -> None:
        self._start = start
        self._context = zmq.Context()
        self._output = self._context.socket(zmq.PUSH)
        self._output.set_hwm(_HIGH_WATER_MESSAGES)
        self._output.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._output.connect(start.from_core_endpoint)
        self._loop: CoreLoop | None = None
        self._ended = threading.Event()

    def run(self) -> int:
        """Run until the core is stopped. Return the process's exit status."""
        watch = threading.Thread(
            target=self._watch_launcher, args=(_signal_pipe(),), name="core-watch", daemon=True
        )
        watch.start()
        reader = threading.Thread(target=self._run_input_thread, name="core-input", daemon=True)
        try:
            core = self._build()
            settle_collector()
            self._loop = CoreLoop(core, self._send_to_client)
            reader.start()
            self._send_to_client(core.ready())
            return 0 if self._loop.run() else EXIT_FAILED
        except Exception as error:  # noqa: BLE001 - the error is sent to the client
            return self._report_fatal(error)
        finally:
            self._ended.set()
            self._output.close()
            self._context.term()  # also ends the wait of the input thread

    def _build(self) -> EngineCore:
        tell_import(logger.info)
        try:
            from .engine_core import EngineCore
        except ModuleNotFoundError as error:
            raise ConfigError(explain_missing_module(error)) from error
        return EngineCore(self._start.config)

    def _report_fatal(self, error: Exception) -> int:
        is_config = isinstance(error, ConfigError)
        if not is_config:
            logger.error("the engine core failed", exc_info=error)
        message = str(error) if is_config else f"{type(error).__name__}: {error}"
        try:
            self._send_to_client(Fatal(message, is_config_error=is_config))
        except (zmq.ZMQError, TimeoutError):
            logger.error("no client is left to be told: %s", message)
        return EXIT_CONFIG if is_config else EXIT_FAILED

    def _send_to_client(self, message: FromCore) -> None:
        """Send a message. While the client does not read, the engine waits. After the client has
        ended, the end of standard input ends the wait, and the message is dropped."""
        began = time.monotonic()
        while not self._output.poll(_POLL_MILLISECONDS, zmq.POLLOUT):
            if self._loop is not None and self._loop.is_stopping:
                return
            if isinstance(message, Fatal) and time.monotonic() - began > _LAST_WORDS_SECONDS:
                raise TimeoutError("the client reads nothing")
        if (waited := time.monotonic() - began) > _LAST_WORDS_SECONDS:
            logger.warning("the client read nothing for %.0f s, and the engine waited", waited)
        self._output.send(encoder.encode(message))

    def _run_input_thread(self) -> None:
        """Read messages until the process ends; the body of the input thread."""
        try:
            self._read_until_ended()
        except zmq.ContextTerminated:
            pass

    def _read_until_ended(self) -> None:
        with self._context.socket(zmq.PULL) as source:
            source.set_hwm(_HIGH_WATER_MESSAGES)
            source.connect(self._start.to_core_endpoint)
            while not self._ended.is_set():
                if not source.poll(_POLL_MILLISECONDS):
                    continue
                self._handle_frame(source.recv())

    def _handle_frame(self, frame: bytes) -> None:
        """Decode a message and pass it to the loop. An unreadable message gets an error as its
        answer, so that the client does not wait. The loop ends if no request id or call id is
        readable."""
        assert self._loop is not None
        try:
            message = to_core_decoder.decode(frame)
        except msgspec.MsgspecError as error:
            logger.error("a message of %d bytes cannot be read: %s", len(frame), error)
            answer = refuse(frame, str(error))
            if answer is None:
                self._loop.break_off(f"a message of the client cannot be read: {error}")
            else:
                self._submit(partial(self._loop.answer, answer))
            return
        self._submit(partial(self._loop.submit, message))

    def _submit(self, hand_over: Callable[[float], None]) -> None:
        while not self._ended.is_set():
            try:
                hand_over(_POLL_MILLISECONDS / 1000)
                return
            except queue.Full:
                continue  # the step loop is slow; the full socket slows the sender down

    def _watch_launcher(self, signals: socket.socket) -> None:
        """Stop the loop when the launcher ends or a signal comes. Exit by force if the shutdown
        takes too long."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
            selector.register(signals, selectors.EVENT_READ)
            selector.select()
        if self._loop is None:
            os._exit(EXIT_FAILED)  # still loading, so there are no blocks to save
        self._loop.stop()
        limit = self._start.config.offload.shutdown_seconds + _GRACE_SECONDS
        if not self._ended.wait(limit):
            logger.error("the orderly shutdown took more than %.0f s; leaving", limit)
            os._exit(EXIT_FAILED)


def _signal_pipe() -> socket.socket:
    """Return a socket that becomes readable when SIGTERM or SIGINT comes.

    A signal handler would run in the main thread, perhaps while that thread holds a queue's lock.
    So the handler does nothing, and the interpreter itself writes to the socket."""
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return receiving


def main() -> int:
    """Run the core with the settings from standard input."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # sent by a terminal to stop background writers
    try:
        start = read_start(sys.stdin.buffer, CoreStart)
    except (ValueError, msgspec.MsgspecError) as error:
        sys.stderr.write(f"stratakv: {error}\n")
        return EXIT_CONFIG
    logs.set_up(start.log_level, json=start.log_json)
    return CoreServer(start).run()


if __name__ == "__main__":
    sys.exit(main())
