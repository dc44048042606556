# SPDX-License-Identifier: Apache-2.0
"""XGrammarBackend: grammars with xgrammar, which is the fastest at masks. `xgrammar_scope.py`
decides which grammars xgrammar may get."""

from __future__ import annotations

import re
from typing import Any

import tvm_ffi
import xgrammar

from ..request.structured_params import MOST_WHITESPACE, GrammarSpec, Kind
from .base import Backend, Form, Grammar, GrammarError, Matcher, Rows, Words
from .vocabulary import Vocabulary
from .xgrammar_scope import text_of, why_unsupported, why_untamed

_PLACE = re.compile(r"^\[[^\]]*\] \S+: ")


class XGrammarBackend(Backend):
    """The xgrammar backend, which compiles on the calling thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # The list is passed even if empty; without a list xgrammar finds end tokens by their names.
        ends = list(vocabulary.end_ids)
        self._info = info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=ends,
        )
        self._end_ids = frozenset(ends)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> Grammar:
        return self._compiled(spec)

    def _compiled(self, spec: GrammarSpec) -> _XGrammar:
        if why := why_unsupported(spec):
            raise GrammarError(f"xgrammar does not keep to {why}; --structured-outputs-backend auto"
                               " takes what does")  # fmt: skip
        try:
            made = self._compile(spec, text_of(spec))
        except RuntimeError as error:
            raise GrammarError(_plain(error)) from None
        return _XGrammar(made, self._end_ids, is_bounded=not why_untamed(spec))

    def try_out(self, spec: GrammarSpec, *, is_second: bool = False) -> tuple[Form, Grammar]:
        grammar = self._compiled(spec)
        text = grammar.compiled.serialize_json() if grammar.is_bounded else ""
        return Form("xgrammar", text, grammar.is_bounded, grammar.num_bytes), grammar

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        """Deserialize the compiled grammar in `form`, which takes some 30 ms per MB. Raises
        GrammarError."""
        try:
            made = xgrammar.CompiledGrammar.deserialize_json(form.text, self._info)
        except RuntimeError as error:
            raise GrammarError(_plain(error)) from None
        return _XGrammar(made, self._end_ids, is_bounded=form.is_bounded)

    def _compile(self, spec: GrammarSpec, text: str) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        if spec.kind in (Kind.JSON, Kind.JSON_OBJECT):
            most = MOST_WHITESPACE if spec.any_whitespace else None
            return compiler.compile_json_schema(
                text, any_whitespace=spec.any_whitespace, max_whitespace_cnt=most
            )
        if spec.kind is Kind.REGEX:
            return compiler.compile_regex(text)
        if spec.kind is Kind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(text)
        return compiler.compile_grammar(text)


class _XGrammar(Grammar):
    def __init__(
        self, compiled: xgrammar.CompiledGrammar, end_ids: frozenset[int], *, is_bounded: bool
    ) -> None:
        self.compiled = compiled
        self._end_ids = end_ids
        self.is_bounded = is_bounded
        self.num_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        return _XGrammarMatcher(xgrammar.GrammarMatcher(self.compiled), self._end_ids)


class _XGrammarMatcher(Matcher):
    """A matcher that calls xgrammar's native functions directly, because xgrammar's Python wrappers
    would cost each step microseconds."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        handle: Any = matcher._handle
        self._accept = handle.accept_token
        self._fill = handle.fill_next_token_bitmask

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def accept(self, token_id: int) -> bool:
        return token_id not in self._end_ids and bool(self._accept(token_id, False))

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill(self, words: Words) -> None:
        self._fill(words.reshape(1, -1), 0, False)

    def fill_row(self, rows: Rows, index: int) -> None:
        if rows.exchanged is None:
            rows.exchanged = tvm_ffi.from_dlpack(rows.words)
        self._fill(rows.exchanged, index, False)


def _plain(error: RuntimeError) -> str:
    """Return the text of an error on one line, without xgrammar's timestamp and source line."""
    return _PLACE.sub("", " ".join(str(error).split()))
