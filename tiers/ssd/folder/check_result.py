# SPDX-License-Identifier: Apache-2.0
"""What a check of a store found: counts, the first problems, and what was done about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

# Kinds of problems. A row whose record is not the right one has the kind of its `record.Defect`.
INDEX = "index"  # lost or damaged
IDENTITY = "identity"  # the index and the identity file do not agree
RANGE = "range"  # a row names a slot that there is not
TWICE = "twice"  # two rows for one key
UNREADABLE = "unreadable"  # the disk did not give a record that a row names
SIZE = "size"  # a file is missing, or larger than it may be


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    text: str
    slot: int | None = None


@dataclass(slots=True)
class CheckResult:
    """Of one check of one store."""

    path: Path
    max_problems: int  # how many of them are kept
    slots: int = 0
    rows: int = 0
    whole: int = 0  # rows whose records are whole, as far as they were looked at
    orphans: int = 0  # whole records without a row
    bytes_read: int = 0
    payloads_verified: bool = True  # false: they are sealed and the key was not given
    counts: dict[str, int] = field(default_factory=dict)  # problems by kind
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # harmless, such as what a crash left
    removed_rows: int = 0
    rebuilt_rows: int = 0

    @property
    def is_clean(self) -> bool:
        """True if nothing was wrong; false also where everything was mended."""
        return not self.counts

    def add(self, kind: str, text: str, slot: int | None = None) -> None:
        """Count a problem, and keep it while there is room."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.problems) < self.max_problems:
            self.problems.append(Problem(kind, text, slot))
