# SPDX-License-Identifier: Apache-2.0
"""What every route shares: the engine client, the model's name, tokenizer, template and settings.

Also turns what a client sent into what the engine takes: prompts into checked token ids, fields
into SamplingParams. Knows nothing of HTTP messages; every refusal is an ApiError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..client.base import EngineClient
from ..sampling_params import SamplingParams
from ..text.tokenizer import PromptTooLong, Tokenizer
from ..token_ids import BYTES_PER_TOKEN
from ..wire import AddRequest
from .chat_template import ChatTemplate
from .errors import ApiError
from .metrics import Metrics
from .protocol import Prompt, SamplingFields, refuse_unsupported
from .settings import ApiSettings

MAX_CACHE_SALT_CHARACTERS = 256
DEFAULT_COMPLETION_TOKENS = 16
# Longer texts are tokenized in a thread. A hop costs about 50 us, as much as so many characters.
MAX_INLINE_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class Front:
    """One served model."""

    client: EngineClient
    model_name: str
    tokenizer: Tokenizer | None  # None: token ids in, token ids out
    template: ChatTemplate | None
    settings: ApiSettings
    metrics: Metrics

    @property
    def max_prompt_tokens(self) -> int:
        """One position is left for the first token of the answer."""
        return self.client.ready.max_model_len - 1

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a name that is not served; None is the one that is."""
        if name is not None and name != self.model_name:
            message = f"the model `{name[:64]}` is not served here; use `{self.model_name}`"
            raise ApiError(message, status=404, param="model", code="model_not_found")

    def check(self, request: SamplingFields) -> None:
        """What can be refused before any work is done."""
        self.check_model(request.model)
        refuse_unsupported(request)
        if request.stream_options is not None and not request.stream:
            message = "`stream_options` is for streams; send `stream: true` with it"
            raise ApiError(message, param="stream_options", code="invalid_value")
        if len(request.cache_salt or "") > MAX_CACHE_SALT_CHARACTERS:
            message = (
                f"`cache_salt` has more than {MAX_CACHE_SALT_CHARACTERS} characters; send a digest"
            )
            raise ApiError(message, param="cache_salt", code="invalid_value")

    async def resolve_prompts(self, prompt: Prompt) -> list[bytes]:
        """Each prompt as int32 bytes. All of them are checked before any is given back."""
        prompts = _as_list(prompt)
        most = self.settings.max_prompts_per_request
        if len(prompts) > most:
            message = (
                f"the request holds {len(prompts)} prompts and at most {most} are taken; send the "
                "others in requests of their own"
            )
            raise ApiError(message, param="prompt", code="too_many_prompts")
        texts = [item for item in prompts if isinstance(item, str)]
        encoded = iter(await self.encode(texts, add_special_tokens=True) if texts else ())
        ids = [next(encoded) if isinstance(item, str) else item for item in prompts]
        one = prompts is not prompt
        return [
            self.check_ids(item, "prompt" if one else f"prompt[{i}]") for i, item in enumerate(ids)
        ]

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, param: str = "prompt"
    ) -> list[list[int]]:
        """The token ids of texts, in a thread where that takes long."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            message = "this server has no tokenizer; send the prompt as a list of token ids"
            raise ApiError(message, param=param, code="no_tokenizer")
        most = self.max_prompt_tokens

        def work() -> list[list[int]]:
            return [
                tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=most)
                for text in texts
            ]

        try:
            if sum(map(len, texts)) <= MAX_INLINE_CHARACTERS:
                return work()
            return await asyncio.to_thread(work)
        except PromptTooLong as error:
            message = f"{error} (the context of {most + 1} tokens leaves one for the answer)"
            code = "context_length_exceeded"
            raise ApiError(message, param=param, code=code) from None
        except ValueError as error:
            raise ApiError(str(error), param=param, code="invalid_value") from None

    def check_ids(self, ids: Sequence[int], param: str) -> bytes:
        """Token ids as little-endian int32 bytes, each within the vocabulary."""
        most = self.max_prompt_tokens
        if not ids:
            message = f"`{param}` is empty; send at least one token"
            raise ApiError(message, param=param, code="empty_prompt")
        if len(ids) > most:
            message = (
                f"`{param}` has {len(ids)} tokens and at most {most} fit (the context of "
                f"{most + 1} tokens leaves one for the answer); shorten it"
            )
            raise ApiError(message, param=param, code="context_length_exceeded")
        vocab_size = self.client.ready.vocab_size
        try:
            array = np.array(ids, np.int64)
        except OverflowError:
            message = f"`{param}` holds an id of more than 64 bits; ids end at {vocab_size - 1}"
            raise ApiError(message, param=param, code="token_id_out_of_range") from None
        # As unsigned numbers negative ids are huge, so one comparison sees both ends.
        wrong = array.view(np.uint64) >= vocab_size
        if wrong.any():
            place = int(wrong.argmax())
            message = (
                f"`{param}[{place}]` is {array[place]}, and the model's token ids run from 0 to "
                f"{vocab_size - 1}"
            )
            raise ApiError(message, param=param, code="token_id_out_of_range")
        return array.astype("<i4").tobytes()

    def sampling_params(
        self, request: SamplingFields, prompt: bytes, max_tokens: int | None, default: int
    ) -> SamplingParams:
        """What the client asked of the sampler. `default` counts where `max_tokens` is None, cut
        down to what the context has left after the prompt."""
        num_prompt_tokens = len(prompt) // BYTES_PER_TOKEN
        left = self.client.ready.max_model_len - num_prompt_tokens
        if max_tokens is None:
            max_tokens = max(min(default, left), 1)
        elif max_tokens > left:
            message = (
                f"`max_tokens` is {max_tokens}, and after {num_prompt_tokens} prompt tokens the "
                f"context of {left + num_prompt_tokens} tokens has {left} left; ask for less"
            )
            raise ApiError(message, param="max_tokens", code="context_length_exceeded")
        stop = request.stop if request.stop is not None else ()
        if stop and self.tokenizer is None:
            message = "this server has no tokenizer, so it takes `stop_token_ids` but no `stop`"
            raise ApiError(message, param="stop", code="no_tokenizer")
        self._check_stop_ids(request.stop_token_ids or ())
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                min_tokens=request.min_tokens or 0,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_k=request.top_k or 0,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=request.seed,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_token_ids=tuple(request.stop_token_ids or ()),
                ignore_eos=request.ignore_eos,
                include_stop_str_in_output=request.include_stop_str_in_output,
                skip_special_tokens=request.skip_special_tokens,
            )
        except ValueError as error:
            name = str(error).partition(" ")[0]
            raise ApiError(str(error), param=name, code="invalid_value") from None

    def make_request(
        self, request_id: str, prompt: bytes, params: SamplingParams, request: SamplingFields
    ) -> AddRequest:
        """The message to the core."""
        return AddRequest(request_id, prompt, params, cache_salt=request.cache_salt or "")

    def _check_stop_ids(self, ids: Sequence[int]) -> None:
        vocab_size = self.client.ready.vocab_size
        for place, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                message = (
                    f"`stop_token_ids[{place}]` is {token}, and the model's token ids run from 0 "
                    f"to {vocab_size - 1}"
                )
                raise ApiError(message, param="stop_token_ids", code="token_id_out_of_range")


def _as_list(prompt: Prompt) -> Sequence[str | list[int]]:
    """The prompts of a request: a list of ids is one prompt, any other list is many and is given
    back as it is."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if not kinds:
        raise ApiError("`prompt` is an empty list; send a prompt", param="prompt", code="no_prompt")
    if len(kinds) > 1:
        message = (
            "`prompt` mixes kinds; send a string, a list of strings, a list of token ids, or a "
            "list of lists of token ids"
        )
        raise ApiError(message, param="prompt", code="invalid_type")
    return prompt  # type: ignore[return-value]
