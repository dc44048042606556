# SPDX-License-Identifier: Apache-2.0
"""Which backend compiles a grammar.

`auto` gives xgrammar what it does quickly and keeps to, and llguidance, which has limits inside,
all the rest; where one of them is not installed, the other takes what it can.
"""

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
    """What is not installed that a backend needs, and what to do; empty where all is there."""
    wanted = list(_PACKAGES) if name == "auto" else [name]
    if any(_is_installed(each) for each in wanted):
        return ""
    packages = " or ".join(_PACKAGES[each] for each in wanted)
    return f"structured outputs need the package {packages}, which is not installed; {_INSTALL}"


def open_backend(name: str, read: Callable[[], Vocabulary], *, forks: bool = False) -> Backend:
    """The backend of this name, which is one of the settings'. Called by the thread that compiles,
    since it reads and imports much; `auto` imports what it needs when it needs it. `forks`: now,
    and without threads. Raises GrammarError for a package that is missing, and what `read`
    raises."""
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
    """Opens what it needs when it needs it."""

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
        """What takes xgrammar too long, llguidance may be done with at once, and counts its work
        when it follows it."""
        first = self._first_choice(spec)
        if is_second and _is_installed("guidance"):
            first = "guidance"
        return self._by_either(spec, first, lambda name: self.get_backend(name).try_out(spec))

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        return self.get_backend(form.backend).build(spec, form)

    def _by_either(self, spec: GrammarSpec, first: str, make: Callable[[str], Made]) -> Made:
        """By the first backend, or where that cannot, by the other."""
        try:
            return make(first)
        except GrammarError as error:
            other = "guidance" if first == "xgrammar" else "xgrammar"
            # What only xgrammar can say is no danger; else its word is as good as the other's.
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
        """The backend of this name, from now on."""
        with self._lock:
            if name not in self._opened:
                self._opened[name] = _OPENERS[name](self._vocabulary, self._forks)
            return self._opened[name]
