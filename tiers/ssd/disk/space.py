# SPDX-License-Identifier: Apache-2.0
"""SpacePlan: divides the SSD tier's capacity between slot file and index.

The plan counts every file that a store may have on the disk:

    slot file            slots * (header page + payload, padded)
    index                as large as it may ever become, allocated at once
    index set aside      a damaged index is kept for inspection, one at most
    small files          lock file, directories, the file system's own maps of the above"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from ...block import ALIGNMENT, BlockLayout
from ...errors import TierConfigError
from ...settings.sizes import show_size

HEADER_PAGE_BYTES = ALIGNMENT
SMALL_FILES_BYTES = 128 * 1024

# An LMDB page has 52 rows, after splits at least 26. The factor leaves room for copies on write: a
# commit keeps the old and the new version of each changed page, and pages that a commit frees are
# reused only two commits later.
_ROWS_PER_PAGE = 26 * mmap.PAGESIZE // 4096
_INDEX_FACTOR = 3
_INDEX_BASE_PAGES = 64


@dataclass(frozen=True, slots=True)
class SpacePlan:
    """The number of slots, and the sizes of a record and of the index, in bytes."""

    num_slots: int
    record_bytes: int
    index_bytes: int

    @property
    def slot_file_bytes(self) -> int:
        return self.num_slots * self.record_bytes

    @property
    def total_bytes(self) -> int:
        return self.slot_file_bytes + 2 * self.index_bytes + SMALL_FILES_BYTES


def plan_space(layout: BlockLayout, capacity_bytes: int) -> SpacePlan:
    """Plan the largest store within `capacity_bytes`. Raises TierConfigError if no block fits."""
    smallest = plan_slots(layout.slot_bytes, 1)
    if smallest.total_bytes > capacity_bytes:
        raise TierConfigError(
            f"the SSD tier needs at least {show_size(smallest.total_bytes)} to hold one block of "
            f"this model and its index, not {show_size(capacity_bytes)}"
        )
    low, high = 1, capacity_bytes // smallest.record_bytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        if plan_slots(layout.slot_bytes, middle).total_bytes <= capacity_bytes:
            low = middle
        else:
            high = middle
    return plan_slots(layout.slot_bytes, low)


def plan_slots(slot_bytes: int, num_slots: int) -> SpacePlan:
    """Return the plan of a store of `num_slots` slots."""
    leaf_pages = -(-num_slots // _ROWS_PER_PAGE)
    return SpacePlan(
        num_slots=num_slots,
        record_bytes=HEADER_PAGE_BYTES + slot_bytes,
        index_bytes=(_INDEX_BASE_PAGES + _INDEX_FACTOR * leaf_pages) * mmap.PAGESIZE,
    )
