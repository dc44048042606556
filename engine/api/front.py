# SPDX-License-Identifier: Apache-2.0
"""`Front`: the state that all routes share, and the conversion of prompts to checked token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from posixpath import normpath
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..client.base import EngineClient
from ..request.pooling import Dimensions
from ..request.sampling_params import SamplingParams
from ..text.reasoning import ReasoningMarks
from ..text.tokenizer import PromptTooLong, Tokenizer
from ..text.tool_calls.tool_formats import ToolFormat
from .api_errors import ApiError
from .api_settings import ApiSettings
from .chat_template import ChatTemplate
from .in_flight import InFlight
from .metrics.engine_metrics import Metrics
from .openai.dropped import DroppedFields
from .openai.request.protocol import Prompt
from .picture_reader import PictureReader
from .served_adapters import ServedAdapters
from .token_texts import TokenTexts

# A text of more characters is tokenized in a thread. The switch to a thread costs some 50 us.
MAX_INLINE_CHARACTERS = 2048
# Characters of a text above which at most MAX_LONG_TEXTS texts are tokenized at once.
MAX_SHARED_CHARACTERS = 256 * 1024
MAX_LONG_TEXTS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Front:
    client: EngineClient
    model_name: str
    tokenizer: Tokenizer | None  # None: requests and answers have token ids instead of text
    template: ChatTemplate | None
    settings: ApiSettings
    metrics: Metrics
    # The values of generation_config.json for sampling fields that a client leaves out.
    default_sampling: Mapping[str, float | int]
    texts: TokenTexts
    model_aliases: tuple[str, ...] = ()  # paths that clients may use as the model's name
    marks: ReasoningMarks | None = None  # the marks around the model's thoughts; None: unknown
    tool_format: ToolFormat | None = None  # the form of tool calls; None: unknown
    # A function that raises ValueError for parameters that a logits processor refuses.
    check_params: Callable[[SamplingParams], None] = lambda params: None
    pooling: str = "last"  # the pooling of embeddings
    dimensions: Dimensions = field(default_factory=Dimensions)
    in_flight: InFlight = field(default_factory=InFlight)
    _long_texts: asyncio.Semaphore = field(
        init=False, default_factory=lambda: asyncio.Semaphore(MAX_LONG_TEXTS)
    )

    pictures: PictureReader | None = None  # None: the model reads only text
    adapters: ServedAdapters = field(init=False)
    dropped: DroppedFields = field(init=False)
    _background: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapters", ServedAdapters(self.client.ready.adapters))
        object.__setattr__(self, "dropped", DroppedFields(self.metrics.dropped_fields.inc))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` as a task that no caller awaits. `work` must not raise."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @property
    def picture_placeholder(self) -> str | None:
        return None if self.pictures is None else self.pictures.processor.placeholder

    @property
    def max_model_len(self) -> int:
        return self.client.ready.max_model_len

    @property
    def max_prompt_tokens(self) -> int:
        """The maximum number of tokens of a prompt: the context minus one token for the answer."""
        return self.max_model_len - 1

    def check_model(self, name: str | None) -> str:
        """Return the name of the model or LoRA adapter for a request's `model`. None, "" and other
        spellings of the model's path (`./x/` for `x`) mean the model. Raises ApiError 404 for an
        unknown name."""
        if not name or name == self.model_name:
            return self.model_name
        if name in self.adapters:
            return name
        if not self.model_aliases or normpath(name) not in map(normpath, self.model_aliases):
            message = f"the model `{name[:64]}` is not served here; use `{self.model_name}`"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return self.model_name

    def need_tokenizer(self, param: str, cure: str) -> Tokenizer:
        """Return the tokenizer. Raises ApiError, with the remedy `cure`, without a tokenizer."""
        if self.tokenizer is None:
            message = f"this server has no tokenizer; {cure}"
            raise ApiError(message, param=param, code="no_tokenizer")
        return self.tokenizer

    async def resolve_prompts(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
        max_tokens: int | None = None,
        param: str = "prompt",
    ) -> list[bytes]:
        """Return the prompts as int32 bytes. `truncate_to`: the number of last tokens to keep of a
        prompt; -1 keeps as many as fit into the context with an answer of `max_tokens`. Raises
        ApiError for an invalid prompt."""
        keep_last = self._num_kept_tokens(truncate_to, max_tokens)
        prompts = as_list(prompt, param)
        most = self.settings.max_prompts_per_request
        if len(prompts) > most:
            message = (
                f"the request holds {len(prompts)} prompts and at most {most} are taken; send the "
                "others in requests of their own"
            )
            raise ApiError(message, param=param, code="too_many_prompts")
        texts = [item for item in prompts if isinstance(item, str)]
        limit = self.max_prompt_tokens if keep_last is None else None
        encoded = iter(
            await self.encode_texts(
                texts, add_special_tokens=add_special_tokens, max_tokens=limit, param=param
            )
            if texts
            else ()
        )
        ids = [next(encoded) if isinstance(item, str) else item for item in prompts]
        one = prompts is not prompt
        return [
            self._check_ids(
                item,
                param if one else f"{param}[{i}]",
                keep_last,
                is_text=isinstance(prompts[i], str),
            )
            for i, item in enumerate(ids)
        ]

    def _num_kept_tokens(self, asked: int | None, max_tokens: int | None) -> int | None:
        """Return the number of last tokens that `truncate_prompt_tokens` keeps; None for all."""
        most = self.max_prompt_tokens
        if asked is None:
            return None
        if asked == -1:
            return max(1, most + 1 - max(max_tokens or 1, 1))
        if not 1 <= asked <= most:
            message = (
                f"`truncate_prompt_tokens` must be -1 or between 1 and {most}, which leaves one "
                f"token of the context for the answer, got {asked}"
            )
            raise ApiError(message, param="truncate_prompt_tokens", code="invalid_value")
        return asked

    async def encode_texts(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        max_tokens: int | None,
        param: str = "prompt",
    ) -> list[list[int]]:
        """Return the token ids of each text. Long texts are tokenized in a thread."""
        tokenizer = self.need_tokenizer(param, "send the prompt as a list of token ids")
        size, most = sum(map(len, texts)), self.settings.max_text_characters
        if size > most:
            message = (
                f"`{param}` has {size} characters of text and at most {most} are cut into tokens "
                "for one request; send less, or token ids"
            )
            raise ApiError(message, param=param, code="text_too_long")

        def work() -> list[list[int]]:
            return [
                tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
                for text in texts
            ]

        try:
            return await self.off_loop(work, size)
        except ValueError as error:
            raise self.refused_text(error, param) from None

    def refused_text(self, error: ValueError, param: str) -> ApiError:
        if not isinstance(error, PromptTooLong):
            return ApiError(str(error), param=param, code="invalid_value")
        context = f"the context of {self.max_model_len} tokens leaves one for the answer"
        return ApiError(f"{error} ({context})", param=param, code="context_length_exceeded")

    async def off_loop(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work()`, which is for `size` characters or tokens. Short work runs
        on the event loop, longer work in a thread. Raises TimeoutError if no thread gets free."""
        if size <= MAX_INLINE_CHARACTERS:
            return work()
        if size <= MAX_SHARED_CHARACTERS:
            return await asyncio.to_thread(work)
        async with asyncio.timeout(self.settings.request_timeout_seconds), self._long_texts:
            return await asyncio.to_thread(work)

    def _check_ids(
        self, ids: Sequence[int], param: str, keep_last: int | None = None, *, is_text: bool = False
    ) -> bytes:
        """Return a prompt's token ids as little-endian int32 bytes. Raises ApiError for an id
        outside of the vocabulary. `is_text`: the tokenizer made the ids from the client's text."""
        if not ids:
            message = f"`{param}` is empty; send at least one token"
            raise ApiError(message, param=param, code="empty_prompt")
        if keep_last is not None:
            ids = ids[-keep_last:]
        self.check_prompt_size(len(ids), param)
        return self.check_vocabulary(ids, param, is_text=is_text).astype("<i4").tobytes()

    def check_prompt_size(self, num_tokens: int, param: str) -> None:
        """Raise ApiError for a prompt that leaves no token of the context for the answer."""
        most = self.max_prompt_tokens
        if num_tokens > most:
            message = (
                f"`{param}` has {num_tokens} tokens and at most {most} fit (the context of "
                f"{most + 1} tokens leaves one for the answer); shorten it"
            )
            raise ApiError(message, param=param, code="context_length_exceeded")

    def check_vocabulary(
        self, ids: Sequence[int], param: str, *, is_text: bool = False
    ) -> NDArray[np.int64]:
        """Return token ids as an array. Raises ApiError with the position of an invalid id."""
        vocab_size = self.client.ready.vocab_size
        try:
            array = np.array(ids, np.int64)
        except OverflowError:
            message = f"`{param}` holds an id of more than 64 bits; ids end at {vocab_size - 1}"
            raise ApiError(message, param=param, code="token_id_out_of_range") from None
        # A negative id is a large unsigned number, so one comparison checks both bounds.
        wrong = array.view(np.uint64) >= vocab_size
        if wrong.any():
            place = int(wrong.argmax())
            what = f"`{param}[{place}]` is {array[place]}"
            if is_text:
                what = f"the tokenizer makes {array[place]} of a token in `{param}`"
            message = f"{what}, and the model's token ids run from 0 to {vocab_size - 1}"
            raise ApiError(message, param=param, code="token_id_out_of_range")
        return array


def as_list(prompt: Prompt, param: str = "prompt") -> Sequence[str | list[int]]:
    """Return the prompts of a request: a list of ids is one prompt, any other list is several."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if not kinds:
        message = f"`{param}` is an empty list; send a prompt"
        raise ApiError(message, param=param, code="no_prompt")
    if len(kinds) > 1:
        message = (
            f"`{param}` mixes kinds; send a string, a list of strings, a list of token ids, or a "
            "list of lists of token ids"
        )
        raise ApiError(message, param=param, code="invalid_type")
    return prompt  # type: ignore[return-value]
