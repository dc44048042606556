# SPDX-License-Identifier: Apache-2.0
"""`PromptSession`: a prompt that a caller of the Python API sends in parts, and its answer."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from ..client.base import EngineClient
from ..request.core_messages import NO_EXTRAS, AddRequest, ExtendPrompt
from ..request.request import pack_token_ids
from ..request.sampling_params import SamplingParams
from ..text.prompt_parts import PromptParts
from ..text.tokenizer import Tokenizer
from .arguments import NO_LISTS, type_name
from .outputs import RequestOutput
from .prompt_runner import CheckedPrompt

T = TypeVar("T")


class Requester(Protocol):
    """The methods and attributes of `LLM` that a session uses."""

    tokenizer: Tokenizer | None

    @property
    def client(self) -> EngineClient: ...
    @property
    def max_prompt_tokens(self) -> int: ...
    def make_request(
        self, prompt: Sequence[int], params: SamplingParams, cache_salt: str, *, adapter: str = ""
    ) -> AddRequest: ...
    def wait_for(self, work: Coroutine[Any, Any, T]) -> T: ...
    def run_checked(self, prompts: Sequence[CheckedPrompt]) -> list[RequestOutput]: ...


class PromptSession:
    """A prompt that is sent to the engine in parts, and its answer. `LLM.open_session` creates a
    session. Leaving the session's `with` block aborts the request unless `answer` was called."""

    def __init__(
        self, llm: Requester, params: SamplingParams, cache_salt: str, adapter: str = ""
    ) -> None:
        self._llm, self._params = llm, params
        self._cache_salt, self._adapter = cache_salt, adapter
        most = llm.max_prompt_tokens
        self._parts = PromptParts(llm.tokenizer, most)
        self._request: AddRequest | None = None  # set when the prompt has its first tokens
        self._has_ended = False
        self._feeding = threading.Lock()

    def feed(self, part: str | Sequence[int]) -> None:
        """Add the next part of the prompt, a text or a list of token ids. The engine computes the
        part before later parts arrive. Raises ValueError for an invalid part, after the last part,
        and while another thread adds a part."""
        with self._exclusively():
            tokens = self._parts.add_part(self._checked(part))
            if self._request is None:
                if not tokens:
                    return
                request = self._made(tokens)
                extras = msgspec.structs.replace(request.extras or NO_EXTRAS, more_follows=True)
                request.extras = extras
                self._llm.wait_for(self._llm.client.open_prompt(request))
                self._request = request
            else:
                self._extend(tokens)

    def answer(self, part: str | Sequence[int] = "") -> RequestOutput:
        """Add the last part, and return the answer. Raises like `feed` and `LLM.generate`."""
        with self._exclusively():
            num_kept, tokens = self._parts.end_prompt(self._checked(part))
            whole = self._made(self._parts.token_ids)
            if self._request is not None:
                self._extend(tokens, num_kept)
                whole = msgspec.structs.replace(whole, request_id=self._request.request_id)
            self._has_ended = True
            [answer] = self._llm.run_checked([CheckedPrompt(whole, None)])
            return answer

    def close(self) -> None:
        """Abort the session's request unless `answer` was called. Idempotent."""
        if not self._has_ended and self._request is not None:
            self._llm.wait_for(self._llm.client.drop_prompt(self._request.request_id))
        self._has_ended = True

    def __enter__(self) -> PromptSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, part: str | Sequence[int]) -> str | Sequence[int]:
        """Return a text unchanged, or token ids as a list. Raises ValueError for another value."""
        if isinstance(part, str):
            return part
        if isinstance(part, NO_LISTS) or not hasattr(part, "__iter__"):
            raise ValueError(f"a part is a text or a list of token ids, not {type_name(part)}")
        tokens = list(part)
        if tokens:
            self._made(tokens)
        return tokens

    def _made(self, tokens: Sequence[int]) -> AddRequest:
        return self._llm.make_request(tokens, self._params, self._cache_salt, adapter=self._adapter)

    def _extend(self, tokens: Sequence[int], num_kept: int | None = None) -> None:
        assert self._request is not None
        packed = pack_token_ids(tokens) if tokens else b""
        message = ExtendPrompt(self._request.request_id, packed)
        if num_kept is not None:
            message.is_last, message.num_kept = True, num_kept
        self._llm.wait_for(self._llm.client.extend_prompt(message))

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        if not self._feeding.acquire(blocking=False):
            raise ValueError("another thread feeds this session; feed one part at a time")
        try:
            if self._has_ended:
                raise ValueError("this session has had its last part; open another one")
            yield
        finally:
            self._feeding.release()
