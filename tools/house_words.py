# SPDX-License-Identifier: Apache-2.0
"""The words that identifiers of this repository avoid, with replacements; `house.py` reads them.

A rule is a pattern that is matched with an identifier's words in lower case (`_make_room` and
`MakeRoom` are both "make room") or with the identifier itself. If a word is also ordinary English,
its rule names the folders or kinds of names that are checked, and a comment explains the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Kind(Enum):
    """The kind of syntax that holds an identifier."""

    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"
    IMPORT = "import"
    ATTRIBUTE = "attribute"
    VARIABLE = "variable"  # arguments and keywords too


class Identifier(NamedTuple):
    """An identifier and its kind."""

    name: str
    kind: Kind


def words_of(identifier: str) -> str:
    """The words of an identifier in lower case, separated by spaces."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)
    return " ".join(found).lower()


@dataclass(frozen=True, slots=True)
class Rule:
    """A forbidden word. A folder in `where` or `but` stands for its mirror below tests/ too."""

    pattern: str
    better: str
    exact: bool = False  # the pattern must match the whole identifier
    where: tuple[str, ...] = ("",)  # only these folders are checked
    but: tuple[str, ...] = ()  # folders that are not checked, by path or by name
    tests: bool = True  # whether names in tests/ are checked
    kinds: frozenset[Kind] = frozenset(Kind)

    def applies_to(self, folder: Path) -> bool:
        """Whether the rule checks names in `folder`."""
        path = f"/{folder.as_posix()}/"
        if path.startswith("/tests/"):
            if not self.tests:
                return False
            path = path.removeprefix("/tests")
        return any(path.startswith(f"/{start}") for start in self.where) and not any(
            f"/{name}/" in path for name in self.but
        )

    def matches(self, identifier: Identifier) -> bool:
        """Whether the rule forbids this identifier."""
        if identifier.kind not in self.kinds:
            return False
        if self.exact:
            return re.fullmatch(self.pattern, identifier.name) is not None
        return re.search(rf"\b(?:{self.pattern})\b", words_of(identifier.name)) is not None


class Rules:
    """A table of rules that caches its answer for each identifier."""

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules
        exact = "|".join(rule.pattern for rule in rules if rule.exact)
        inside = "|".join(rule.pattern for rule in rules if not rule.exact)
        self._exact, self._inside = re.compile(exact), re.compile(rf"\b(?:{inside})\b")
        self._known: dict[Identifier, list[Rule]] = {}

    def against(self, identifier: Identifier, folder: Path) -> Rule | None:
        """The first rule that forbids an identifier in `folder`; None if the identifier is
        allowed."""
        if identifier not in self._known:
            self._known[identifier] = self._judge(identifier)
        found = self._known[identifier]
        return next((rule for rule in found if rule.applies_to(folder)), None) if found else None

    def _judge(self, identifier: Identifier) -> list[Rule]:
        name = identifier.name
        if not self._exact.fullmatch(name) and not self._inside.search(words_of(name)):
            return []  # true of nearly every identifier
        return [rule for rule in self._rules if rule.matches(identifier)]


_DEFINED = frozenset({Kind.MODULE, Kind.CLASS, Kind.FUNCTION, Kind.IMPORT})
_MODULES = frozenset({Kind.MODULE})
_SERVER = ("tiers/remote/", "tiers/cache_server/")

NOW = Rules(
    # tests/tiers/ssd has a ledger of what a store confirmed, tools/ a credit to authors.
    Rule("ledgers?|credit(?:s|ed)?", "PrefillSavings, record", where=("engine/",)),
    # Figures are what a benchmark reports; only the engine's class and its holders are meant.
    Rule("_?Figures|_figures", "CoreStats", exact=True, where=("engine/",)),
    Rule("figures", "core_stats", exact=True, where=("engine/",), kinds=_MODULES),
    Rule("intakes?", "RequestBuilder in the core, WriteLease in the cache server"),
    # `has_room`, `NO_ROOM`, `room = size - used` are about space. The private class is meant by
    # every capital Room, by modules, and by all names of the cache server that are not about space.
    Rule(r"_*(?:[A-Z]\w*)?Rooms?(?![a-z])\w*", "TenantStore, TenantStores", exact=True),
    Rule("rooms?", "tenant_store", kinds=_MODULES),
    Rule(
        "(?<!make )(?<!no )(?<!has )(?<!check )rooms?",
        "tenant_store",
        where=(*_SERVER, "regressions/"),
    ),
    Rule("loans?|holdings?", "ReadLease, leases"),
    Rule("beliefs?", "PresenceCache"),
    # Lanes of the SSD's threads, of CUDA's streams and of a GPU's warps stay.
    Rule("lanes?", "TransferQueue", where=(*_SERVER, "tiers/wire/")),
    Rule("makeshift", "fallback"),
    Rule("doomed", "pending_clear"),
    Rule("threatened", "eviction candidates"),
    # A test or a benchmark asks an engine a question; stores and the hierarchy look keys up.
    Rule("asking", "PendingLookups", where=("connector/", "tiers/")),
    Rule("ask", "prefetch_lookup", exact=True, where=("connector/", "tiers/"), tests=False),
    # A policy's trial against LRU and a test's repeated trial are trials; so is `trial_read`, the
    # measured read that a store makes on request.
    Rule(
        "(?:start )?trials?(?! read)",
        "Calibration",
        where=("connector/", "engine/"),
        kinds=_DEFINED | {Kind.ATTRIBUTE},
    ),
    Rule("read up", "promote"),
    # The flag --kv-fault-injection and classes such as FaultyStore keep their names.
    Rule(
        "drill|faulty",
        "a module of tiers/testing/",
        exact=True,
        but=("testing",),
        kinds=_MODULES,
    ),
    # `shown` as a variable holds what was shown. Meant are the functions that format values.
    Rule("shown(_name)?", "format_value", exact=True, kinds=_DEFINED, tests=False),
    Rule("nearest", "suggest", exact=True, kinds=_DEFINED, tests=False),
    Rule("patience", "max_wait_seconds"),
    # Transports are those of the cache server's benchmark; one way and both ways are directions. In
    # benchmarks/gpu a way is how a step is computed, in connector/device how bytes are copied.
    Rule("(?<!one )(?<!both )ways?", "transport", where=("benchmarks/",), but=("benchmarks/gpu",)),
    Rule("crews?", "clients"),
    Rule("contests?", "comparison"),
    Rule("second sight", "doorkeeper"),
    Rule("LOGITS_AT_ONCE_THERE", "LOGITS_CHUNK_GPU", exact=True),
    Rule("_do", "_ops", exact=True, where=("engine/models/",)),
    # `num_parked` is a statistic that users see.
    Rule(
        "car park|(?<!num )parked|parking",
        "RequestLoads, loading",
        where=("connector/", "engine/"),
    ),
    Rule("meetings?|back loads?", "overlapped loads", where=("connector/", "engine/")),
    Rule("BOTH|BOTH_MARGIN", "OVERLAP", exact=True, where=("connector/", "engine/")),
    # The front of engine/api is the HTTP front end.
    Rule("front", "compute frontier", where=("connector/", "engine/scheduler/")),
    Rule("loaded from", "load frontier"),
)
