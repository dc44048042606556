# SPDX-License-Identifier: Apache-2.0
"""RequestAdder: checks new requests, and queues them at once or after their grammar is compiled.

add ──► built and checked ──► queued
             └─► queued, but not yet scheduled ──► its grammar is compiled during other steps
                                               ──► add_compiled ──► it may be scheduled"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from ...connector.base import KVConnectorScheduler
from ...connector.messages import Elsewhere
from ..request.core_messages import (
    INVALID_GRAMMAR,
    NO_EXTRAS,
    OVERLOADED,
    UNKNOWN_ADAPTER,
    WRONG_PICTURES,
    AddRequest,
    ExtendPrompt,
    RequestExtras,
    TokenOutput,
)
from ..request.handover_ticket import Ticket
from ..request.pictures import WrongPictures
from ..request.request import Request, RequestStatus
from ..scheduler.request_limits import QueueFull
from ..scheduler.scheduler import Scheduler
from ..structured.compiler import TooManyGrammars
from ..structured.manager import GrammarManager, Waiting
from .adapter_registry import UnknownAdapter
from .continued.continuations import Continuations
from .continued.prompt_sessions import WholePrompt
from .handover import HeldAnswers
from .request_builder import RequestBuilder, context_of

logger = logging.getLogger(__name__)

# The most steps in flight with grammars: a step's mask depends on all tokens before the step.
MOST_STEPS_WITH_GRAMMAR = 2


class RequestAdder:
    """Adds requests to one engine core. The core's thread makes all calls."""

    def __init__(
        self,
        scheduler: Scheduler,
        builder: RequestBuilder,
        grammars: GrammarManager,
        held: HeldAnswers,
        connector: KVConnectorScheduler,
        continuations: Continuations,
        *,
        max_steps_in_flight: int,
    ) -> None:
        self._scheduler = scheduler
        self._builder = builder
        self.grammars = grammars
        self._held = held
        self._connector = connector
        self._beams, self._sessions = continuations.beams, continuations.sessions
        self._max_steps_in_flight = max_steps_in_flight

    def add(self, request: AddRequest) -> list[TokenOutput]:
        """Queue a request and its forks, start to compile their grammars, or begin a beam search or
        a session. Return one output, an error, for each request that cannot run."""
        extras = request.extras
        if extras is not None and extras.more_follows:
            return _refusing(request, partial(self._open_session, request))
        if extras is not None and extras.beams is not None:
            return self._begin_search(request, extras)
        first: Request | None = None

        def add_one(each: AddRequest) -> list[TokenOutput]:
            nonlocal first
            self._check_free(each.request_id)
            built, ticket = self._builder.build_with_ticket(each, first)
            first = first or built
            return self._add(each, built, ticket)

        outputs = _refusing(request, partial(add_one, request))
        for fork in () if extras is None else extras.forks:
            own = msgspec.structs.replace(
                request,
                request_id=fork.request_id,
                sampling_params=fork.sampling_params,
                extras=msgspec.structs.replace(extras or NO_EXTRAS, forks=[]),
            )
            outputs += _refusing(own, partial(add_one, own))
        return outputs

    def add_compiled(self) -> list[TokenOutput]:
        """Allow requests to run whose grammars are compiled. Return the last outputs of requests
        that end, because their grammar is invalid."""
        return [
            output
            for waiting in self.grammars.take_compiled()
            for output in _refusing(waiting.message, partial(self._take_compiled, waiting))
        ]

    def extend_prompt(self, message: ExtendPrompt) -> list[TokenOutput]:
        """Add the next part of a session's prompt. Return the last outputs of sessions that end."""
        return self._sessions.extend_prompt(message) + self.add_whole()

    def add_whole(self) -> list[TokenOutput]:
        """Queue the sessions whose prompts are complete. Return the last outputs of sessions that
        end here, including those that have timed out."""

        def add_one(whole: WholePrompt) -> list[TokenOutput]:
            return self._add(whole.message, self._sessions.make_whole(whole), None)

        outputs = self._sessions.end_idle()
        for whole in self._sessions.take_whole():
            outputs += _refusing(whole.message, partial(add_one, whole))
            before = whole.continued
            kept = None if before is None else before.request.progress.kept
            if before is not None and kept is not None and not kept.num_heirs:
                self._scheduler.release_blocks([before.request])
        return outputs

    def _open_session(self, request: AddRequest) -> list[TokenOutput]:
        self._check_free(request.request_id)
        self._sessions.open_session(request)
        return []

    def _begin_search(self, request: AddRequest, extras: RequestExtras) -> list[TokenOutput]:
        def begin() -> list[TokenOutput]:
            self._scheduler.check_queue()
            self._beams.begin_search(request)
            return []

        refused = _refusing(request, begin)
        ids = [fork.request_id for fork in extras.forks]
        return refused + [
            msgspec.structs.replace(output, request_id=each) for output in refused for each in ids
        ]

    def _check_free(self, request_id: str) -> None:
        """Raise, before the request is built, if the queue is full, or if the id is in use by a
        session or by a request that waits for its grammar."""
        self._scheduler.check_queue()
        if request_id in self.grammars or request_id in self._sessions:
            raise ValueError(f"request id {request_id!r} is in use; give each its own")

    def _add(self, request: AddRequest, built: Request, ticket: Ticket | None) -> list[TokenOutput]:
        if built.sampling_params.structured_outputs is None:
            return self._queue(request, built, ticket)
        if self._max_steps_in_flight > MOST_STEPS_WITH_GRAMMAR:
            raise ValueError(
                "structured_outputs need the tokens of all steps but one before the next is made, "
                f"and {self._max_steps_in_flight} are in flight; start with fewer"
            )
        waiting = self.grammars.ask(request, built)
        is_done = waiting.compilation.is_done
        if is_done and waiting.compilation.error:
            return [_output_without_grammar(waiting)]
        try:
            outputs = self._queue(request, built, None, awaits_grammar=not is_done)
        except Exception:
            self.grammars.cancel_waiting([request.request_id])
            raise
        if is_done:
            self._activate(waiting)
        return outputs

    def _take_compiled(self, waiting: Waiting) -> list[TokenOutput]:
        """Allow a request with a compiled grammar to run. End it if the compilation failed."""
        request_id = waiting.message.request_id
        if waiting.compilation.error:
            output = _output_without_grammar(waiting)
            ended = self._scheduler.finish_requests(
                [request_id], RequestStatus.FINISHED_ERROR, output.error
            )
            self._held.drop_answer(request_id)
            return [msgspec.structs.replace(each, error_code=output.error_code) for each in ended]
        self._activate(waiting)
        self._scheduler.grammar_ready(waiting.built)
        return []

    def _activate(self, waiting: Waiting) -> None:
        """Set the grammar of a queued request. If this fails, end the request, which must not run
        without its grammar."""
        try:
            self.grammars.activate_grammar(waiting)
        except Exception:
            request_id = waiting.message.request_id
            self._scheduler.finish_requests([request_id], RequestStatus.FINISHED_ERROR)
            self._held.drop_answer(request_id)
            raise

    def _queue(
        self,
        request: AddRequest,
        built: Request,
        ticket: Ticket | None,
        *,
        awaits_grammar: bool = False,
    ) -> list[TokenOutput]:
        tool = "" if request.extras is None else request.extras.tool
        first = None if ticket is None else ticket.first_token
        output = self._scheduler.add_request(
            built,
            context_of(request),
            first_token=first,
            tool=tool,
            awaits_grammar=awaits_grammar,
        )
        if output is None or output.finish_reason is None:
            self._held.expect(built)
        if output is None:
            elsewhere = self._builder.elsewhere(request)
            side = self._connector.prompts_elsewhere
            is_elsewhere = elsewhere is not Elsewhere.NO and not built.skip_reading_prefix_cache
            if is_elsewhere and not built.fork_of and side is not None:
                side.await_prefill(built.request_id, elsewhere)
            return []
        if ticket is not None and ticket.logprobs is not None:
            output.logprobs = [ticket.logprobs]
        return [output]


def _output_without_grammar(waiting: Waiting) -> TokenOutput:
    """Return the only output, an error, of a request whose grammar cannot be compiled."""
    text = f"this request's schema or grammar cannot be used: {waiting.compilation.error}"
    code = OVERLOADED if waiting.compilation.may_be_later else INVALID_GRAMMAR
    return TokenOutput(waiting.message.request_id, [], "error", error=text, error_code=code)


def _refusing(request: AddRequest, queue: Callable[[], list[TokenOutput]]) -> list[TokenOutput]:
    """Call `queue` and return its outputs. If it raises, return one output with the error
    instead."""
    code = None
    try:
        return queue()
    except (QueueFull, TooManyGrammars) as error:
        text, code = str(error), OVERLOADED
    except UnknownAdapter as error:
        text, code = str(error), UNKNOWN_ADAPTER
    except WrongPictures as error:
        text, code = str(error), WRONG_PICTURES
    except ValueError as error:
        text = str(error)
    except Exception as error:  # one request must not stop the others
        logger.exception("request %s could not be queued", request.request_id)
        text = f"the request could not be queued ({type(error).__name__}: {error})"
    return [TokenOutput(request.request_id, [], "error", error=text, error_code=code)]
