# SPDX-License-Identifier: Apache-2.0
"""Users whose prompts come in parts, over the scheduler of an engine without a model, and a model
of what each has sent.

A prompt grows by parts until the last one; its answer must then be that to the whole. Sessions may
end early: a part comes too late, the prompt gets too long, a step fails, the client leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stratakv.engine.core.continued.prompt_sessions import PromptSessions
from stratakv.engine.core.request_builder import RequestBuilder
from stratakv.engine.request.core_messages import (
    AddRequest,
    ExtendPrompt,
    RequestExtras,
    TokenOutput,
)
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams

from .conftest import HASHER, VOCAB, Engine, reference

IDLE_SECONDS = 4.0


@dataclass
class SentPrompt:
    """One user's prompt as far as it was sent."""

    tokens: list[int]
    max_tokens: int
    sent_at: float
    is_whole: bool = False
    is_too_long: bool = False


@dataclass
class SessionUsers:
    """`expected` and `cut_short` are the model's: the answer by request id, and the ids of requests
    that may end before it."""

    engine: Engine
    max_model_len: int
    now: Callable[[], float]
    expected: dict[str, list[int]]
    cut_short: set[str]
    open: dict[str, SentPrompt] = field(default_factory=dict)
    num_aborted: int = 0  # requests of sessions
    num_tokens: int = 0  # of parts, which are told to no client

    def __post_init__(self) -> None:
        scheduler = self.engine.scheduler
        builder = RequestBuilder(VOCAB, 8, self.max_model_len, HASHER, b"")
        self.sessions = PromptSessions(scheduler, builder, IDLE_SECONDS, 100)
        self._tell = self.engine.take
        self.engine.take = self.take  # type: ignore[method-assign]

    def holders(self) -> list[str]:
        """The names under which blocks are kept between parts."""
        ended = self.engine.scheduler._states.kept.ended
        return [each.progress.kept.holder for each in ended if each.progress.kept]

    def begin(self, name: str, part: Sequence[int], max_tokens: int) -> None:
        message = AddRequest(
            name,
            pack_token_ids(part),
            SamplingParams(max_tokens=max_tokens),
            extras=RequestExtras(more_follows=True),
        )
        self.open[name] = SentPrompt(list(part), max_tokens, self.now())
        self.expected[name] = []
        self.sessions.open_session(message)

    def feed(self, name: str, part: Sequence[int], *, is_last: bool, num_kept: int = -1) -> None:
        """The next part, behind the first `num_kept` tokens where that is not negative. The name
        may be one that has ended."""
        sent = self.open.get(name)
        if sent is not None and not sent.is_whole:
            if 0 <= num_kept < len(sent.tokens):
                self.num_aborted += self._runs_part(name)
                del sent.tokens[num_kept:]
            sent.tokens += part
            sent.is_whole, sent.sent_at = is_last, self.now()
            sent.is_too_long = len(sent.tokens) >= self.max_model_len
            if sent.is_too_long:
                self.num_aborted += self._runs_part(name)
            elif is_last:
                self.expected[name] = reference(sent.tokens, sent.max_tokens, self.max_model_len)
        packed = pack_token_ids(part) if part else b""
        self._note_told(self.sessions.extend_prompt(ExtendPrompt(name, packed, is_last, num_kept)))
        self.go_on()

    def leave(self, name: str) -> None:
        """The client of an open session is gone."""
        if name in self.sessions:
            self.num_aborted += self._runs_part(name)
            self.sessions.abort_sessions([name])
            self.cut_short.add(name)
            del self.open[name]

    def take(self, outputs: Sequence[TokenOutput]) -> None:
        """As an engine core does after a step."""
        told = self.sessions.take(outputs)
        self.num_tokens += sum(len(each.new_token_ids) for each in outputs)
        self.num_tokens -= sum(len(each.new_token_ids) for each in told)
        self._note_told(told)
        self.go_on()

    def go_on(self) -> None:
        """Sessions that are whole become requests, and those that have waited too long end."""
        self._note_told(self.sessions.end_idle())
        for whole in self.sessions.take_whole():
            request = self.sessions.make_whole(whole)
            self.engine.scheduler.add_request(request)
            before = whole.continued
            kept = None if before is None else before.request.progress.kept
            if before is not None and kept is not None and not kept.num_heirs:
                self.engine.scheduler.release_blocks([before.request])

    def check_parts(self) -> None:
        """A session has at most one request under way and one whose blocks are kept, and these hold
        its tokens."""
        for name, session in self.sessions._open.items():
            sent = self.open[name]
            assert session.num_tokens == len(sent.tokens)
            for request in (session.before, session.asked):
                if request is not None:
                    prompt = request.prompt_token_ids.tolist()
                    assert prompt == sent.tokens[: len(prompt)]
            assert session.asked is None or not session.asked.is_finished
        kept = [each for each in self.sessions._open.values() if each.before or each.asked]
        assert len(self.holders()) <= 2 * len(kept) + len(self.engine.scheduler.requests)

    def end_all(self) -> None:
        """All prompts become whole."""
        for name in list(self.open):
            if name in self.sessions and not self.open[name].is_whole:
                self.feed(name, [], is_last=True)

    def check_nothing_left(self) -> None:
        assert len(self.sessions) == 0
        assert not self.holders()

    def _runs_part(self, name: str) -> bool:
        session = self.sessions._open.get(name)
        return session is not None and session.asked is not None

    def _note_told(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            sent = self.open.get(output.request_id)
            if sent is not None and output.finish_reason is not None:
                self._check_end(output, sent)
                del self.open[output.request_id]
        self._tell(outputs)

    def _check_end(self, output: TokenOutput, sent: SentPrompt) -> None:
        """An error has its reason, and counts as the end of an answer that came in part."""
        name, error = output.request_id, output.error or ""
        if output.finish_reason != "error":
            assert sent.is_whole
            return
        if "no part of the prompt came" in error:
            assert not sent.is_whole
            assert self.now() - sent.sent_at >= IDLE_SECONDS
        elif "shorten it" in error:
            assert sent.is_too_long
        else:
            assert name in self.cut_short, error
        self.cut_short.add(name)


def owner_of(request_id: str) -> str:
    """The session that a request for a part belongs to; other ids stay as they are."""
    return request_id.partition("\0")[0]
