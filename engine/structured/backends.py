# SPDX-License-Identifier: Apache-2.0
"""The choice of the backend that compiles a grammar.

`auto` uses xgrammar for grammars that xgrammar follows fast and exactly. All other grammars go to
llguidance, which limits its own work. If one package is missing, the other gets all grammars."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import TypeVar

from ..request.structured_params import GrammarSpec, Kind
from .base import Backend, Form, Grammar, GrammarError
from .vocabulary import Vocabulary
from .xgrammar_scope import why_unsupported, why_untamed

Made = TypeVar("Made", tuple[Form, Grammar], Grammar)
_PACKAGES = {"xgrammar": "xgrammar", "guidance": "llguidance"}
_INSTALL = "run in a clone of StrataKV: pip install '.[grammar]'"


def why_missing(name: str) -> str:
    """Return which package a backend lacks, with its install command; "" if none is missing."""
    wanted = list(_PACKAGES) if name == "auto" else [name]
    if any(_is_installed(each) for each in wanted):
        return ""
    packages = " or ".join(_PACKAGES[each] for each in wanted)
    return f"structured outputs need the package {packages}, which is not installed; {_INSTALL}"


def open_backend(name: str, read: Callable[[], Vocabulary], *, forks: bool = False) -> Backend:
    """Open the backend with this name, a value of the setting. Only the compiling thread calls
    this, because the call reads and imports much. `auto` imports each backend at its first use.
    With `forks`, `auto` imports all backends at once, and no backend starts threads. Raises
    GrammarError for a missing package, and the errors of `read`."""
    if why := why_missing(name):
        raise GrammarError(why)
    if name != "auto":
        return _OPENERS[name](read(), forks)
    auto = _Auto(read(), forks)
    for each in _PACKAGES if forks else ():
        if _is_installed(each):
            auto.get_backend(each)
    return auto


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(_PACKAGES[name]) is not None


def _open_xgrammar(vocabulary: Vocabulary, forks: bool) -> Backend:
    from .xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)


def _open_guidance(vocabulary: Vocabulary, forks: bool) -> Backend:
    from .guidance_backend import GuidanceBackend

    return GuidanceBackend(vocabulary, has_threads=not forks)


_OPENERS = {"xgrammar": _open_xgrammar, "guidance": _open_guidance}


class _Auto(Backend):
    """The backend `auto`: xgrammar and llguidance, each opened at its first use."""

    def __init__(self, vocabulary: Vocabulary, forks: bool) -> None:
        self._vocabulary = vocabulary
        self._forks = forks
        self._opened: dict[str, Backend] = {}
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        return self._by_either(
            spec, self._first_choice(spec), lambda name: self.get_backend(name).compile(spec)
        )

    def load_requirements(self, spec: GrammarSpec) -> None:
        self.get_backend(self._first_choice(spec))

    def try_out(self, spec: GrammarSpec, *, is_second: bool = False) -> tuple[Form, Grammar]:
        """Use llguidance if `is_second`: it may be fast with a grammar that takes xgrammar too
        long, and limits its work while it follows a grammar."""
        first = self._first_choice(spec)
        if is_second and _is_installed("guidance"):
            first = "guidance"
        return self._by_either(spec, first, lambda name: self.get_backend(name).try_out(spec))

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        return self.get_backend(form.backend).build(spec, form)

    def _by_either(self, spec: GrammarSpec, first: str, make: Callable[[str], Made]) -> Made:
        """Make a grammar with the `first` backend, or with the other one if `first` raises
        GrammarError."""
        try:
            return make(first)
        except GrammarError as error:
            other = "guidance" if first == "xgrammar" else "xgrammar"
            # xgrammar is tried second only for structural tags, of which it accepts more formats.
            is_worth_it = other == "guidance" or spec.kind is Kind.STRUCTURAL_TAG
            if not is_worth_it or not _is_installed(other):
                raise
            try:
                return make(other)
            except GrammarError:
                raise error from None

    def _first_choice(self, spec: GrammarSpec) -> str:
        if not _is_installed("xgrammar"):
            return "guidance"
        if why := why_unsupported(spec) or why_untamed(spec):
            if _is_installed("guidance"):
                return "guidance"
            raise GrammarError(f"it has {why}, which needs llguidance; {_INSTALL}")
        return "xgrammar"

    def get_backend(self, name: str) -> Backend:
        """Return the backend with this name. The first call opens it."""
        with self._lock:
            if name not in self._opened:
                self._opened[name] = _OPENERS[name](self._vocabulary, self._forks)
            return self._opened[name]
