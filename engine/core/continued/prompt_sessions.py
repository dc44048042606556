# SPDX-License-Identifier: Apache-2.0
"""PromptSessions: requests whose prompts arrive in parts; each part is computed when it arrives.

    parts that come           a b c | d e | f g | h          the last one
    requests for one token    a b c ──► d e f g ──► h        the request itself

Each request continues the previous request in its blocks, and drops the sampled token. Parts that
arrive while a request runs go into the next request. Between two requests the pool may release the
kept blocks; the next request then looks up its prefix in the pool and the tiers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from ...request.core_messages import (
    NO_EXTRAS,
    AddRequest,
    ExtendPrompt,
    RequestExtras,
    TokenOutput,
)
from ...request.request import Request, TokenArray
from ...request.sampling_params import SamplingParams
from ...scheduler.request_limits import QueueFull
from ...scheduler.scheduler import Scheduler
from ..request_builder import Continued, RequestBuilder, context_of

_NO_TOKENS: TokenArray = np.zeros(0, np.int32)
# The sampling parameters of requests for parts; their single token is not sent to clients.
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class WholePrompt(NamedTuple):
    """A session with a complete prompt: the final request, and the request that it continues."""

    message: AddRequest
    continued: Continued | None
    origin: Request | None  # has the session's adapter
    first: TokenOutput | None  # output of the session's first request


@dataclass(slots=True, eq=False)
class PromptSession:
    """The parts of one prompt that have arrived, and the requests that compute them one after
    another."""

    message: AddRequest  # the message that opened the session, with the parameters of the answer
    tokens: list[TokenArray]  # parts that are in no request yet
    num_tokens: int  # tokens of all parts
    waits_since: float  # start of the wait for a part; monotonic seconds
    before: Request | None = None  # the session's last request that has ended
    asked: Request | None = None  # the session's request under way, which continues `before`
    # A request with the session's adapter, for a session that continues no request.
    origin: Request | None = None
    is_whole: bool = False
    num_made: int = 0
    first: TokenOutput | None = None  # output of the first request

    @property
    def request_id(self) -> str:
        return self.message.request_id

    def take_tokens(self) -> TokenArray:
        """Remove and return the tokens that are in no request yet, for the caller's next
        request."""
        taken = np.concatenate([_NO_TOKENS, *self.tokens])
        self.tokens.clear()
        return taken


@dataclass(slots=True, eq=False)
class PromptSessions:
    """The sessions of one engine core, whose thread makes all calls. A session that waits longer
    than `idle_limit_seconds` for a part ends. At most `most_sessions` sessions are open at once."""

    scheduler: Scheduler
    builder: RequestBuilder
    idle_limit_seconds: float
    most_sessions: int
    num_timed_out: int = 0
    _open: dict[str, PromptSession] = field(default_factory=dict)
    # Each open session is in one of these dicts, so that steps skip waiting sessions.
    _asked: dict[str, PromptSession] = field(default_factory=dict)  # computing; by request id
    _waiting: dict[str, PromptSession] = field(default_factory=dict)  # for a part; oldest first
    _whole: dict[str, PromptSession] = field(default_factory=dict)  # with all parts

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def stats(self) -> dict[str, int]:
        """Return the number of open sessions, and of sessions that timed out since the start."""
        return {"num_open": len(self._open), "num_timed_out": self.num_timed_out}

    @property
    def all_requests(self) -> Iterator[Request]:
        """The requests of the scheduler, and the ended requests that open sessions continue."""
        yield from self.scheduler.requests.values()
        for session in self._open.values():
            yield from (each for each in (session.before, session.origin) if each is not None)

    @property
    def is_due(self) -> bool:
        """Whether a session is ready to become a request, or has waited too long for a part."""
        return bool(self._whole) or self.idle_seconds <= 0.0

    @property
    def idle_seconds(self) -> float:
        """Seconds until the session that has waited longest times out; infinity if no session
        waits."""
        oldest = next(iter(self._waiting.values()), None)
        if oldest is None:
            return math.inf
        return max(0.0, oldest.waits_since + self.idle_limit_seconds - time.monotonic())

    def open_session(self, message: AddRequest) -> None:
        """Open a session with its first part. Raise ValueError for invalid tokens and unsupported
        parameters, and QueueFull if too many sessions are open or too many requests wait."""
        if message.request_id in self._open:
            raise ValueError(f"request id {message.request_id!r} is in use; give each its own")
        self.scheduler.check_queue()
        if len(self._open) >= self.most_sessions:
            raise QueueFull(f"{len(self._open)} sessions are open, no more may; try later")
        _check_wishes(message)
        # Building the request now reports its errors before the whole prompt has come.
        built = self.builder.make_request(message)
        tokens = built.prompt_token_ids
        session = PromptSession(message, [tokens], len(tokens), time.monotonic(), origin=built)
        self._add_part(session)
        self._open[session.request_id] = session

    def extend_prompt(self, message: ExtendPrompt) -> list[TokenOutput]:
        """Add the next part; a part of an ended session is ignored. If the session must end with an
        error, return its last output."""
        session = self._open.get(message.request_id)
        if session is None or session.is_whole:
            return []
        try:
            if 0 <= message.num_kept < session.num_tokens:
                self._restart(session, message.num_kept)
            if packed := message.prompt_token_ids:
                tokens = self.builder.read_tokens(packed, session.num_tokens)
                session.tokens.append(tokens)
                session.num_tokens += len(tokens)
            session.is_whole = message.is_last
            if session.asked is None and session.tokens and not session.is_whole:
                self._add_part(session)
            elif session.asked is None:
                self._wait_for_part(session)
        except ValueError as error:
            return [self._end_with(session, TokenOutput("", [], "error", error=str(error)))]
        return []

    def take(self, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
        """Process the outputs of requests that compute parts. Return the outputs for clients."""
        if not self._open:
            return list(outputs)
        told = []
        for output in outputs:
            session = self._asked.get(output.request_id)
            if session is None:
                told.append(output)
            elif output.finish_reason not in (None, "length"):
                told.append(self._end_with(session, output))
            else:
                session.first = session.first or output
                if output.finish_reason is not None:
                    told += self._go_on(session)
        return told

    def take_whole(self) -> list[WholePrompt]:
        """Remove and return the sessions that have all parts and have computed all but the last.
        The caller turns each session into a request."""
        whole, self._whole = self._whole, {}
        made = []
        for session in whole.values():
            del self._open[session.request_id]
            tokens, continued = session.take_tokens(), None
            if session.before is not None:
                continued = Continued(session.before, tokens)
            extras = session.message.extras or NO_EXTRAS
            message = msgspec.structs.replace(
                session.message,
                prompt_token_ids=tokens.tobytes(),
                extras=msgspec.structs.replace(extras, more_follows=False),
            )
            made.append(WholePrompt(message, continued, session.origin, session.first))
        return made

    def make_whole(self, whole: WholePrompt) -> Request:
        """Return the final request of a session. Raises like `RequestBuilder.make_request`."""
        request = self._make_request(whole.message, whole.continued, whole.origin)
        if whole.first is not None and request.continues is not None:
            request.num_cached_tokens = whole.first.num_cached_tokens or 0
            request.cached_tokens_by_tier = whole.first.cached_tokens_by_tier or {}
        return request

    def end_idle(self) -> list[TokenOutput]:
        """End the sessions that have waited too long for a part, and return their last outputs."""
        told = []
        while self.idle_seconds <= 0.0:
            session = next(iter(self._waiting.values()))
            self.num_timed_out += 1
            text = (
                f"no part of the prompt came for {self.idle_limit_seconds:g} s "
                f"(--session-idle-seconds) behind its first {session.num_tokens} tokens; send the "
                "whole prompt"
            )
            told.append(self._end_with(session, TokenOutput("", [], "error", error=text)))
        return told

    def abort_sessions(self, request_ids: Iterable[str]) -> None:
        """End the sessions with these ids, whose clients have disconnected; unknown ids are
        ignored."""
        for request_id in request_ids:
            if (session := self._open.get(request_id)) is not None:
                self._end(session)

    def _go_on(self, session: PromptSession) -> list[TokenOutput]:
        """Queue the next request if more parts arrived while the last one ran. If the session must
        end with an error, return its last output."""
        assert session.asked is not None
        del self._asked[session.asked.request_id]
        session.before, session.asked = session.asked, None
        if not session.tokens or session.is_whole:
            self._wait_for_part(session)
            return []
        try:
            self._add_part(session)
        except ValueError as error:
            return [self._end_with(session, TokenOutput("", [], "error", error=str(error)))]
        return []

    def _add_part(self, session: PromptSession) -> None:
        """Queue a request for the parts that have arrived. Raises like `Scheduler.add_request`."""
        session.num_made += 1
        extras = session.message.extras or NO_EXTRAS
        tokens, continued = session.take_tokens(), None
        message = msgspec.structs.replace(
            session.message,
            request_id=f"{session.request_id}\0{session.num_made}",  # no client sends a NUL
            prompt_token_ids=tokens.tobytes(),
            sampling_params=_ONE_TOKEN,
            extras=RequestExtras(adapter=extras.adapter) if extras.adapter else None,
        )
        if session.before is not None:
            continued = Continued(session.before, tokens)
        request = self._make_request(message, continued, session.origin)
        request.keeps_blocks, request.hands_over = True, False
        self.scheduler.add_request(request, context_of(session.message))
        session.asked, self._asked[request.request_id] = request, session
        self._waiting.pop(session.request_id, None)

    def _wait_for_part(self, session: PromptSession) -> None:
        """Record that the session has no request in progress: it waits for its next part or, if it
        has all parts, to become a request."""
        self._waiting.pop(session.request_id, None)
        session.waits_since = time.monotonic()
        waits_in = self._whole if session.is_whole else self._waiting
        waits_in[session.request_id] = session

    def _restart(self, session: PromptSession, num_kept: int) -> None:
        """Restart the session with the first `num_kept` of its tokens. The next request finds their
        blocks by prefix lookup, as for any prompt."""
        known = session.asked or session.before
        assert known is not None
        tokens = np.concatenate([known.prompt_token_ids, session.take_tokens()])[:num_kept]
        self._give_up_requests(session)
        session.before, session.asked, session.origin = None, None, known
        session.tokens, session.num_tokens = [tokens], num_kept

    def _make_request(
        self, message: AddRequest, continued: Continued | None, origin: Request | None
    ) -> Request:
        request = self.builder.make_request(message, continued=continued, adapter_of=origin)
        is_kept = continued is not None and continued.request.progress.kept is not None
        # A request cannot continue in evicted blocks, or while it waits for a grammar.
        if not is_kept or message.sampling_params.structured_outputs is not None:
            request.continues, request.external_load_failed = None, False
        return request

    def _end_with(self, session: PromptSession, output: TokenOutput) -> TokenOutput:
        self._end(session)
        return msgspec.structs.replace(output, request_id=session.request_id, new_token_ids=[])

    def _end(self, session: PromptSession) -> None:
        del self._open[session.request_id]
        self._waiting.pop(session.request_id, None)
        self._whole.pop(session.request_id, None)
        self._give_up_requests(session)

    def _give_up_requests(self, session: PromptSession) -> None:
        if session.asked is not None:
            self._asked.pop(session.asked.request_id, None)
        requests = [each for each in (session.before, session.asked) if each is not None]
        self.scheduler.finish_requests([each.request_id for each in requests])
        self.scheduler.release_blocks(requests)


def _check_wishes(message: AddRequest) -> None:
    """Raise ValueError for parameters that need a complete prompt."""
    extras, params = message.extras or NO_EXTRAS, message.sampling_params
    for name, is_asked in (
        ("n", bool(extras.forks)),
        ("use_beam_search", extras.beams is not None),
        ("an embedding", bool(extras.pooling)),
        ("prompt_embeds", bool(extras.prompt_embeds)),
        ("pictures", bool(extras.pictures)),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("the fields of a router", bool(extras.ticket or extras.hand_over)),
    ):
        if is_asked:
            raise ValueError(
                f"a prompt that comes in parts has one answer of its own, without {name}; send the "
                "prompt whole"
            )
