# SPDX-License-Identifier: Apache-2.0
"""HierarchyOptions: the deadlines, write-back settings and tag checks of one hierarchy."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..admission import AdmissionFilter, AdmitAll
from ..tag import Tagger

WATERMARK = 0.25
READ_SECONDS = 5.0
# The deadline of a write, in which the slowest usable disk writes three batches; at most three are
# in flight.
WRITE_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyOptions:
    """The options of one hierarchy, which apply to every store and never change.

    With a `tagger`, a block is promoted only if it has the tag that the tagger makes for its key.
    Without a tagger, tags are kept but not checked: clients of a cache server check the tags.

    With `keeps_unwritten`, no block is evicted before it is written; new and promoted blocks get no
    slot instead. Callers that report to an engine which blocks are kept set `keeps_unwritten`, and
    use `Hierarchy.num_unwritten` to leave slots free."""

    watermark: float = WATERMARK  # writes start below this share of free slots
    read_seconds: float = READ_SECONDS
    write_seconds: float = WRITE_SECONDS
    inclusive: bool = True  # whether promoted blocks stay in the first store
    admission: AdmissionFilter = field(default_factory=AdmitAll)  # decides which are written
    tagger: Tagger | None = None
    keeps_unwritten: bool = False
