# SPDX-License-Identifier: Apache-2.0
"""The client of an engine core in the same process; a thread runs the core's steps.

Messages are not encoded. The Python API and tests use this client."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from ..core.engine_core import EngineCore
from ..core.loop import CoreLoop
from ..request.core_messages import FromCore, ToCore
from .message_client import SEND_SECONDS, MessageClient

logger = logging.getLogger(__name__)

_FULL_QUEUE_SECONDS = 0.005
_EXIT_SECONDS = 5.0


class InProcessClient(MessageClient):
    """The client and owner of `core`, for use only in the event loop in which it was made."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        self._event_loop = asyncio.get_running_loop()
        self.ready = core.ready()
        self._ended = asyncio.Event()
        self._core_loop = CoreLoop(core, self._emit)
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    async def _send_to_core(self, message: ToCore) -> None:
        deadline = self._event_loop.time() + SEND_SECONDS
        while True:
            self._raise_if_dead()
            try:
                return self._core_loop.submit(message, 0)
            except queue.Full:
                if self._event_loop.time() > deadline:
                    self._die(f"the engine core took no message for {SEND_SECONDS:g} s")
                await asyncio.sleep(_FULL_QUEUE_SECONDS)

    async def _close_transport(self, timeout_seconds: float) -> None:
        self._core_loop.stop()
        try:
            async with asyncio.timeout(max(timeout_seconds, _EXIT_SECONDS)):
                await self._ended.wait()
        except TimeoutError:
            logger.warning("the engine core's thread did not end in time and is left behind")
            return
        # The ending thread frees torch's memory without the GIL. If Python exited during that time,
        # Python would unwind the thread out of a C++ destructor, which aborts the process.
        self._thread.join(_EXIT_SECONDS)

    def _run(self) -> None:
        try:
            self._core_loop.run()
        finally:
            self._on_event_loop(self._ended.set)

    def _emit(self, message: FromCore) -> None:
        self._on_event_loop(self._receive, message)

    def _on_event_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._event_loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The event loop is closed, so no caller waits for outputs.
            self._core_loop.stop()
