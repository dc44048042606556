# SPDX-License-Identifier: Apache-2.0
"""Admission filters by name: what a flag may say, and who makes the filter.

A package brings one as an entry point of the group `stratakv.admission`, which takes the number of
blocks that the tier below can hold and returns an AdmissionFilter. It is held to the contract
(`contract.py`) before it is used. A name of ours stays ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import TierConfigError
from ..registry import find_entry, installed
from .base import AdmissionFilter, AdmitAll
from .contract import check_filter_contract
from .filters import Doorkeeper, WhileUsed
from .reuse import ReuseFilter

ENTRY_POINTS = "stratakv.admission"

# Takes the number of blocks that the tier below can hold.
FilterFactory = Callable[[int], AdmissionFilter]

FILTERS: Mapping[str, FilterFactory] = {
    "while-used": WhileUsed,
    "all": lambda _blocks: AdmitAll(),
    "doorkeeper": Doorkeeper,
    "reuse": ReuseFilter,
}
DEFAULT_FILTER = "while-used"
ALIASES = {"second-sight": "doorkeeper"}  # names of earlier versions


def known_filters() -> list[str]:
    """All names: ours, then those that other packages bring, then those of earlier versions."""
    return list(dict.fromkeys([*FILTERS, *installed(ENTRY_POINTS), *ALIASES]))


def make_filter(name: str, blocks_below: int) -> AdmissionFilter:
    """A filter by name: one of ours, or of another package. Raises TierConfigError for a name that
    nobody brings and for a filter that cannot be loaded or does not keep the promise of
    `base.py`."""
    name = ALIASES.get(name, name)
    if name in FILTERS:
        return FILTERS[name](blocks_below)
    point = find_entry(ENTRY_POINTS, "admission filter", name, tuple(FILTERS))
    try:
        make: FilterFactory = point.load()
        check_filter_contract(make)
        return make(blocks_below)
    except Exception as error:  # code of others, at start: whatever it is, it is named
        raise TierConfigError(
            f"the admission filter {name} ({point.value}) cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error
