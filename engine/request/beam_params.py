# SPDX-License-Identifier: Apache-2.0
"""`BeamSearchParams`: the parameters of a beam search, named as in vLLM."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ...tiers.settings.format import format_value
from .sampling_params import SamplingParams

MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 16.0  # the least is -16; keeps scores of all lengths finite
_WITHOUT_EFFECT = (
    "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "bad_words", "structured_outputs", "repetition_detection", "stop", "stop_token_ids",
    "thinking_token_budget", "extra_args", "prompt_logprobs",
)  # fmt: skip
_PLAIN = SamplingParams()


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """A beam search, which returns `beam_width` answers, the best first.

    The score of an answer is the sum of its tokens' log-probabilities divided by its number of
    tokens to the power of `length_penalty`. `early_stopping` sets when a search with `beam_width`
    finished answers ends. With True the search ends at once. With False the search ends when no
    unfinished beam, at its present length, scores above the worst finished answer; with "never",
    when no beam could score above that answer at any length. Scores use the log-probabilities
    before temperature, so `temperature` has no effect, as in vLLM. With `ignore_eos`, every answer
    has `max_tokens` tokens. Raises ValueError, which names the field, for an invalid value."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not (is_whole and 1 <= value <= most):
                _refuse(name, f"a whole number from 1 to {most}", value)
        for name, least, most_of in (
            ("temperature", 0.0, 100.0),
            ("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not least <= value <= most_of:
                _refuse(name, f"a number from {least:g} to {most_of:g}", value)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                _refuse(name, "True or False", value)
        early: object = self.early_stopping
        if not (isinstance(early, bool) or early == "never"):
            _refuse("early_stopping", 'True, False or "never"', early)

    def score(self, total: float, num_tokens: int) -> float:
        """Return the score of an answer of `num_tokens` tokens (at least 1) whose log-probabilities
        add up to `total`."""
        return total / math.pow(num_tokens, self.length_penalty)


def wish_without_effect(params: SamplingParams) -> str:
    """Return the first parameter that is set but has no effect in a beam search; "" if there is
    none. A beam search uses only the token limit, end tokens and log-probabilities."""
    if params.logprobs:
        return "logprobs"
    asked = (name for name in _WITHOUT_EFFECT if getattr(params, name) != getattr(_PLAIN, name))
    return next(asked, "")


def _refuse(name: str, expected: str, value: object) -> None:
    raise ValueError(f"{name} must be {expected}, got {format_value(value)}")
