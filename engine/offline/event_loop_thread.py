# SPDX-License-Identifier: Apache-2.0
"""`EventLoopThread`: an asyncio event loop for synchronous callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_JOIN_SECONDS = 5.0


class EventLoopThread:
    """An asyncio event loop in its own thread, for synchronous callers. The loop runs until
    `close`. The thread is a daemon thread, so it does not keep Python from exiting."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the thread runs in this process. A forked child process lacks the thread."""
        return self._process_id == os.getpid()

    def run(self, awaitable: Awaitable[T]) -> T:
        """Return the result of `awaitable`, run on the loop. KeyboardInterrupt cancels the run."""

        async def waiting() -> T:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(waiting(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel running tasks and end the thread. Idempotent, and without effect in a fork."""
        if self._loop.is_closed() or not self.is_here:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
