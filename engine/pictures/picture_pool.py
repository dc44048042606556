# SPDX-License-Identifier: Apache-2.0
"""`PicturePool`: threads that decode pictures, so that the event loop is not blocked.

A pool accepts a limited number of pictures, and refuses more. A task for which no caller waits any
longer counts too: Pillow's C code cannot be interrupted, so a thread may run beyond its deadline
until Pillow reads the next piece of the file."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from .picture_decoding import DEFAULT_LIMITS, check_deadline
from .picture_errors import PictureError, PicturePoolFull
from .picture_file import PictureLimits

Result = TypeVar("Result")


class PicturePool:
    """Threads for tasks with a deadline."""

    def __init__(
        self,
        limits: PictureLimits = DEFAULT_LIMITS,
        *,
        num_threads: int = 2,
        max_waiting: int = 32,
    ) -> None:
        self._limits = limits
        self._places = threading.BoundedSemaphore(num_threads + max_waiting)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pictures")

    async def run_task(self, task: Callable[[float], Result]) -> Result:
        """Return the result of `task`, run in a thread. The task gets its deadline, a time of the
        monotonic clock. Raises the task's errors, PicturePoolFull, and PictureError if late."""
        if not self._places.acquire(blocking=False):
            raise PicturePoolFull(
                "the server decodes as many pictures as it holds; send the request later"
            )
        seconds = self._limits.seconds
        try:
            future = self._threads.submit(partial(_run, task, time.monotonic() + seconds))
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(self._free_place)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise PictureError(
                f"it was not decoded in {seconds:g} seconds; send a smaller picture, or the same "
                "one later"
            ) from None
        finally:
            del future  # its exception has a reference to this frame, a cycle that holds pictures

    def close_pool(self) -> None:
        """Drop waiting tasks. Running tasks end at their deadline, and delay Python's exit."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _free_place(self, _: Future[Result]) -> None:
        self._places.release()


def _run(task: Callable[[float], Result], deadline: float) -> Result:
    check_deadline(deadline)
    return task(deadline)
