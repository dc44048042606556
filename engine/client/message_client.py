# SPDX-License-Identifier: Apache-2.0
"""`MessageClient`, the base of engine clients, passes outputs to requests and replies to calls.

A subclass sends messages to the engine core, and passes the core's messages to `_receive`. All code
in this module runs in one event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from ..request.core_messages import (
    ABORTED,
    STOPPED,
    AbortRequests,
    AddRequest,
    Call,
    CallRefused,
    ExtendPrompt,
    Fatal,
    FromCore,
    Outputs,
    Ready,
    Reply,
    ToCore,
    TokenOutput,
)
from .base import EngineClient, EngineDead, PromptEnded, PromptUnknown

_MERGED_FIELDS = tuple(
    name
    for name in TokenOutput.__struct_fields__
    if name not in ("request_id", "new_token_ids", "logprobs", "routed_experts")
)

logger = logging.getLogger(__name__)

# Time limit for sending a message to a busy engine core; no step of the core takes this long.
SEND_SECONDS = 60.0
# Time limit of an opened prompt without a `generate` call, beyond the core's time-out for a part.
UNREAD_SECONDS = 3600.0


class MessageClient(EngineClient):
    """The base of engine clients. Subclasses implement `_send_to_core` and `_close_transport`."""

    def __init__(self) -> None:
        self._mailboxes: dict[str, Mailbox] = {}
        # Requests in the core without a `generate` call yet: opened prompts, and forks (choices
        # that are sent with the first choice). The future's result: the request was sent.
        self._brought: dict[str, asyncio.Future[bool]] = {}
        self._unread_timers: dict[str, asyncio.TimerHandle] = {}  # timers of opened prompts
        # Running aborts of forks for which `generate` was not called in time, by request id.
        self._aborts: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[str] = set()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._sends: set[asyncio.Task[None]] = set()
        self._death: EngineDead | None = None
        self._dead = asyncio.Event()
        self._closing: asyncio.Future[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._death is None

    async def wait_dead(self) -> str:
        """Wait until the engine core has ended; return the reason in one sentence."""
        await self._dead.wait()
        return str(self._death)

    async def generate(self, request: AddRequest) -> AsyncGenerator[TokenOutput, None]:
        """See `EngineClient.generate`. Raises ValueError for the id of a running request."""
        request_id = request.request_id
        brought = self._brought.pop(request_id, None)
        self._stop_unread_timer(request_id)
        mailbox = self._open_mailbox(request_id) if brought is None else self._mailboxes[request_id]
        finished = False
        try:
            if (abort := self._aborts.get(request_id)) is not None:
                await asyncio.wait([abort])  # the abort of an older request would end this request
            if brought is None or not await brought:
                await self._send_with_forks(request)
            while not finished:
                output = await mailbox.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            self._drop_unread_forks(request)
            del self._mailboxes[request_id]
            reason = STOPPED if request_id in self._stopped else ABORTED
            self._stopped.discard(request_id)
            if not finished and self.is_alive:
                self._send_soon(AbortRequests([request_id], reason))

    async def open_prompt(self, request: AddRequest) -> None:
        request_id = request.request_id
        self._open_mailbox(request_id)
        sent: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        sent.set_result(True)
        self._brought[request_id] = sent
        try:
            await self._send_to_core(request)
        except BaseException:
            self._forget_unread(request_id)
            raise
        self._start_unread_timer(request_id)

    async def extend_prompt(self, part: ExtendPrompt) -> None:
        self._raise_if_dead()
        mailbox = self._mailboxes.get(part.request_id)
        if mailbox is None:
            raise PromptUnknown(
                f"the prompt of {part.request_id!r} is not open any more; send it whole"
            )
        if (last := mailbox.last_output) is not None:
            raise PromptEnded(last.error or f"its request has ended ({last.finish_reason})")
        self._start_unread_timer(part.request_id)
        await self._send_to_core(part)

    async def drop_prompt(self, request_id: str) -> None:
        if self._forget_unread(request_id) and self.is_alive:
            await self._send_to_core(AbortRequests([request_id], ABORTED))

    def has_enough(self, request_id: str) -> None:
        if request_id in self._mailboxes:
            self._stopped.add(request_id)

    async def abort(self, request_ids: list[str]) -> None:
        """See `EngineClient.abort`. The requests' iterators end with the finish reason "abort"."""
        self._raise_if_dead()
        for request_id in request_ids:
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.put(TokenOutput(request_id, [], finish_reason="abort"))
        await self._send_to_core(AbortRequests(request_ids))

    async def call(
        self, name: str, argument: str = "", timeout_seconds: float | None = 10.0
    ) -> Any:
        self._raise_if_dead()
        call_id = next(self._call_ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._send_to_core(Call(call_id, name, argument))
                return await answer
        except TimeoutError:
            raise TimeoutError(
                f"the engine core did not answer {name!r} within {timeout_seconds or 0.0:g} s"
            ) from None
        finally:
            del self._calls[call_id]

    async def close(self, timeout_seconds: float = 30.0) -> None:
        """See `EngineClient.close`. Requests still running end with EngineDead."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._shutdown_and_close(timeout_seconds))
        # Shielded, because a cancelled caller must not interrupt the shutdown of the core.
        await asyncio.shield(self._closing)

    @abstractmethod
    async def _send_to_core(self, message: ToCore) -> None:
        """Send a message to the engine core, in the order of the calls. Raises EngineDead."""

    @abstractmethod
    async def _close_transport(self, timeout_seconds: float) -> None:
        """Wait until the engine core, which is shutting down, has ended; then release resources."""

    def _receive(self, message: FromCore) -> None:
        if isinstance(message, Outputs):
            self.num_failed_steps = message.num_failed_steps
            for output in message.outputs:
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None:  # None: the request was aborted before the output came
                    mailbox.put(output)
        elif isinstance(message, Reply):
            self._take_reply(message)
        elif isinstance(message, Fatal):
            self._die(f"the engine core failed: {message.message}")
        elif isinstance(message, Ready):
            self.ready = message

    def _die(self, reason: str) -> None:
        """End all requests and calls with EngineDead. A second call has no effect."""
        if self._death is not None:
            return
        self._death = EngineDead(reason)
        self._dead.set()
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineDead(reason))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDead(str(self._death))

    async def _send_with_forks(self, request: AddRequest) -> None:
        """Send a request, and keep the outputs of its forks until `generate` reads the outputs."""
        sent: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            for request_id in _forks_of(request):
                self._open_mailbox(request_id)
                self._brought[request_id] = sent
            await self._send_to_core(request)
            sent.set_result(True)
        finally:
            if not sent.done():
                sent.set_result(False)

    def _start_unread_timer(self, request_id: str) -> None:
        """Restart the timer that aborts an opened prompt without a reader and without new parts.
        The timer is longer than the engine core's time-out for the next part."""
        self._stop_unread_timer(request_id)
        seconds = UNREAD_SECONDS + self.ready.session_idle_seconds
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._drop_unread, request_id)
        self._unread_timers[request_id] = timer

    def _stop_unread_timer(self, request_id: str) -> None:
        if (timer := self._unread_timers.pop(request_id, None)) is not None:
            timer.cancel()

    def _drop_unread(self, request_id: str) -> None:
        """Abort a request of `open_prompt` for which `generate` was not called."""
        if self._forget_unread(request_id) and self.is_alive:
            self._send_soon(AbortRequests([request_id], ABORTED))

    def _forget_unread(self, request_id: str) -> bool:
        """Drop the outputs of a request without a `generate` call. Return False if none exists."""
        self._stop_unread_timer(request_id)
        if self._brought.pop(request_id, None) is None:
            return False
        del self._mailboxes[request_id]
        return True

    def _drop_unread_forks(self, request: AddRequest) -> None:
        """Abort the forks of an ended request for which `generate` has not been called. A later
        `generate` sends such a fork as a separate request."""
        unread = [each for each in _forks_of(request) if self._brought.pop(each, None) is not None]
        for request_id in unread:
            del self._mailboxes[request_id]
        if unread and self.is_alive:
            abort = self._send_soon(AbortRequests(unread, ABORTED))
            self._aborts |= dict.fromkeys(unread, abort)
            abort.add_done_callback(partial(self._forget_aborts, unread))

    def _forget_aborts(self, request_ids: Sequence[str], _: asyncio.Task[None]) -> None:
        for request_id in request_ids:
            self._aborts.pop(request_id, None)

    def _open_mailbox(self, request_id: str) -> Mailbox:
        self._raise_if_dead()
        if request_id in self._mailboxes:
            raise ValueError(f"the request id {request_id!r} is already running; use another one")
        mailbox = self._mailboxes[request_id] = Mailbox()
        return mailbox

    def _take_reply(self, reply: Reply) -> None:
        answer = self._calls.get(reply.call_id)
        if answer is None or answer.done():
            return
        if reply.error:
            answer.set_exception(CallRefused(reply.error, reply.code))
        else:
            answer.set_result(json.loads(reply.result))

    def _send_soon(self, message: ToCore) -> asyncio.Task[None]:
        """Send a message from code that may not await, such as a generator that is being closed."""
        task = asyncio.ensure_future(self._send_to_core(message))
        self._sends.add(task)
        task.add_done_callback(self._sent)
        return task

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.debug("a message did not reach the engine core: %s", task.exception())

    async def _shutdown_and_close(self, timeout_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        if self.is_alive:
            try:
                await self.call("shutdown", timeout_seconds=timeout_seconds)
            except (EngineDead, TimeoutError, ValueError) as error:
                logger.warning("the engine core did not shut down in an orderly way: %s", error)
        self._die("the engine client was closed")
        for task in list(self._sends):
            task.cancel()
        await self._close_transport(max(0.0, deadline - loop.time()))


class Mailbox:
    """Holds the unread outputs of a request, merged into one output. A mailbox has one writer and
    one reader, in one event loop. A merged output is at most as long as one answer, so a slow
    reader neither delays other requests nor fills the memory."""

    __slots__ = ("_error", "_filled", "_pending")

    def __init__(self) -> None:
        self._pending: TokenOutput | None = None
        self._error: BaseException | None = None
        self._filled = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Merge an output into the unread output. The caller must not use the object afterwards."""
        if self._pending is None:
            self._pending = output
        else:
            _merge(self._pending, output)
        self._filled.set()

    @property
    def last_output(self) -> TokenOutput | None:
        """The unread output if it has a finish reason, else None."""
        pending = self._pending
        return None if pending is None or pending.finish_reason is None else pending

    def fail(self, error: BaseException) -> None:
        """Make `get` raise `error` after `get` has returned the unread output."""
        self._error = error
        self._filled.set()

    async def get(self) -> TokenOutput:
        """Wait for an output, and return all outputs since the last call merged into one. Raises
        the error that was passed to `fail` if no output is unread."""
        await self._filled.wait()
        output, self._pending = self._pending, None
        if self._error is None:
            self._filled.clear()
        if output is not None:
            return output
        if self._error is None:
            raise RuntimeError("a mailbox has one reader only")
        raise self._error


def _forks_of(request: AddRequest) -> list[str]:
    return [] if request.extras is None else [fork.request_id for fork in request.extras.forks]


def _merge(first: TokenOutput, later: TokenOutput) -> None:
    first.new_token_ids = first.new_token_ids + later.new_token_ids
    if later.logprobs is not None:
        first.logprobs = (first.logprobs or []) + later.logprobs
    if later.routed_experts is not None:
        first.routed_experts = (first.routed_experts or []) + later.routed_experts
    for name in _MERGED_FIELDS:
        value = getattr(later, name)
        if value is not None:
            setattr(first, name, value)
