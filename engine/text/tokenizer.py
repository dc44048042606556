# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a model: text to token ids and back, by the `tokenizers` package.

Reads `tokenizer.json`, and from `tokenizer_config.json` what the first does not say. Knows nothing
of requests, chat messages or the engine; `detokenizer.py` turns a growing output into text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from ..config import ConfigError

# Normalisation can shorten a text before it is cut into tokens, but hardly by more than this.
_NORMALISATION_SHRINKS = 4


class PromptTooLong(ValueError):
    """The text cannot fit into the tokens allowed."""


class Tokenizer:
    """One model's tokenizer. Safe to call from several threads."""

    def __init__(self, fast: FastTokenizer, config: dict[str, Any] | None = None) -> None:
        # A saved file may carry the cutting and filling of somebody's training run.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._config = config or {}
        vocabulary = fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._longest_token = max((len(token) for token in vocabulary), default=1)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face directory; raises ConfigError where it has none."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} holds no tokenizer.json; save the model's fast tokenizer there"
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be read as a tokenizer ({error}); copy it from the model again"
            ) from error
        return cls(fast, _read_config(directory / "tokenizer_config.json"))

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a text.

        Raises PromptTooLong for more than `max_tokens`, without tokenizing a text that cannot
        possibly fit, and ValueError for text that is no valid Unicode.
        """
        if max_tokens is not None:
            most = max_tokens * self._longest_token * _NORMALISATION_SHRINKS
            if len(text) > most:
                raise PromptTooLong(
                    f"the prompt has {len(text)} characters, which cannot fit into "
                    f"{max_tokens} tokens; shorten it"
                )
        try:
            # A batch of one: `encode` holds the interpreter's lock, for a second with a long text.
            (encoding,) = self._fast.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(
                "the text holds half of a surrogate pair, which is no Unicode character; "
                "send valid UTF-8"
            ) from error
        ids: list[int] = encoding.ids
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens and at most {max_tokens} fit; shorten it"
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside the vocabulary have none."""
        return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """One token as it stands in the vocabulary; None for an id outside it."""
        return self._fast.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of one token as it stands in the vocabulary."""
        return self._fast.token_to_id(token)

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja template of a conversation, where it has one."""
        template = self._config.get("chat_template")
        return template if isinstance(template, str) else None

    def special_token(self, name: str) -> str | None:
        """The text of a special token by its role, such as `bos_token` or `eos_token`."""
        value = self._config.get(name)
        if isinstance(value, dict):  # written with its flags
            value = value.get("content")
        return value if isinstance(value, str) else None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON file ({error}); copy it from the model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object; copy it from the model again")
    return config
