# SPDX-License-Identifier: Apache-2.0
"""What a client may ask of the sampler, checked once at the border.

Knows nothing of tensors. The names are those of OpenAI's and vLLM's APIs.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_K = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps every token. `seed` makes the draws of this
    request the same whatever else is in the batch. `stop` may be one string, and both kinds of
    stops may be lists. Raises ValueError, naming the field, for another type and for anything out
    of bounds.
    """

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

    def __post_init__(self) -> None:
        self._check_types()
        _check(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        in_range = 0 <= self.min_tokens <= self.max_tokens
        _check(in_range, "min_tokens", "between 0 and max_tokens", self.min_tokens)
        in_range = 0.0 <= self.temperature <= 100.0  # which NaN is not
        _check(in_range, "temperature", "between 0 and 100", self.temperature)
        _check(-1 <= self.top_k <= MAX_TOP_K, "top_k", "-1, 0 or a positive count", self.top_k)
        _check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        in_range = self.seed is None or -(2**63) <= self.seed < 2**63
        _check(in_range, "seed", "a 64-bit integer", self.seed)
        count = len(self.stop)
        _check(count <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", count)
        for text in self.stop:
            fits = 0 < len(text) <= MAX_STOP_STRING_CHARACTERS
            rule = f"strings of 1 to {MAX_STOP_STRING_CHARACTERS} characters"
            _check(fits, "stop", rule, f"one of {len(text)}")
        count = len(self.stop_token_ids)
        rule = f"at most {MAX_STOP_TOKEN_IDS} ids"
        _check(count <= MAX_STOP_TOKEN_IDS, "stop_token_ids", rule, count)

    def _check_types(self) -> None:
        stop: Any = self.stop  # whatever it is declared to be
        stop = (stop,) if isinstance(stop, str) else stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            _check(isinstance(value, tuple | list), name, "a list", repr(value))
            msgspec.structs.force_setattr(self, name, tuple(value))
        for text in self.stop:
            _check(isinstance(text, str), "stop", "a string or a list of them", repr(text))
        for name in ("max_tokens", "min_tokens", "top_k"):
            value = getattr(self, name)
            _check(_is_whole(value), name, "a whole number", repr(value))
        for token in self.stop_token_ids:
            _check(_is_whole(token), "stop_token_ids", "a list of token ids", f"{token!r} in it")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            _check(_is_whole(value) or isinstance(value, float), name, "a number", repr(value))
        is_seed = self.seed is None or _is_whole(self.seed)
        _check(is_seed, "seed", "a whole number or None", repr(self.seed))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _check(isinstance(value, bool), name, "True or False", repr(value))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {expected}, got {got}")
