# SPDX-License-Identifier: Apache-2.0
"""The client of an engine core in a separate process: msgpack over ZMQ on private Unix sockets.

With two processes, the HTTP server's Python threads do not compete with the core's steps for the
interpreter. The client detects the exit of the core process at once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from ...tiers.settings.values import ConfigError
from ..config.engine_config import EngineConfig
from ..request.core_messages import (
    PROTOCOL_VERSION,
    Fatal,
    Ready,
    ToCore,
    encoder,
    from_core_decoder,
)
from .base import EngineDead
from .launcher import LaunchedCore, describe_exit
from .message_client import SEND_SECONDS, MessageClient

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
_HIGH_WATER_MESSAGES = 1024
# The time for reading the last messages of an exited core, which may still be in the socket.
_LAST_WORDS_SECONDS = 0.3
# The time for the core process to exit after the core has reported its shutdown.
_EXIT_SECONDS = 5.0


class ProcessClient(MessageClient):
    """The client of a core process, made by `start` and used only in the event loop of `start`."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Ready] = self._loop.create_future()
        self._exit = asyncio.Event()
        self._core = LaunchedCore(self._exited_elsewhere)
        self._context = zmq.asyncio.Context()
        self._to_core = self._bind(zmq.PUSH, self._core.to_core_endpoint)
        self._from_core = self._bind(zmq.PULL, self._core.from_core_endpoint)
        self._reader = asyncio.ensure_future(self._receive_messages())
        self._reader.add_done_callback(self._reader_ended)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        log_level: str = "info",
        log_json: bool = False,
        timeout_seconds: float = START_SECONDS,
    ) -> ProcessClient:
        """Start a core process, and return its client once the core is ready. Raises ConfigError
        for a setting that cannot work, EngineDead if the core failed, and TimeoutError for a late
        core. After an error, no process and no sockets are left."""
        client = cls()
        try:
            client._core.start(config, log_level, log_json)
            async with asyncio.timeout(timeout_seconds):
                client.ready = await client._started
        except TimeoutError:
            await client._abandon()
            raise TimeoutError(
                f"the engine core was not up within {timeout_seconds:g} s; its log is on standard "
                "error"
            ) from None
        except BaseException:
            await client._abandon()
            raise
        return client

    @property
    def pid(self) -> int:
        return self._core.pid

    async def _send_to_core(self, message: ToCore) -> None:
        self._raise_if_dead()
        try:
            sending = asyncio.ensure_future(self._to_core.send(encoder.encode(message)))
            if not sending.done():  # the core's queue is full, or the core has exited
                await self._wait_sent(sending)
        except zmq.ZMQError as error:
            self._die(f"the connection to the engine core broke ({error})")
            self._raise_if_dead()

    async def _wait_sent(self, sending: asyncio.Future[Any]) -> None:
        """Wait until the message is sent or the core has ended. Raises EngineDead."""
        died = asyncio.ensure_future(self._dead.wait())
        try:
            waits = (sending, died)
            await asyncio.wait(waits, timeout=SEND_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not (sending.done() or died.done()):
                self._die(f"the engine core took no message for {SEND_SECONDS:g} s")
            if not sending.done():
                self._raise_if_dead()
            await sending
        finally:
            died.cancel()
            sending.cancel()

    async def _close_transport(self, timeout_seconds: float) -> None:
        self._core.hang_up()
        # The core has reported its shutdown, so the process exits soon.
        seconds = max(timeout_seconds, _EXIT_SECONDS)
        if self._core.is_started and not await self._wait_exit(seconds):
            logger.warning("the engine core did not end within %.0f s and is killed", seconds)
            self._core.kill()
            await self._wait_exit(_EXIT_SECONDS)
        self._release_transport()

    async def _wait_exit(self, seconds: float) -> bool:
        """Wait for the core process to exit. Return False if it still runs after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._exit.wait()
        except TimeoutError:
            return False
        return True

    async def _abandon(self) -> None:
        """End the core process after a start that failed or was cancelled."""
        self._die("the engine core did not start")
        await asyncio.shield(self._close_transport(_EXIT_SECONDS))

    def _release_transport(self) -> None:
        self._reader.cancel()
        self._to_core.close(linger=0)
        self._from_core.close(linger=0)
        self._context.term()
        self._core.remove_directory()

    def _bind(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(_HIGH_WATER_MESSAGES)
        socket.bind(endpoint)
        return socket

    async def _receive_messages(self) -> None:
        while True:
            frame = await self._from_core.recv()
            try:
                message = from_core_decoder.decode(frame)
            except msgspec.MsgspecError as error:
                self._die(f"the engine core speaks another protocol ({error})")
                return
            if isinstance(message, Ready | Fatal) and not self._started.done():
                self._start_ended(message)
            self._receive(message)

    def _reader_ended(self, reader: asyncio.Future[None]) -> None:
        if not reader.cancelled() and (error := reader.exception()) is not None:
            logger.error("the core's messages can no longer be read", exc_info=error)
            self._die(f"the connection to the engine core broke ({error})")

    def _start_ended(self, message: Ready | Fatal) -> None:
        if isinstance(message, Ready) and message.protocol_version == PROTOCOL_VERSION:
            self._started.set_result(message)
        elif isinstance(message, Ready):
            self._started.set_exception(
                EngineDead(
                    f"the engine core speaks version {message.protocol_version} of the protocol "
                    f"and this client version {PROTOCOL_VERSION}; install StrataKV once only"
                )
            )
        elif message.is_config_error:
            self._started.set_exception(ConfigError(message.message))
        else:
            self._started.set_exception(EngineDead(message.message))

    def _exited_elsewhere(self, status: int) -> None:
        """Pass the exit status from the thread that waits for the process to the event loop."""
        try:
            self._loop.call_soon_threadsafe(self._exited, status)
        except RuntimeError:
            pass  # the event loop is closed, so no caller waits for the exit

    def _exited(self, status: int) -> None:
        self._exit.set()
        self._loop.call_later(_LAST_WORDS_SECONDS, self._die_of_exit, status)

    def _die_of_exit(self, status: int) -> None:
        reason = f"the engine core {describe_exit(status)}; its log is on standard error"
        self._die(reason)
        if not self._started.done():
            self._started.set_exception(EngineDead(reason))
