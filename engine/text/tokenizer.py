# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a model, which converts text to token ids and back with the `tokenizers`
package.

The tokenizer is read from `tokenizer.json`, and further tokens from the smaller files in the same
directory (special_tokens.py). `detokenizer.py` turns a growing output into text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from ...tiers.settings.values import ConfigError
from ..models.checkpoint.files import is_there
from ..models.checkpoint.json_fields import read_json
from .special_tokens import add_tokens, read_settings

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Limits of file sizes: the largest vocabularies take some 35 MiB.
MAX_TOKENIZER_BYTES = 512 * 1024**2
MAX_SETTINGS_BYTES = 16 * 1024**2

# The factor by which normalization may shorten a text before tokenization, at most.
_NORMALISATION_SHRINKS = 4
# So many tokens decode in less than a millisecond; keeping the interpreter's lock is then faster.
_MAX_LOCKED_TOKENS = 4096


class PromptTooLong(ValueError):
    """The text does not fit into the allowed number of tokens."""


class Tokenizer:
    """The tokenizer of one model. Several threads may call it at once."""

    def __init__(
        self,
        fast: FastTokenizer,
        config: Mapping[str, object] | None = None,
        digest: str = "",
    ) -> None:
        # A saved file may have the truncation and padding settings of a training run.
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._config = config or {}
        self.digest = digest  # digest of tokenizer.json and of tokens from other files
        vocabulary = fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._longest_token = max((len(token) for token in vocabulary), default=1)

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer from a model's Hugging Face directory. Raises ConfigError if the
        tokenizer is missing or damaged."""
        tokenizer = cls.load_if_present(directory)
        if tokenizer is None:
            raise ConfigError(
                f"{directory} holds no {TOKENIZER}; save the model's fast tokenizer there"
            )
        return tokenizer

    @classmethod
    def load_if_present(cls, directory: Path) -> Tokenizer | None:
        """Do the same as `load`, but return None if the directory has no tokenizer."""
        path = directory / TOKENIZER
        if not is_there(path):
            return None
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ConfigError(
                f"{path} must have at most {MAX_TOKENIZER_BYTES} bytes and has more; copy it from "
                "the model again"
            )
        try:
            data = path.read_bytes()
            with _panics_are_errors():
                fast = FastTokenizer.from_buffer(data)
        except Exception as error:
            raise ConfigError(
                f"{path} cannot be read as a tokenizer ({error}); copy it from the model again"
            ) from error
        config = directory / TOKENIZER_CONFIG
        found = read_json(config, MAX_SETTINGS_BYTES).values if is_there(config) else {}
        settings = read_settings(directory, found)
        digest = hashlib.sha256(data)
        with _panics_are_errors():
            digest.update(add_tokens(fast, settings, config).encode())
        return cls(fast, settings, digest.hexdigest())

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raise PromptTooLong if a text is so long that it needs more than `max_tokens` tokens. The
        text is not tokenized."""
        most = max_tokens * self._longest_token * _NORMALISATION_SHRINKS
        if len(text) > most:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, which cannot fit into "
                f"{max_tokens} tokens; shorten it"
            )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        Raises PromptTooLong for more than `max_tokens` tokens, without tokenizing a text that is
        far too long. Raises ValueError for invalid Unicode and for text that the vocabulary cannot
        represent."""
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        try:
            with _panics_are_errors():
                # A batch of one text, since `encode` would hold the interpreter's lock, for long
                # texts a second.
                (encoding,) = self._fast.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError(
                "the text holds half of a surrogate pair, which is no Unicode character; "
                "send valid UTF-8"
            ) from error
        except Exception as error:  # such as a vocabulary without an unknown token
            raise ValueError(f"the model's tokenizer cannot take this text ({error})") from error
        ids: list[int] = encoding.ids
        if max_tokens is not None and len(ids) > max_tokens:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens and at most {max_tokens} fit; shorten it"
            )
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids outside the vocabulary have no text."""
        if len(token_ids) <= _MAX_LOCKED_TOKENS:
            return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))
        # A batch of one text, as in `encode`, releases the interpreter's lock.
        (text,) = self._fast.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token(self, token_id: int) -> str | None:
        """Return a token in the vocabulary's spelling; None for an id outside the vocabulary."""
        return self._fast.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token in the vocabulary's spelling; None for an unknown token."""
        return self._fast.token_to_id(token)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` leaves out by default."""
        added = self._fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template; None if the model has none."""
        template = self._config.get("chat_template")
        return template if isinstance(template, str) else None

    def special_token(self, name: str) -> str | None:
        """Return the text of the special token with a role such as `bos_token` or `eos_token`."""
        value = self._config.get(name)
        if isinstance(value, dict):  # an object with the token's text and flags
            value = value.get("content")
        return value if isinstance(value, str) else None


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Turn a panic of the Rust library into a RuntimeError. A panic is no `Exception`; unhandled,
    it would end the server."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error
