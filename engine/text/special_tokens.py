# SPDX-License-Identifier: Apache-2.0
"""The tokens that a model's small files name, besides tokenizer.json: what transformers 5 reads of
them.

    tokenizer_config.json     bos_token and its like, other *_token, additional_special_tokens,
                              extra_special_tokens, added_tokens_decoder
    special_tokens_map.json   the same but the last; counts where there is no added_tokens_decoder
    added_tokens.json         tokens with their ids; counts where there is no added_tokens_decoder

Tokens that the tokenizer does not have are added to it, behind all others and in that order, as
transformers adds them; those it has become special where they are named.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError
from ..models.checkpoint.files import is_there
from ..models.checkpoint.json_fields import read_json

SPECIAL_TOKENS_MAP, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
MAX_FILE_BYTES = 16 * 1024**2
MAX_ADDED_TOKENS = 65_536
ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_DECODER = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# Classes of tokenizers that put a space before a text once, not after each special token, where
# their configuration says `legacy: false`.
_WITH_LEGACY = ("LlamaTokenizer", "LlamaTokenizerFast")
_SPACE = "\u2581"


def read_settings(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a tokenizer, with what the two older files say. Raises ConfigError for
    one that is damaged."""
    settings = dict(config)
    if _DECODER in settings:
        return settings
    path = directory / SPECIAL_TOKENS_MAP
    if is_there(path):
        for name, value in read_json(path, MAX_FILE_BYTES).values.items():
            known = settings.get(name)
            if name == "extra_special_tokens" and isinstance(value, list):
                value = [*(known if isinstance(known, list) else ()), *value]
            settings[name] = value
    path = directory / ADDED_TOKENS
    if is_there(path):
        special = {_text_of(token) for token in _named(settings)}
        settings[_DECODER] = {
            index: {"content": text, "special": text in special, "normalized": text not in special}
            for text, index in read_json(path, MAX_FILE_BYTES).values.items()
        }
    return settings


def add_tokens(fast: FastTokenizer, settings: Mapping[str, Any], origin: Path) -> str:
    """Give a tokenizer the tokens that its settings name. Returns a digest of what has changed,
    empty where nothing has. Raises ConfigError for settings that name none."""
    changed = ["legacy"] if _without_legacy(fast, settings) else []
    known = {token.content for token in fast.get_added_tokens_decoder().values()}
    before = fast.get_added_tokens_decoder()
    tokens: list[AddedToken] = []
    try:
        decoder = settings.get(_DECODER) or {}
        by_index = sorted(decoder.items(), key=lambda entry: int(entry[0]))
        for index, value in by_index:
            token = _token(value)
            if repr(before.get(int(index))) != repr(token):
                tokens.append(token)
                known.add(token.content)
        for value in _named(settings):
            token = _token(value, special=True)
            if token.content not in known:
                tokens.append(token)
                known.add(token.content)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{origin} names special tokens in a form that is not known ({error}); copy it from "
            "the model"
        ) from error
    if len(tokens) > MAX_ADDED_TOKENS:
        raise ConfigError(
            f"{origin} adds {len(tokens)} tokens and at most {MAX_ADDED_TOKENS} are added; copy it "
            "from the model"
        )
    roles = {_text_of(settings.get(role)) for role in ROLES} - {None}
    for token in tokens:
        token.special = token.special or token.content in roles
    if tokens:
        fast.add_tokens(tokens)
    changed += [repr(token) for token in tokens]
    return hashlib.sha256(json.dumps(changed).encode()).hexdigest() if changed else ""


def _named(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Every special token that has a role or a name, and then those of the lists."""
    others = [name for name in settings if name.endswith("_token") and name not in ROLES]
    for name in (*ROLES, *others):
        value = settings.get(name)
        if isinstance(value, dict | str):
            yield value
    name = next((name for name in reversed(_LISTS) if settings.get(name)), "")
    values = settings.get(name) or ()
    yield from values.values() if isinstance(values, dict) else _checked(name, values)


def _checked(name: str, values: Any) -> Iterable[Any]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name} is {format_value(values)}")
    return values


def _token(value: Any, *, special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special)
    text = _text_of(value)
    if text is None:
        raise TypeError(format_value(value))
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(text, **{"special": special, **flags})


def _text_of(value: Any) -> str | None:
    """A token's text, written alone or with its flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _without_legacy(fast: FastTokenizer, settings: Mapping[str, Any]) -> bool:
    """Whether spaces are put before a text by another part than the file says, and now are."""
    is_asked = settings.get("legacy") is False and settings.get("tokenizer_class") in _WITH_LEGACY
    if not is_asked or f'"prepend":"{_SPACE}"' not in str(_state(fast.normalizer)):
        return False
    fast.normalizer = None
    fast.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first", split=False
    )
    return True


def _state(part: Any) -> str:
    """A part of a tokenizer as tokenizer.json has it."""
    return "" if part is None else part.__getstate__().decode()
