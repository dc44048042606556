# SPDX-License-Identifier: Apache-2.0
"""GuidanceBackend: grammars with llguidance, which counts its own work and stops at a limit.

A hostile grammar therefore cannot block llguidance. Compiling is lazy and takes milliseconds. If a
step reaches too many parser states, the matcher raises GrammarError."""

from __future__ import annotations

import ctypes
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from ..request.structured_params import MOST_WHITESPACE, GrammarSpec, Kind
from .base import BITS, LARGE_BYTES, Backend, Form, Grammar, GrammarError, Matcher, Words
from .structural_tags import read_tags
from .vocabulary import Vocabulary

# The assumed memory of an unmeasured grammar: these bytes plus a multiple of the text's bytes.
# Measured grammars take 40 to 530 bytes for each byte of the text.
_LEAST_BYTES = 64 * 1024
_BYTES_EACH = 192
_WHITESPACE = f"[ \\n\\r\\t]{{0,{MOST_WHITESPACE}}}"
_ANY_OBJECT = '{"type": "object"}'
_ANY_TEXT = "start: /(.|\\n)*/"
_ELSEWHERE = re.compile("Resource '(json-schema:///)?(?P<name>.*)' is not present in a registry")
_NO_TOKEN = 2**32 - 1


class GuidanceBackend(Backend):
    """The llguidance backend. `limits` bound llguidance's parser; the default is some 50,000 items
    a step. Without `has_threads` the backend starts no thread, and a large grammar is freed by the
    thread that drops it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: llguidance.LLParserLimits | None = None,
        *,
        has_threads: bool = True,
    ) -> None:
        self._end_ids = vocabulary.end_ids
        self._limits = limits or llguidance.LLParserLimits(verbose_errors=False)
        wrapper = llguidance.TokenizerWrapper(_Words(vocabulary))
        # llguidance needs an end token. A model without one gets this token; it is never allowed.
        ends = list(vocabulary.end_ids) or [len(vocabulary.tokens)]
        size = max(len(vocabulary.tokens), ends[-1] + 1)
        self._num_bytes = -(-size // BITS) * (BITS // 8)
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=ends)
        # Made here, since its thread inherits the scheduling class of the thread that starts it.
        self._emptier = _Emptier(self._tokenizer) if has_threads else None

    def compile(self, spec: GrammarSpec) -> Grammar:
        return self._compile(_text_of(spec), _told_bytes(spec))

    def try_out(self, spec: GrammarSpec, *, is_second: bool = False) -> tuple[Form, Grammar]:
        text = _text_of(spec)
        before, began = heap_bytes(), time.process_time()
        grammar = self._compile(text, 0)
        seconds = time.process_time() - began
        grammar.num_bytes = max(0, heap_bytes() - before)
        return Form("guidance", text, True, grammar.num_bytes, seconds), grammar

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        return self._compile(form.text, form.num_bytes or _told_bytes(spec))

    def _compile(self, text: str, num_bytes: int) -> Grammar:
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_plain(matcher.get_error()))
        emptier = self._emptier if num_bytes >= LARGE_BYTES else None
        return _GuidanceGrammar(matcher, num_bytes, self._num_bytes, self._end_ids, emptier)


class _Emptier:
    """Frees the memory of matchers without holding the interpreter's lock, which Python holds to
    free an object. A matcher frees its state when it gets a wrong token; if several matchers get
    tokens in one call, a thread of llguidance frees the states. Any thread may call `empty`, which
    waits until the memory is freed."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self._executor = llguidance.LLExecutor(1)
        self._small = llguidance.LLMatcher(tokenizer, _ANY_TEXT, log_level=0)

    def empty(self, matcher: llguidance.LLMatcher) -> None:
        """Free the state of `matcher`, which must not be used again. State that several matchers
        share is freed with the last of them."""
        # Two matchers, because llguidance holds the interpreter's lock while it calls a single one.
        both = [(matcher, _NO_TOKEN), (self._small.deep_copy(), _NO_TOKEN)]
        self._executor.consume_token_par(both)


