# SPDX-License-Identifier: Apache-2.0
"""Special tokens from a model's small files besides tokenizer.json, as transformers 5 reads them.

    tokenizer_config.json     bos_token and so on, other *_token, additional_special_tokens,
                              extra_special_tokens, added_tokens_decoder
    special_tokens_map.json   the same but the last; used if there is no added_tokens_decoder
    added_tokens.json         tokens with their ids; used if there is no added_tokens_decoder

Tokens that the tokenizer lacks are added after all its tokens, in the order of this table, as in
transformers. Tokens that the tokenizer has already become special if the files list them as
special."""

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
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_DECODER = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# Tokenizer classes that put one space before a text, and a space after each special token only if
# their configuration has `legacy: true`.
_WITH_LEGACY = ("LlamaTokenizer", "LlamaTokenizerFast")
_SPACE = "\u2581"


def read_settings(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenizer's configuration, merged with special_tokens_map.json and
    added_tokens.json. Raises ConfigError for a damaged file."""
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
        special = {_text_of(each) for each in (*_with_names(settings), *_in_list(settings))}
        settings[_DECODER] = {
            index: {"content": text, "special": text in special, "normalized": text not in special}
            for text, index in read_json(path, MAX_FILE_BYTES).values.items()
        }
    return settings


def add_tokens(fast: FastTokenizer, settings: Mapping[str, Any], origin: Path) -> str:
    """Add the tokens in the settings to a tokenizer. Return a digest of the changes, "" without
    changes. Raises ConfigError for settings in an unknown form or with too many tokens."""
    changed = ["spaces"] if _moves_spaces(fast, settings) else []
    before = fast.get_added_tokens_decoder()
    tokens: dict[str, AddedToken] = {}
    try:
        decoder = settings.get(_DECODER) or {}
        for index, value in sorted(decoder.items(), key=lambda entry: int(entry[0])):
            token = _token(value)
            if repr(before.get(int(index))) != repr(token):
                tokens[token.content] = token
        known = {token.content: token for token in before.values()} | tokens
        with_names = {_text_of(value) for value in _with_names(settings)}
        for text in with_names.intersection(known):
            if text is not None and not known[text].special:
                tokens[text] = known[text]
        for value in (*_with_names(settings), *_in_list(settings)):
            token = _token(value, special=True)
            if token.content not in known:
                tokens.setdefault(token.content, token)
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
    for text, token in tokens.items():
        token.special = token.special or text in with_names
    if tokens:
        fast.add_tokens(list(tokens.values()))
    changed += [repr(token) for token in tokens.values()]
    return hashlib.sha256(json.dumps(changed).encode()).hexdigest() if changed else ""


def _with_names(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yield all special tokens that have a role (such as `bos_token`) or another name."""
    others = [name for name in settings if name.endswith("_token") and name not in ROLES]
    for name in (*ROLES, *others):
        value = settings.get(name)
        if isinstance(value, dict | str):
            yield value
    named = _list_of(settings)
    if isinstance(named, dict):
        yield from named.values()


def _in_list(settings: Mapping[str, Any]) -> Iterable[Any]:
    values = _list_of(settings)
    return () if isinstance(values, dict) else _checked(values)


def _list_of(settings: Mapping[str, Any]) -> Any:
    """Return the newer list of further special tokens or, if it is missing, the older list."""
    return next((settings[name] for name in _LISTS if settings.get(name)), ())


def _checked(values: Any) -> Iterable[Any]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{_LISTS[0]} are {format_value(values)}")
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
    """Return a token's text, from a string or from an object with flags; None for other values."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _moves_spaces(fast: FastTokenizer, settings: Mapping[str, Any]) -> bool:
    """Move the rule for the space before a text from the normalizer to the pre-tokenizer, if the
    tokenizer's class does so. Return whether the rule was moved."""
    is_asked = settings.get("tokenizer_class") in _WITH_LEGACY
    if not is_asked or f'"prepend":"{_SPACE}"' not in _state(fast.normalizer):
        return False
    scheme = "always" if settings.get("legacy") else "first"
    if settings.get("add_prefix_space") is False:
        scheme = "never"
    fast.normalizer = None
    fast.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme=scheme, split=False
    )
    return True


def _state(part: Any) -> str:
    """Return the JSON of a part of a tokenizer; "" for None."""
    return "" if part is None else str(part.__getstate__().decode())
