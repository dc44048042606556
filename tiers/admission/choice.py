# SPDX-License-Identifier: Apache-2.0
"""Admission filters by name: what a flag may say, and who makes the filter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import TierConfigError
from .base import AdmissionFilter, AdmitAll
from .reuse import ReuseFilter
from .second_sight import SecondSight
from .while_used import WhileUsed

# Takes the number of blocks that the tier below can hold.
FILTERS: Mapping[str, Callable[[int], AdmissionFilter]] = {
    "while-used": WhileUsed,
    "all": lambda _blocks: AdmitAll(),
    "second-sight": SecondSight,
    "reuse": ReuseFilter,
}
DEFAULT_FILTER = "while-used"


def make_filter(name: str, blocks_below: int) -> AdmissionFilter:
    """A filter by name. Raises TierConfigError for an unknown one."""
    if name not in FILTERS:
        raise TierConfigError(
            f"there is no admission filter {name!r}; there are: {', '.join(FILTERS)}"
        )
    return FILTERS[name](blocks_below)