class _Words:
    """A vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        nameless = [i for i, token in enumerate(vocabulary.tokens) if not token]
        # A special token gets a name in place of bytes, which no text of a grammar can spell.
        names = {i: f"<|{i}|>".encode() for i in nameless}
        self.tokens = [names.get(i, token) for i, token in enumerate(vocabulary.tokens)]
        self.special_token_ids = nameless
        if not vocabulary.end_ids:
            self.special_token_ids = [*nameless, len(self.tokens)]
            self.tokens.append(b"<|end|>")
        self.eos_token_id = vocabulary.end_ids[0] if vocabulary.end_ids else len(self.tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return self._vocabulary.spell(text.encode() if isinstance(text, str) else text)


class _GuidanceGrammar(Grammar):
    is_bounded = True

    def __init__(
        self,
        prototype: llguidance.LLMatcher,
        num_bytes: int,
        num_mask_bytes: int,
        end_ids: Sequence[int],
        emptier: _Emptier | None,
    ) -> None:
        """`emptier` frees the prototype at the end; with None, Python frees the prototype."""
        self._prototype = prototype
        self.num_bytes = num_bytes
        self._num_mask_bytes = num_mask_bytes
        self._end_ids = end_ids
        self._emptier = emptier

    def __del__(self) -> None:
        if self._emptier is not None:
            self._emptier.empty(self._prototype)

    def matcher(self) -> Matcher:
        copy = self._prototype.deep_copy()
        return _GuidanceMatcher(self, copy, self._num_mask_bytes, self._end_ids)


class _GuidanceMatcher(Matcher):
    def __init__(
        self,
        grammar: _GuidanceGrammar,
        matcher: llguidance.LLMatcher,
        num_mask_bytes: int,
        end_ids: Sequence[int],
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes
        self._end_ids = end_ids

    def __del__(self) -> None:
        del self._matcher  # before the grammar, whose prototype then frees the shared state

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def accept(self, token_id: int) -> bool:
        # A wrong token in `consume_token` would break the matcher for good.
        if token_id not in self._end_ids and self._matcher.try_consume_tokens([token_id]) == 1:
            return True
        self._raise_matcher_error()
        return False

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        self._raise_matcher_error()

    def fill(self, words: Words) -> None:
        if self._matcher.is_stopped():  # at the grammar's end, or at a limit
            self._raise_matcher_error()
            words[:] = 0
            for token in self._end_ids:
                words[token // BITS] |= np.uint32(1 << token % BITS).astype(np.int32)
            return
        if words.nbytes == self._num_mask_bytes:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, self._num_mask_bytes)
        else:  # the vocabulary has a token that the model lacks
            words[:] = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(words)]
        self._raise_matcher_error()

    def _raise_matcher_error(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_plain(self._matcher.get_error()))


def _told_bytes(spec: GrammarSpec) -> int:
    return _LEAST_BYTES + _BYTES_EACH * len(spec.text)


class _Heap(ctypes.Structure):
    """The heap statistics of glibc: `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                     "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


def heap_bytes() -> int:
    """Return the bytes of the heap in use; 0 if the C library does not report them."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return 0
    tell.restype = _Heap
    told = tell()
    return int(told.uordblks + told.hblkhd)


def _text_of(spec: GrammarSpec) -> str:
    """Return the grammar in llguidance's own form. Rules are translated in Python; that takes 2 us
    a byte. Raises GrammarError."""
    try:
        return _translated(spec)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_plain(str(error))) from None


def _translated(spec: GrammarSpec) -> str:
    if spec.kind in (Kind.JSON, Kind.JSON_OBJECT):
        overrides: Any = {"whitespace_pattern": spec.whitespace_pattern or _WHITESPACE}
        if not spec.any_whitespace:
            overrides = {"whitespace_flexible": False}
            if spec.whitespace_pattern:
                overrides["whitespace_pattern"] = spec.whitespace_pattern
        return llguidance.LLMatcher.grammar_from_json_schema(
            spec.text or _ANY_OBJECT, overrides=overrides
        )
    if spec.kind is Kind.REGEX:
        return llguidance.grammar_from("regex", spec.text.removeprefix("^").removesuffix("$"))
    if spec.kind is Kind.CHOICE:
        # All texts become one terminal, since llguidance takes at most 2,000 rules at one place.
        texts = [json.dumps(each, ensure_ascii=False) for each in json.loads(spec.text)]
        return "start: CHOICE\nCHOICE: " + " | ".join(texts)
    if spec.kind is Kind.GRAMMAR:
        return llguidance.grammar_from("grammar", spec.text)
    triggers, tags = read_tags(spec.text)
    made = []
    for begin, schema, end in tags:
        trigger = next(trigger for trigger in triggers if begin.startswith(trigger))
        made.append(
            llguidance.StructTag(trigger=trigger, begin=begin, grammar=json.dumps(schema), end=end)
        )
    return llguidance.StructTag.to_grammar(made, assume_special=False)


def _plain(message: str) -> str:
    """Return an error of llguidance on one line, in terms of the client's request."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    if text.startswith("oneOf constraints"):
        return (
            "options of a oneOf may hold at once, and that only one does is not kept to; use "
            "anyOf, or give each a property with a constant of its own"
        )
    if text.startswith("Unimplemented keys: "):
        keys = text.removeprefix("Unimplemented keys: ")
        return f"its schema has the keys {keys}, which are not built; leave them out"
    if text == "NoExtensionBias":
        return "there is no token by which it could go on"
    if found := _ELSEWHERE.match(text):
        return (
            f"the $ref {found['name']!r} leads out of the schema, and nothing is fetched; put what "
            "it names under $defs"
        )
    return text
