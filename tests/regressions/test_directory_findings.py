# SPDX-License-Identifier: Apache-2.0
"""What a model's directory says of its tokenizer and its templates beside tokenizer.json, and was
not read: file by file and key by key as transformers reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers

from stratakv.engine.api.openai.request.conversation import ConversationRenderer
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.text.tokenizer import Tokenizer
from stratakv.tiers.settings.values import ConfigError

from .test_template_findings import TOOLS, USER, rendered

pytestmark = pytest.mark.regression


def directory(folder: Path, files: dict[str, Any]) -> Path:
    """The embedded model's tokenizer with other files beside it; `tokenizer.json` may be a function
    that changes it."""
    files = dict(files)
    change: Callable[[Any], None] | None = files.pop("tokenizer.json", None)
    whole = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    if change is not None:
        change(whole)
    files["tokenizer.json"] = whole
    files.setdefault("tokenizer_config.json", {})
    if isinstance(files["tokenizer_config.json"], dict):
        files["tokenizer_config.json"].setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
SHOWS = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ messages[0].content }}"
TWO = {"default": "plain " + SHOWS, "tool_use": "{{ tools | tojson }}" + SHOWS}
NEW = {"content": "<new>", "lstrip": True, "rstrip": False, "normalized": False,
       "single_word": False, "special": True}  # fmt: skip


def not_special(whole: Any) -> None:
    for token in whole["added_tokens"]:
        token["special"] = False


FILES: dict[str, dict[str, Any]] = {
    "roles in the configuration": {CONFIG: {"bos_token": "<|endoftext|>", "eos_token": "</s>"}},
    "roles with flags": {CONFIG: {"eos_token": {"__type": "AddedToken", **NEW}}},
    "roles in the map": {MAP: {"bos_token": "<|endoftext|>", "eos_token": {**NEW}}},
    "the map over the configuration": {CONFIG: {"eos_token": "</s>"}, MAP: {"eos_token": "<new>"}},
    "the map is left where tokens are listed": {
        CONFIG: {"added_tokens_decoder": {"3": NEW}}, MAP: {"eos_token": "<new>"}},
    "tokens by their ids": {CONFIG: {"added_tokens_decoder": {
        "70000": NEW, "60000": {**NEW, "content": "<im>", "special": False}}}},
    "a flag that differs": {CONFIG: {"added_tokens_decoder": {
        "0": {**NEW, "content": "<|endoftext|>", "special": False}}}},
    "additional special tokens": {CONFIG: {"additional_special_tokens": ["<im>", "<new>"]}},
    "extra special tokens": {CONFIG: {"extra_special_tokens": ["<im>", "<new>"]}},
    "extra special tokens by name": {CONFIG: {"extra_special_tokens": {"im_token": "<im>"}}},
    "a role of its own": {CONFIG: {"im_token": "<im>"}},
    "both lists": {CONFIG: {"extra_special_tokens": ["<new>"],
                            "additional_special_tokens": ["<im>"]}},
    "a list in the map": {CONFIG: {"extra_special_tokens": ["<im>"]},
                          MAP: {"extra_special_tokens": ["<new>"]}},
    "a file of added tokens": {ADDED: {"<new>": 70001, "<im>": 70000},
                               CONFIG: {"additional_special_tokens": ["<im>"]}},
    "an end that is not marked": {"tokenizer.json": not_special,
                                  CONFIG: {"eos_token": "<|endoftext|>"}},
    "a template in a file": {"chat_template.jinja": SHOWS, CONFIG: {"chat_template": "no"}},
    "a template in the configuration": {CONFIG: {"chat_template": SHOWS, "bos_token": "</s>"}},
    "two templates in a list": {
        CONFIG: {"chat_template": [{"name": k, "template": v} for k, v in TWO.items()]}},
    "two templates in files": {"chat_template.jinja": TWO["default"],
                               "additional_chat_templates/tool_use.jinja": TWO["tool_use"],
                               "additional_chat_templates/rag.jinja": "no"},
}  # fmt: skip
TEXT = "to the <im> and <new> of </s> it<|endoftext|> all"


@pytest.mark.parametrize("case", FILES)
def test_x09_a_directory_is_read_as_transformers_reads_it(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = directory(tmp_path, FILES[case])
    ours = Tokenizer.load(folder)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for adds in (True, False):
        ids = theirs(TEXT, add_special_tokens=adds).input_ids
        assert ours.encode(TEXT, add_special_tokens=adds) == ids
        for skips in (True, False):
            text = theirs.decode(ids, skip_special_tokens=skips)
            assert ours.decode(ids, skip_special_tokens=skips) == text
    for role in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "mask_token"):
        assert ours.special_token(role) == getattr(theirs, role)


@pytest.mark.parametrize("case", [case for case in FILES if "template" in case])
def test_x05_a_template_is_found_where_transformers_finds_it(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = directory(tmp_path, FILES[case])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    renderer = ConversationRenderer(folder, Tokenizer.load(folder))
    for tools in (None, TOOLS):
        prompt = rendered(renderer, USER, tools=tools)
        assert prompt == theirs.apply_chat_template([USER], tools, tokenize=False)
    assert renderer.template is not None
    assert ("tojson" in renderer.template.tools_source) == ("two" in case)


@pytest.mark.parametrize("legacy", [True, False, None])
def test_x09_a_space_before_a_text(tmp_path: Path, legacy: bool | None) -> None:
    """`legacy: false` puts it there once, not behind each special token."""
    transformers = pytest.importorskip("transformers")
    letters = ["\u2581", *"abc"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{c: i for i, c in enumerate(letters, 3)}}
    fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>",
              "eos_token": "</s>", "unk_token": "<unk>"}  # fmt: skip
    config |= {} if legacy is None else {"legacy": legacy}  # type: ignore[dict-item]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    theirs = transformers.LlamaTokenizer.from_pretrained(tmp_path)
    for text in ("ab c", " ab", "<s>ab</s>c a", "</s> b"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {"added_tokens_decoder": {"x": NEW}}},
        {CONFIG: {"added_tokens_decoder": {"5": 7}}},
        {CONFIG: {"additional_special_tokens": "<new>"}},
        {CONFIG: {"extra_special_tokens": [7]}},
        {CONFIG: {"extra_special_tokens": [f"<{i}>" for i in range(70_000)]}},
        {MAP: "[]"},
        {ADDED: '{"a":'},
        {ADDED: {"<new>": "x"}},
    ],
)
def test_x09_files_that_name_no_tokens(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Tokenizer.load(directory(tmp_path, files))


def test_x09_what_adds_tokens_counts_in_the_digest(tmp_path: Path) -> None:
    digests = set()
    for place, files in enumerate(({}, {MAP: {"eos_token": "<a>"}}, {MAP: {"eos_token": "<b>"}})):
        (folder := tmp_path / str(place)).mkdir()
        digests.add(Tokenizer.load(directory(folder, files)).digest)
    assert len(digests) == 3
