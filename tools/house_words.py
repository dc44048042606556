# SPDX-License-Identifier: Apache-2.0
"""The words that names in this repository avoid, and what they say instead; `house.py` reads it.

A rule is a pattern over an identifier's words in lower case (`_make_room` and `MakeRoom` are both
"make room"), or over the identifier itself. Where a word is also ordinary English, the rule names
the folders or the kinds of names in which it is meant, and says why the rest is something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple


class Kind(Enum):
    """The kind of code that carries a name."""

    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"
    IMPORT = "import"
    ATTRIBUTE = "attribute"
    VARIABLE = "variable"  # arguments and keywords too


class Identifier(NamedTuple):
    """A name and what carries it."""

    name: str
    kind: Kind


def words_of(identifier: str) -> str:
    """The words of a name in lower case, with spaces between them."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)
    return " ".join(found).lower()


@dataclass(frozen=True, slots=True)
class Rule:
    """A word of the table. Its folders stand for their mirrors below tests/ too."""

    pattern: str
    better: str
    exact: bool = False  # the pattern is matched with the whole identifier
    where: tuple[str, ...] = ("",)  # the only folders
    but: tuple[str, ...] = ()  # folders that are left out, by path or by name
    tests: bool = True  # whether tests are judged
    kinds: frozenset[Kind] = frozenset(Kind)

    def applies_to(self, folder: Path) -> bool:
        """Whether names in a folder are judged."""
        path = f"/{folder.as_posix()}/"
        if path.startswith("/tests/"):
            if not self.tests:
                return False
            path = path.removeprefix("/tests")
        return any(path.startswith(f"/{start}") for start in self.where) and not any(
            f"/{name}/" in path for name in self.but
        )

    def matches(self, identifier: Identifier) -> bool:
        """Whether it is a name that the rule forbids in its folders."""
        if identifier.kind not in self.kinds:
            return False
        if self.exact:
            return re.fullmatch(self.pattern, identifier.name) is not None
        return re.search(rf"\b(?:{self.pattern})\b", words_of(identifier.name)) is not None


class Rules:
    """A table of rules, which judges each distinct name once."""

    def __init__(self, *rules: Rule) -> None:
        self._rules = rules
        exact = "|".join(rule.pattern for rule in rules if rule.exact)
        inside = "|".join(rule.pattern for rule in rules if not rule.exact)
        self._exact, self._inside = re.compile(exact), re.compile(rf"\b(?:{inside})\b")
        self._known: dict[Identifier, list[Rule]] = {}

    def against(self, identifier: Identifier, folder: Path) -> Rule | None:
        """The first rule that forbids a name in a folder."""
        if identifier not in self._known:
            self._known[identifier] = self._judge(identifier)
        found = self._known[identifier]
        return next((rule for rule in found if rule.applies_to(folder)), None) if found else None

    def _judge(self, identifier: Identifier) -> list[Rule]:
        name = identifier.name
        if not self._exact.fullmatch(name) and not self._inside.search(words_of(name)):
            return []  # nearly every name
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
