# SPDX-License-Identifier: Apache-2.0
"""The loop around an engine core: takes messages, runs steps while there is work, and emits
outputs.

A single thread runs the loop and calls the core. Any thread may call `submit`, `wake` and `stop`. A
core process and a thread of the caller's process run the same loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from ..request.core_messages import (
    AbortRequests,
    AddRequest,
    CallRefused,
    ExtendPrompt,
    Fatal,
    FromCore,
    Outputs,
    Reply,
    ToCore,
    TokenOutput,
)
from .client_calls.deferred import Deferred

logger = logging.getLogger(__name__)

QUEUE_MESSAGES = 8192
# The time for messages between two steps, about as long as a step. Checking a request with a
# thousand biases takes milliseconds, during which running requests get no tokens.
TAKE_SECONDS = 0.02


class Core(Protocol):
    """The part of an engine core that the loop calls. `num_failed_steps` counts the failed steps
    since the last successful one."""

    @property
    def num_failed_steps(self) -> int: ...
    def add(self, request: AddRequest) -> list[TokenOutput]: ...
    def extend_prompt(self, message: ExtendPrompt) -> list[TokenOutput]: ...
    def abort_requests(self, request_ids: list[str], reason: str) -> None: ...
    def call(self, name: str, argument: str) -> Any: ...
    def has_work(self) -> bool: ...
    def idle_seconds(self) -> float: ...
    def step(self) -> list[TokenOutput]: ...
    def set_wakeup(self, wakeup: Callable[[], None]) -> None: ...
    def enter_thread(self) -> None: ...
    def shutdown(self) -> None: ...


class _Finished(NamedTuple):
    """A deferred call whose future is done, and which the loop's thread finishes."""

    call_id: int
    deferred: Deferred


class _Answer(NamedTuple):
    """An answer made by another thread, to be emitted by the loop's thread."""

    message: FromCore


_Message = ToCore | _Answer | None


class CoreLoop:
    """The loop of one core. The loop's thread calls `emit`; if `emit` blocks, the core waits."""

    def __init__(self, core: Core, emit: Callable[[FromCore], None]) -> None:
        self._core = core
        self._emit = emit
        self._queue: queue.Queue[_Message] = queue.Queue(QUEUE_MESSAGES)
        # Without a limit, because the thread that ends a call's work, perhaps the loop's thread,
        # must not wait for the loop.
        self._finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()
        self._broken: str | None = None
        self._stopping = threading.Event()
        self._shutdown_call: int | None = None
        core.set_wakeup(self.wake)

    def submit(self, message: ToCore, timeout_seconds: float) -> None:
        """Queue a message. Raise queue.Full if the queue stays full for `timeout_seconds`."""
        if timeout_seconds > 0:
            self._queue.put(message, timeout=timeout_seconds)
        else:
            self._queue.put_nowait(message)

    def answer(self, message: FromCore, timeout_seconds: float) -> None:
        """Queue an answer, which the loop's thread will emit. Raises queue.Full like `submit`."""
        self._queue.put(_Answer(message), timeout=timeout_seconds)

    def break_off(self, reason: str) -> None:
        """End the loop as if the core had failed. Called when a client's message cannot be read."""
        self._broken = reason
        self.wake()

    def wake(self) -> None:
        """End an idle wait, so that the loop checks the core's `has_work` again."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # a full queue also ends the wait

    def stop(self) -> None:
        """Start an orderly shutdown after the present step."""
        self._stopping.set()
        self.wake()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def run(self) -> bool:
        """Run until stopped, then shut the core down. Return False if the core failed. In this case
        clients first get a `Fatal` message, and the tiers still save their blocks."""
        failed = False
        for part in (self._step_until_stopped, self._shut_down):
            try:
                part()
            except Exception as error:
                failed = True
                logger.exception("the engine core failed")
                self._emit_fatal(Fatal(f"{type(error).__name__}: {error}"))
        return not failed

    def _emit_fatal(self, last_words: Fatal) -> None:
        """Emit the last message. Errors are only logged, so that the tiers are still written."""
        try:
            self._emit(last_words)
        except Exception:
            logger.exception("the end of the core was not told to its clients")

    def _step_until_stopped(self) -> None:
        core, failed_steps = self._core, 0
        core.enter_thread()
        while not self._stopping.is_set():
            outputs = self._take_messages(may_wait=not core.has_work())
            if self._broken is not None:
                raise RuntimeError(self._broken)
            if not self._stopping.is_set() and core.has_work():
                outputs += core.step()
            if outputs or core.num_failed_steps != failed_steps:
                failed_steps = core.num_failed_steps
                self._emit(Outputs(outputs, failed_steps))

    def _take_messages(self, may_wait: bool) -> list[TokenOutput]:
        """Handle the queued messages. Return the outputs of requests that end at once."""
        outputs: list[TokenOutput] = []
        try:
            if may_wait:
                self._handle(self._queue.get(timeout=self._core.idle_seconds()), outputs)
            # Bounded in number and time, so that many messages cannot delay the step.
            enough = time.monotonic() + TAKE_SECONDS
            for _ in range(self._queue.qsize()):
                self._handle(self._queue.get_nowait(), outputs)
                if time.monotonic() >= enough:
                    break
        except queue.Empty:
            pass
        while not self._finished.empty():
            call_id, deferred = self._finished.get_nowait()
            self._answer(call_id, partial(deferred.finish, deferred.future))
        return outputs

    def _handle(self, message: _Message, outputs: list[TokenOutput]) -> None:
        if message is None:
            return
        if isinstance(message, _Answer):
            self._emit(message.message)
        elif isinstance(message, AddRequest):
            outputs += self._core.add(message)
        elif isinstance(message, ExtendPrompt):
            outputs += self._core.extend_prompt(message)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids, message.reason)
        elif message.name == "shutdown":
            self._shutdown_call = message.call_id
            self._stopping.set()
        else:
            self._answer(message.call_id, partial(self._core.call, message.name, message.argument))

    def _answer(self, call_id: int, execute: Callable[[], Any]) -> None:
        """Send the reply to a call. A deferred result is sent when its future has ended."""
        reply = _reply(call_id, execute)
        if isinstance(reply, Reply):
            self._emit(reply)
            return
        finished = _Finished(call_id, reply)

        def note_end(_: object) -> None:
            self._finished.put(finished)
            self.wake()

        reply.future.add_done_callback(note_end)

    def _shut_down(self) -> None:
        began = time.monotonic()
        self._core.shutdown()
        logger.info("the core shut down in %.1f s", time.monotonic() - began)
        if self._shutdown_call is not None:
            self._emit(Reply(self._shutdown_call))


def _reply(call_id: int, execute: Callable[[], Any]) -> Reply | Deferred:
    """Return the reply with the result or the error of `execute`, or a Deferred unchanged."""
    try:
        result = execute()
        if isinstance(result, Deferred):
            return result
        return Reply(call_id, msgspec.json.encode(result).decode())
    except Exception as error:
        if not isinstance(error, ValueError):
            logger.exception("a call failed")
        code = error.code if isinstance(error, CallRefused) else ""
        return Reply(call_id, error=str(error) or type(error).__name__, code=code)
