# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's border: what a directory may lack, what a text may be, how long it may get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, processors

from stratakv.engine.text import tokenizer as tokenizer_module
from stratakv.engine.text.tokenizer import PromptTooLong, Tokenizer
from stratakv.tiers.settings.values import ConfigError

# The Rust library does not refuse this, it panics.
PANICS = """{"model": {"type": "BPE", "vocab": {}, "merges": []},
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Bytes, a begin token in front, and leftovers of a training run: cutting and filling."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.add_special_tokens(["<s>"])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    fast.enable_truncation(4)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<s>", "chat_template": "{{ x }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_nothing_is_cut_and_nothing_filled(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert len(tokenizer.encode("a longer text")) == 14
    assert len(tokenizer.encode("ab")) == 3
    assert tokenizer.vocab_size == 257


def test_special_tokens_can_be_left_out(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.encode("a")[0] == tokenizer.token_id("<s>") == 256
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1
    assert tokenizer.special_token("bos_token") == tokenizer.special_token("eos_token") == "<s>"
    assert tokenizer.special_token("unk_token") is None
    assert tokenizer.chat_template == "{{ x }}"


def test_a_prompt_over_the_limit_is_refused(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    assert len(tokenizer.encode("x" * 9, max_tokens=10)) == 10
    with pytest.raises(PromptTooLong, match="11 tokens and at most 10"):
        tokenizer.encode("x" * 10, max_tokens=10)
    with pytest.raises(PromptTooLong, match="1000000 characters"):
        tokenizer.encode("x" * 1_000_000, max_tokens=10)


def test_half_a_surrogate_is_no_text(directory: Path) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        Tokenizer.load(directory).encode("a\ud800b")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "is not valid JSON"),
        ("tokenizer.json", PANICS, "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_bad_directories(directory: Path, name: str, content: str | None, words: str) -> None:
    path = directory / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Tokenizer.load(directory)


def test_a_tokenizer_needs_no_configuration(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.chat_template is None
    assert tokenizer.special_token("bos_token") is None


def test_a_directory_without_one(tmp_path: Path) -> None:
    assert Tokenizer.load_if_present(tmp_path) is None


def test_files_of_any_size_are_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(ConfigError, match="must have at most 100 bytes and has more"):
        Tokenizer.load_if_present(directory)


def test_a_text_that_the_vocabulary_cannot_spell(tmp_path: Path) -> None:
    """This one has no token for what it does not know, and says so when it is met."""
    FastTokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match=r"tokenizer cannot take this text .*UNK"):
        tokenizer.encode("b")
