# SPDX-License-Identifier: Apache-2.0
"""The settings of speculative decoding: the source and the number of draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...tiers.settings import readers
from ...tiers.settings.option import check_options, options_of, setting
from ...tiers.settings.values import ConfigError

DRAFT_MODEL = "draft_model"
EAGLE = "eagle"
OF_MODELS = (DRAFT_MODEL, EAGLE)  # methods that need a second model, which makes draft tokens
METHODS = ("none", "ngram", "suffix", *OF_MODELS)
MAX_DRAFTS = 64
# Limit of drafts for a model with recurrent states, which take tens of megabytes for each draft.
MOST_WITH_STATES = 4
_MAX_LOOKUP = 256  # limit of the tokens of an n-gram


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The settings of speculative decoding. Draft tokens change the number of steps, but not the
    tokens of an answer."""

    method: str = setting(
        "none", readers.one_of(*METHODS),
        "who proposes tokens that a step checks beside the next one. ngram: what followed the last "
        "tokens where the request had them before. suffix: what most often followed them there and "
        "in the tenant's answers before. draft_model: a smaller model. eagle: layers over the "
        "model's hidden states", "NAME",
        name="speculative_method",
    )  # fmt: skip
    model: Path | None = setting(
        None, readers.model,
        "the draft model, of the same vocabulary, or the EAGLE head: a directory, or an id of the "
        "Hub; its config.json says which, where no method is given", "MODEL",
        name="speculative_model",
    )  # fmt: skip
    num_tokens: int = setting(
        16, readers.integer, "draft tokens of one request that a step checks, at most", "N",
        name="num_speculative_tokens", bounds=(1, MAX_DRAFTS),
    )  # fmt: skip
    prompt_lookup_min: int = setting(
        3, readers.integer, "tokens that must be found again for a draft", "N",
        bounds=(1, _MAX_LOOKUP),
    )  # fmt: skip
    prompt_lookup_max: int = setting(
        16, readers.integer, "tokens that are compared to choose among places, at most", "N",
        bounds=(1, _MAX_LOOKUP),
    )  # fmt: skip
    adaptive: bool = setting(
        True, readers.switch,
        "propose less, or nothing, where checking takes longer than accepted drafts save",
        name="speculative_adaptive",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(options_of(SpeculativeConfig, ""), self)
        if (self.model is None) == (self.method in OF_MODELS):
            given = "no draft model" if self.model is None else f"the draft model {self.model}"
            raise ConfigError(
                f"--speculative-method {self.method} and {given} do not go together; give "
                f"--speculative-model with --speculative-method {' or '.join(OF_MODELS)}, or alone"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"--prompt-lookup-min {self.prompt_lookup_min} is more than --prompt-lookup-max "
                f"{self.prompt_lookup_max}; lower the first or raise the second"
            )

    @property
    def is_on(self) -> bool:
        return self.method != "none"

    def most_drafts(self, *, has_states: bool) -> int:
        """Return the maximum number of a request's draft tokens in a step; 0 without speculation. A
        model with recurrent states (`has_states`) has a lower maximum, to save memory."""
        if not self.is_on:
            return 0
        return min(self.num_tokens, MOST_WITH_STATES) if has_states else self.num_tokens
