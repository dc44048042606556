# SPDX-License-Identifier: Apache-2.0
"""Whether two models mean the same tokens by the same ids."""

from __future__ import annotations

from pathlib import Path

from ...tiers.settings.values import ConfigError
from ..models.model_spec import ModelSpec
from .tokenizer import Tokenizer


def check_vocabulary(path: Path, spec: ModelSpec, draft_path: Path, draft: ModelSpec) -> None:
    """Raise ConfigError where the ids of two models mean different tokens. Where both bring a
    tokenizer, these are compared, and the models may have rows that no token uses; else the
    numbers of their rows must be equal."""
    own, other = (Tokenizer.load_if_present(each) for each in (path, draft_path))
    if own is not None and other is not None:
        if why := own.difference(other):
            raise _refusal(draft_path, path, why)
    elif draft.vocab_size != spec.vocab_size:
        sizes = f"{draft.vocab_size} tokens against {spec.vocab_size}"
        raise _refusal(draft_path, path, sizes)


def _refusal(draft_path: Path, path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the draft model {draft_path} has another vocabulary than {path} ({why}), so its tokens "
        "would mean something else; take a draft model of the same family, or "
        "--speculative-method ngram"
    )
