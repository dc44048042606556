# SPDX-License-Identifier: Apache-2.0
"""HierarchyOptions: deadlines, write-back and checks of one hierarchy."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..admission import AdmissionFilter, AdmitAll
from ..tag import Tagger

WATERMARK = 0.25
READ_SECONDS = 5.0
# What a write may take. All that is in flight before it is at most three batches, which the slowest
# disk worth having writes in that time.
WRITE_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyOptions:
    """The same for every store, from the start to the end.

    With a `tagger` no block is promoted whose tag is not the one it makes for the key asked for.
    Without one tags are carried and not looked at: a server's clients judge their own.

    With `keeps_unwritten` no block is evicted that a store is still to have, neither for a store
    nor for a promotion: those go without a slot instead. For callers that are told what is kept;
    they leave room by `Hierarchy.num_unwritten`."""

    watermark: float = WATERMARK  # share of free slots below which the writing starts
    read_seconds: float = READ_SECONDS
    write_seconds: float = WRITE_SECONDS
    inclusive: bool = True  # promoted blocks stay in the first store
    admission: AdmissionFilter = field(default_factory=AdmitAll)  # of what is worth writing
    tagger: Tagger | None = None
    keeps_unwritten: bool = False
