# SPDX-License-Identifier: Apache-2.0
"""Tiers of other projects, found by entry point and opened by name.

A package declares one in its own `pyproject.toml`:

    [project.entry-points."stratakv.tiers"]
    mytier = "mypackage.tier:open_tier"

where `open_tier` takes a `TierRequest` and returns an empty or a filled `StoreTier` that keeps the
promise of `tiers/base.py` (`tiers/contract.py` checks that). Nothing of the package is imported
before its name is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from .base import StoreTier
from .block import BlockLayout
from .errors import TierConfigError, TierDown

ENTRY_POINTS = "stratakv.tiers"


@dataclass(frozen=True, slots=True)
class TierRequest:
    """What a tier is opened for. `options` are the operator's, as text, unchecked."""

    name: str
    layout: BlockLayout
    namespace: bytes  # blocks of another one must never be found
    options: Mapping[str, str] = field(default_factory=dict)


OpenTier = Callable[[TierRequest], StoreTier]


def installed_tiers() -> list[str]:
    """The names of tiers that other packages bring, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINTS)})


def open_tier(request: TierRequest) -> StoreTier:
    """Open a tier by name. Raises TierConfigError with the cause and a cure, TierDown where the
    tier's place may come back."""
    point = _find(request.name)
    try:
        open_it: OpenTier = point.load()
        store = open_it(request)
    except TierConfigError:
        raise
    except Exception as error:  # code of others, at start: whatever it is, it is named
        kind = TierDown if isinstance(error, OSError) else TierConfigError
        raise kind(
            f"the tier {request.name} ({point.value}) could not be opened: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(store, StoreTier):
        raise TierConfigError(
            f"the tier {request.name} ({point.value}) returned {type(store).__name__}; "
            "expected a StoreTier"
        )
    if store.layout != request.layout:
        store.close(0.0)
        raise TierConfigError(
            f"the tier {request.name} ({point.value}) has the layout {store.layout}; "
            f"expected {request.layout}"
        )
    return store


def _find(name: str) -> EntryPoint:
    found = list(entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        known = ", ".join(installed_tiers()) or "none"
        raise TierConfigError(
            f"there is no tier {name!r}; installed beside cpu and ssd: {known}. A package brings "
            f"one as an entry point of the group {ENTRY_POINTS}"
        )
    if len({point.value for point in found}) > 1:
        where = ", ".join(sorted(point.value for point in found))
        raise TierConfigError(
            f"several packages bring a tier {name!r}: {where}; remove all but one"
        )
    return found[0]
