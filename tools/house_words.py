# SPDX-License-Identifier: Apache-2.0
"""The words that identifiers of this repository avoid, with replacements; `house.py` reads them.

A rule is a pattern that is matched with an identifier's words in lower case ("make room" for
`_make_room` and `MakeRoom`) or with the identifier itself. If a word is also ordinary English, its
rule names the folders or kinds of names that are checked, and has a comment."""

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
    VARIABLE = "variable"  # also arguments and keywords


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
    """A forbidden word. A folder in `where` or `but` includes the same folder below tests/."""

    pattern: str
    better: str
    exact: bool = False  # whether the pattern must match the whole identifier
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
            return []  # nearly every identifier has no rule
        return [rule for rule in self._rules if rule.matches(identifier)]


_DEFINED = frozenset({Kind.MODULE, Kind.CLASS, Kind.FUNCTION, Kind.IMPORT})
_MODULES = frozenset({Kind.MODULE})
_SERVER = ("tiers/remote/", "tiers/cache_server/")

NOW = Rules(
    # In tests/tiers/ssd, a ledger has confirmed writes; in tools/, a credit names authors.
    Rule("ledgers?|credit(?:s|ed)?", "PrefillSavings, record", where=("engine/",)),
    # A benchmark reports figures, so the rule is only for the engine's class and its attributes.
    Rule("_?Figures|_figures", "CoreStats", exact=True, where=("engine/",)),
    Rule("figures", "core_stats", exact=True, where=("engine/",), kinds=_MODULES),
    Rule("intakes?", "RequestBuilder in the core, WriteLease in the cache server"),
    # `has_room`, `NO_ROOM` and `room = size - used` are about space and allowed. The rules forbid a
    # capital Room, modules, and names of the cache server that are not about space.
    Rule(r"_*(?:[A-Z]\w*)?Rooms?(?![a-z])\w*", "TenantStore, TenantStores", exact=True),
    Rule("rooms?", "tenant_store", kinds=_MODULES),
    Rule(
        "(?<!make )(?<!no )(?<!has )(?<!check )rooms?",
        "tenant_store",
        where=(*_SERVER, "regressions/"),
    ),
    Rule("loans?|holdings?", "ReadLease, leases"),
    Rule("beliefs?", "PresenceCache"),
    # The word is allowed for lanes of the SSD's threads, of CUDA streams and of a GPU's warps.
    Rule("lanes?", "TransferQueue", where=(*_SERVER, "tiers/wire/")),
    Rule("makeshift", "fallback"),
    Rule("doomed", "pending_clear"),
    Rule("threatened", "eviction candidates"),
    # In tests and benchmarks "ask" is allowed for a request to an engine; stores look keys up.
    Rule("asking", "PendingLookups", where=("connector/", "tiers/")),
    Rule("ask", "prefetch_lookup", exact=True, where=("connector/", "tiers/"), tests=False),
    # Allowed uses: a policy's trial against LRU, a test's repeated trial, and `trial_read`, a read
    # that a store measures on request.
    Rule(
        "(?:start )?trials?(?! read)",
        "Calibration",
        where=("connector/", "engine/"),
        kinds=_DEFINED | {Kind.ATTRIBUTE},
    ),
    Rule("read up", "promote"),
    # The flag --kv-fault-injection and classes such as FaultyStore are allowed.
    Rule(
        "drill|faulty",
        "a module of tiers/testing/",
        exact=True,
        but=("testing",),
        kinds=_MODULES,
    ),
    # A variable may have the name `shown`; the rule is for functions that format values.
    Rule("shown(_name)?", "format_value", exact=True, kinds=_DEFINED, tests=False),
    Rule("nearest", "suggest", exact=True, kinds=_DEFINED, tests=False),
    Rule("patience", "max_wait_seconds"),
    # The rule is for transports in the cache server's benchmark. "One way" and "both ways" are
    # directions; in benchmarks/gpu and connector/device, a way is a method of computing or copying.
    Rule("(?<!one )(?<!both )ways?", "transport", where=("benchmarks/",), but=("benchmarks/gpu",)),
    Rule("crews?", "clients"),
    Rule("contests?", "comparison"),
    Rule("second sight", "doorkeeper"),
    Rule("LOGITS_AT_ONCE_THERE", "LOGITS_CHUNK_GPU", exact=True),
    Rule("_do", "_ops", exact=True, where=("engine/models/",)),
    # `num_parked` is allowed, because it is a public statistic.
    Rule(
        "car park|(?<!num )parked|parking",
        "RequestLoads, loading",
        where=("connector/", "engine/"),
    ),
    Rule("meetings?|back loads?", "overlapped loads", where=("connector/", "engine/")),
    Rule("BOTH|BOTH_MARGIN", "OVERLAP", exact=True, where=("connector/", "engine/")),
    # In engine/api, which the rule does not check, "front" is the HTTP front end.
    Rule("front", "compute frontier", where=("connector/", "engine/scheduler/")),
    Rule("loaded from", "load frontier"),
)
