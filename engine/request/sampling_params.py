# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters of a request, checked once when a client sends them.

The names are as in OpenAI's and vLLM's APIs. Token ids are checked where a vocabulary is known."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import msgspec

from ...tiers.settings.format import format_value
from .logprobs import MAX_LOGPROBS
from .reasoning_marks import is_part
from .structured_params import StructuredOutputsParams

MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_K = 2**31 - 1
MAX_LOGIT_BIAS_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
# Each word has a token sequence at the start of a text and another after a space.
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_SEQUENCE_TOKENS = 64
MAX_REASONING_MARK_TOKENS = 64
# The longest pattern to detect, which costs some microseconds for each token of an answer.
MAX_PATTERN_TOKENS = 256
MAX_PATTERN_COUNT = 1024
MAX_EXTRA_ARGS_BYTES = 16 * 1024  # the size of `extra_args` as JSON
MAX_EXTRA_ARGS_DEPTH = 8

_SEEDS = 2**64

_FLAGS = (
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "skip_reading_prefix_cache",
)  # fmt: skip
_WHOLE = ("n", "max_tokens", "min_tokens", "top_k")
_WHOLE_OR_NONE = (
    "seed", "logprobs", "prompt_logprobs", "thinking_token_budget", "routed_experts_prompt_start",
)  # fmt: skip
_MARKS = ("reasoning_start_token_ids", "reasoning_end_token_ids")
_REAL = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_NUMBERS = (*_WHOLE, *_WHOLE_OR_NONE, *_REAL)
_PLAIN = frozenset((int, float, bool, str, type(None)))


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule that ends an answer once its last tokens are a pattern of `min_pattern_size` to
    `max_pattern_size` tokens, `min_count` times in a row. Raises ValueError for values out of
    bounds."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 4

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            _check(_is_whole(value), f"repetition_detection.{name}", "a whole number", value)
        most = MAX_PATTERN_TOKENS
        for name, low, high in (
            ("max_pattern_size", 1, most),
            ("min_pattern_size", 1, self.max_pattern_size),
            ("min_count", 2, MAX_PATTERN_COUNT),
        ):
            value = getattr(self, name)
            expected = f"between {low} and {high}"
            _check(low <= value <= high, f"repetition_detection.{name}", expected, value)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of one request.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps every token; `min_p` drops tokens whose
    probability is below `min_p` times the likeliest token's. `seed` makes the draws of this request
    independent of the rest of the batch. `stop` may be one string, `logit_bias` may be a map, and
    lists may replace tuples. `logprobs` N asks for the log-probability of each new token and of the
    N likeliest tokens at its position; `prompt_logprobs` N requests the same of each prompt token.
    The front sets `bad_words_token_ids` by tokenizing `bad_words`. `thinking_token_budget` is the
    most tokens of a thought, the text between the marks `reasoning_start_token_ids` and
    `reasoning_end_token_ids`; the front sets these marks to the model's. Without marks the budget
    has no effect. `structured_outputs` restricts the answer's form. `extra_args` are copied. `n` is
    the number of answers; the front makes a request for each by `child_params`. Raises ValueError,
    which names the field, for values of a wrong type or out of bounds."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # above 1 makes tokens of prompt and output less likely
    presence_penalty: float = 0.0  # subtracted once from logits of output tokens
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to the token's logit)
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    reasoning_start_token_ids: tuple[int, ...] = ()
    reasoning_end_token_ids: tuple[int, ...] = ()
    extra_args: dict[str, Any] | None = None  # plain values of JSON, for logits processors
    structured_outputs: StructuredOutputsParams | None = None
    n: int = 1  # answers to the same prompt
    skip_reading_prefix_cache: bool = False  # compute the whole prompt, whose blocks are cached
    # The first token whose experts are reported, if requested; None: the prompt's first.
    routed_experts_prompt_start: int | None = None

    def __post_init__(self) -> None:
        self._take_lists()
        self._take_numbers()
        self._check_types()
        self._check_numbers()
        self._check_stops()
        self._check_biases()
        self._check_thinking()
        if self.extra_args is not None:
            msgspec.structs.force_setattr(self, "extra_args", _plain_args(self.extra_args))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def _take_lists(self) -> None:
        """Turn lists, or single strings, into tuples."""
        for name in ("stop", "stop_token_ids", "bad_words", "bad_words_token_ids", *_MARKS):
            value: Any = getattr(self, name)  # its type may differ from the declared type
            if isinstance(value, str) and name in ("stop", "bad_words"):
                value = (value,)
            _check(isinstance(value, tuple | list), name, "a list", value)
            msgspec.structs.force_setattr(self, name, tuple(map(_plain, value)))
        sequences: Any = self.bad_words_token_ids
        for ids in sequences:
            good = isinstance(ids, tuple | list) and all(_is_token(_plain(each)) for each in ids)
            _check(good, "bad_words_token_ids", "lists of token ids", ids, "{} in it")
        plain = tuple(tuple(map(_plain, ids)) for ids in sequences)
        msgspec.structs.force_setattr(self, "bad_words_token_ids", plain)
        bias: Any = self.logit_bias
        pairs = tuple(bias.items()) if isinstance(bias, Mapping) else bias
        good = isinstance(pairs, tuple | list) and all(
            isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
        )
        _check(good, "logit_bias", "a map of token ids to numbers", bias)
        plain_pairs = tuple((_plain(token), _plain(value)) for token, value in pairs)
        msgspec.structs.force_setattr(self, "logit_bias", plain_pairs)

    def _take_numbers(self) -> None:
        """Turn numbers of numpy and other packages into Python's own."""
        for name in _NUMBERS:
            value: Any = getattr(self, name)
            if type(value) not in _PLAIN:
                msgspec.structs.force_setattr(self, name, _plain(value))

    def _check_types(self) -> None:
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                _check(isinstance(text, str), name, "a string or a list of them", text)
        for name in _WHOLE:
            value = getattr(self, name)
            _check(_is_whole(value), name, "a whole number", value)
        for name in _WHOLE_OR_NONE:
            value = getattr(self, name)
            _check(value is None or _is_whole(value), name, "a whole number or None", value)
        for token in self.stop_token_ids:
            _check(_is_token(token), "stop_token_ids", "a list of token ids", token, "{} in it")
        for name in _REAL:
            value = getattr(self, name)
            _check(_is_number(value), name, "a number", value)
        detection: Any = self.repetition_detection
        if isinstance(detection, Mapping):
            try:
                detection = msgspec.convert(detection, RepetitionDetection)
            except msgspec.ValidationError as error:
                raise ValueError(f"repetition_detection: {error}") from None
            msgspec.structs.force_setattr(self, "repetition_detection", detection)
        good = detection is None or isinstance(detection, RepetitionDetection)
        _check(good, "repetition_detection", "an object with max_pattern_size", detection)
        asked: Any = self.structured_outputs
        if isinstance(asked, Mapping):
            try:
                asked = msgspec.convert(dict(asked), StructuredOutputsParams)
            except msgspec.ValidationError as error:
                raise ValueError(f"structured_outputs: {error}") from None
            msgspec.structs.force_setattr(self, "structured_outputs", asked)
        good = asked is None or isinstance(asked, StructuredOutputsParams)
        for name in _FLAGS:
            value = getattr(self, name)
            _check(isinstance(value, bool), name, "True or False", value)

    def _check_numbers(self) -> None:
        _check(1 <= self.n <= MAX_N, "n", f"between 1 and {MAX_N}", self.n)
        _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _check(self.max_tokens < 2**63, "max_tokens", "a 64-bit integer", self.max_tokens)
        in_range = 0 <= self.min_tokens <= self.max_tokens
        _check(in_range, "min_tokens", "between 0 and max_tokens", self.min_tokens)
        in_range = 0.0 <= self.temperature <= 100.0  # False for NaN
        _check(in_range, "temperature", "between 0 and 100", self.temperature)
        _check(-1 <= self.top_k <= MAX_TOP_K, "top_k", "-1, 0 or a positive count", self.top_k)
        _check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1", self.min_p)
        penalty = self.repetition_penalty
        _check(0.0 < penalty <= 100.0, "repetition_penalty", "above 0 and at most 100", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _check(-2.0 <= penalty <= 2.0, name, "between -2 and 2", penalty)
        in_range = self.seed is None or -(2**63) <= self.seed < 2**63
        _check(in_range, "seed", "a 64-bit integer", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            in_range = count is None or 0 <= count <= MAX_LOGPROBS
            _check(in_range, name, f"between 0 and {MAX_LOGPROBS}", count)

        start = self.routed_experts_prompt_start
        in_range = start is None or 0 <= start < 2**31
        _check(in_range, "routed_experts_prompt_start", "0 or a positive count", start)

    def _check_stops(self) -> None:
        _check_texts("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARACTERS)
        count = len(self.stop_token_ids)
        rule = f"at most {MAX_STOP_TOKEN_IDS} ids"
        _check(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", rule, count)

    def _check_biases(self) -> None:
        count = len(self.logit_bias)
        rule = f"at most {MAX_LOGIT_BIAS_IDS} token ids"
        _check(count <= MAX_LOGIT_BIAS_IDS, "logit_bias", rule, count)
        for token, value in self.logit_bias:
            good = _is_token(token) and _is_number(value) and -100.0 <= value <= 100.0
            if not good:
                raise ValueError(
                    "logit_bias must be token ids with numbers between -100 and 100, got "
                    f"{format_value(value)} for {format_value(token)}"
                )
        _check_texts("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
        count = len(self.bad_words_token_ids)
        rule = f"at most {MAX_BAD_SEQUENCES} lists"
        _check(count <= MAX_BAD_SEQUENCES, "bad_words_token_ids", rule, count)
        for ids in self.bad_words_token_ids:
            rule = f"lists of 1 to {MAX_BAD_SEQUENCE_TOKENS} token ids"
            fits = 1 <= len(ids) <= MAX_BAD_SEQUENCE_TOKENS
            _check(fits, "bad_words_token_ids", rule, len(ids), "one of {}")

    def _check_thinking(self) -> None:
        budget = self.thinking_token_budget
        in_range = budget is None or 0 <= budget < 2**63
        _check(in_range, "thinking_token_budget", "0 or a positive count", budget)
        start, end = self.reasoning_start_token_ids, self.reasoning_end_token_ids
        for name in _MARKS:
            ids = getattr(self, name)
            _check(all(map(_is_token, ids)), name, "a list of token ids", ids)
            rule = f"at most {MAX_REASONING_MARK_TOKENS} ids"
            _check(len(ids) <= MAX_REASONING_MARK_TOKENS, name, rule, len(ids))
        if bool(start) != bool(end):
            missing = _MARKS[bool(start)]
            raise ValueError(f"{missing} must be there where the other mark is, got none")
        if start and (is_part(start, end) or is_part(end, start)):
            raise ValueError(
                "reasoning_end_token_ids must not contain the start mark, nor be part of it, got "
                f"{format_value(end)} and {format_value(start)}"
            )


class UnreadExtraArgs(ValueError):
    """The error for a request with `extra_args` that no logits processor of this engine reads."""


def check_params_for_embeds(params: SamplingParams) -> None:
    """Raise ValueError for parameters that need the prompt's tokens, which embeddings lack."""
    if params.prompt_logprobs is not None:
        raise ValueError("prompt embeddings have no tokens whose log-probabilities there would be")
    if params.repetition_penalty != 1.0:
        raise ValueError(
            "repetition_penalty counts the prompt's tokens, which prompt embeddings do not have; "
            "use presence_penalty or frequency_penalty"
        )


def child_params(params: SamplingParams, child: int, *, with_prompt: bool) -> SamplingParams:
    """Return the parameters of answer number `child` of several answers to a prompt. If `params`
    has a seed, each answer gets a different one. Only the answer made `with_prompt` gets the
    prompt's log-probabilities."""
    changes: dict[str, int | None] = {"n": 1}
    if params.seed is not None:  # the seed after the greatest is the least
        changes["seed"] = (params.seed + child + _SEEDS // 2) % _SEEDS - _SEEDS // 2
    if not with_prompt:
        changes["prompt_logprobs"] = None
    return with_changes(params, **changes)


def with_changes(params: SamplingParams, **changes: int | None) -> SamplingParams:
    """Return a copy with changed values, which must be in range. The copy is not checked, because
    checking a thousand biases again for each of hundreds of answers would take a second."""
    changed = copy.copy(params)
    for name, value in changes.items():
        msgspec.structs.force_setattr(changed, name, value)
    return changed


def _plain(value: Any) -> Any:
    """Convert numbers and strings of other types, such as numpy's, to Python's own types, which the
    core can receive. Other values stay unchanged, and a later check refuses them."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _plain_args(given: Any) -> dict[str, Any]:
    """Copy `extra_args`. Raise ValueError for values that JSON or the core cannot hold."""
    name = "extra_args"
    _check(isinstance(given, Mapping), name, "a map of texts to plain values", given)
    plain: dict[str, Any] = _plain_value(given, MAX_EXTRA_ARGS_DEPTH)
    size = len(msgspec.json.encode(plain))
    rule = f"at most {MAX_EXTRA_ARGS_BYTES} bytes as JSON"
    _check(size <= MAX_EXTRA_ARGS_BYTES, name, rule, size)
    return plain


def _plain_value(value: Any, depth: int) -> Any:
    name = "extra_args"
    if isinstance(value, Mapping | list | tuple):
        _check(depth > 0, name, f"nested at most {MAX_EXTRA_ARGS_DEPTH} deep", value, "{} in it")
        _check(len(value) <= MAX_EXTRA_ARGS_BYTES, name, "short", len(value), "{} entries")
    if isinstance(value, Mapping):
        for key in value:
            good = isinstance(key, str) and _is_unicode(key)
            _check(good, name, "a map with texts for keys", key, "the key {}")
        return {str(key): _plain_value(each, depth - 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(each, depth - 1) for each in value]
    plain = _plain(value)
    if isinstance(plain, str):
        _check(_is_unicode(plain), name, "valid Unicode", plain, "{} in it")
    elif _is_number(plain):
        good = -(2**63) <= plain < 2**64 if _is_whole(plain) else math.isfinite(plain)
        _check(good, name, "finite numbers, integers of 64 bits", plain, "{} in it")
    else:
        good = plain is None or isinstance(plain, bool)
        _check(good, name, "plain values of JSON", value, "{} in it")
    return plain


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: Any) -> bool:
    """Whether a value is a 32-bit integer, the type of token ids. The vocabulary is not checked."""
    return _is_whole(value) and -(2**31) <= value < 2**31


def _is_number(value: object) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _check_texts(name: str, texts: tuple[str, ...], count: int, characters: int) -> None:
    _check(len(texts) <= count, name, f"at most {count} strings", len(texts))
    for text in texts:
        rule = f"strings of 1 to {characters} characters"
        _check(0 < len(text) <= characters, name, rule, len(text), "one of {}")
        _check(_is_unicode(text), name, "valid Unicode", text)


def _is_unicode(text: str) -> bool:
    """Whether a text is valid Unicode, which means that it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(ok: bool, name: str, expected: str, got: object, form: str = "{}") -> None:
    if not ok:
        raise ValueError(f"{name} must be {expected}, got {form.format(format_value(got))}")
