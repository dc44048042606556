# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a thread of its own, and stops it when its time is up.

Python cannot kill a thread, but it can raise an exception in one between two bytecodes. That ends
any loop written in Python, which is what a hostile chat template is made of; a single call into C
runs to its end first. Knows nothing of templates.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Interrupted(BaseException):
    """Raised inside the function. Not an Exception, so that the function's own handlers, and
    those of the libraries it calls, let it through."""


class _Work(Generic[T]):
    """The function in its thread, and the future that waits for it."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[T] = self._loop.create_future()
        # One thread each: an interruption that comes late hits nothing but this thread's end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        if self._thread.is_alive() and self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            )

    def _run(self) -> None:
        try:
            self._finish()
        except (RuntimeError, Interrupted):
            return  # the loop is closed, or the time is up: nobody waits any more

    def _finish(self) -> None:
        try:
            value = self._function()
        except Exception as error:  # noqa: BLE001 - handed to the waiting side, whatever it is
            self._tell(self.result.set_exception, error)
        else:
            self._tell(self.result.set_result, value)

    def _tell(self, setter: Callable[..., None], value: object) -> None:
        def deliver() -> None:
            if not self.result.done():
                setter(value)

        self._loop.call_soon_threadsafe(deliver)


async def run_interruptible(function: Callable[[], T], seconds: float, name: str) -> T:
    """The function's result, or what it raised. TimeoutError after `seconds`; the function is
    interrupted then, and also when the waiting task is cancelled."""
    work = _Work(function, name)
    try:
        async with asyncio.timeout(seconds):
            return await work.result
    finally:
        if not work.result.done() or work.result.cancelled():
            work.interrupt()
