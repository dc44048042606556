# SPDX-License-Identifier: Apache-2.0
"""Checks from the tokenizer.json files that two models use the same ids for the same tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from ...tiers.settings.values import ConfigError
from .checkpoint.files import is_there
from .model_source import ModelSource

_FILE = "tokenizer.json"


def check_vocabulary(model: ModelSource, draft: ModelSource) -> None:
    """Raise ConfigError if an id is another token in the draft model than in the model. If both
    models have a tokenizer.json, the ids in these files are compared, and `vocab_size` may differ
    by rows that no token uses. If a tokenizer.json is missing, `vocab_size` must be equal."""
    own, other = (each.path / _FILE for each in (model, draft))
    if is_there(own) and is_there(other):
        why = _difference(own, other)
    elif draft.spec.vocab_size != model.spec.vocab_size:
        why = f"{draft.spec.vocab_size} tokens against {model.spec.vocab_size}"
    else:
        return
    if why:
        raise ConfigError(
            f"the draft model {draft.path} has another vocabulary than {model.path} ({why}), so "
            "its tokens would mean something else; take a draft model of the same family, or "
            "--speculative-method ngram"
        )


def _difference(own: Path, other: Path) -> str:
    """Describe the first token whose id differs between two tokenizer.json files. The result is
    empty if all ids are equal."""
    data = own.read_bytes(), other.read_bytes()
    if data[0] == data[1]:
        return ""
    ids, others = (_read_ids(path, each) for path, each in zip((own, other), data, strict=True))
    for token in sorted(ids.keys() | others.keys()):
        if ids.get(token) != others.get(token):
            found = [each.get(token, "none") for each in (others, ids)]
            return f"the id of {token!r} is {found[0]} against {found[1]}"
    return ""


def _read_ids(path: Path, data: bytes) -> dict[str, int]:
    try:
        return dict(FastTokenizer.from_buffer(data).get_vocab(with_added_tokens=True))
    except BaseException as error:
        # A panic of the Rust library is no `Exception`; unhandled, it would end the server.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"{path} cannot be read as a tokenizer ({error}); copy it from the model again"
        ) from error
