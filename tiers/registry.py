# SPDX-License-Identifier: Apache-2.0
"""The registry: finds tiers, eviction policies and admission filters of other packages by name.

A package declares a tier as an entry point in its own `pyproject.toml`:

    [project.entry-points."stratakv.tiers"]
    mytier = "mypackage.tier:open_tier"

`open_tier` takes a `TierRequest` and returns a `StoreTier`, empty or filled, that fulfils the
contract in `tiers/base.py`, which `tiers/contract.py` checks. `policies/known_policies.py` and
`admission/filters.py` describe the entry points of policies and filters. A package is imported only
when a setting names its entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from .base import StoreTier
from .block import BlockLayout
from .errors import TierConfigError, TierDown, lasting_cause

ENTRY_POINTS = "stratakv.tiers"


@dataclass(frozen=True, slots=True)
class TierRequest:
    """A request to open a tier. `options` are the operator's option values as unchecked text."""

    name: str
    layout: BlockLayout
    namespace: bytes  # blocks of another namespace must never be found
    options: Mapping[str, str] = field(default_factory=dict)


OpenTier = Callable[[TierRequest], StoreTier]


def installed_tiers() -> list[str]:
    return installed(ENTRY_POINTS)


def installed(group: str) -> list[str]:
    return sorted({point.name for point in entry_points(group=group)})


def find_entry(group: str, what: str, name: str, ours: Sequence[str]) -> EntryPoint:
    """Return the entry point `name` of a group. Error messages show `what` (the kind of entry
    point) and `ours` (the built-in names). Raises TierConfigError if the entry point is missing or
    ambiguous."""
    found = list(entry_points(group=group, name=name))
    if not found:
        raise TierConfigError(
            f"there is no {what} {name!r}; there are: {', '.join([*ours, *installed(group)])}. A "
            f"package brings one as an entry point of the group {group}"
        )
    if len({point.value for point in found}) > 1:
        where = ", ".join(sorted(point.value for point in found))
        raise TierConfigError(
            f"several packages bring the {what} {name!r}: {where}; remove all but one"
        )
    return found[0]


def open_tier(request: TierRequest) -> StoreTier:
    """Open a tier. Raises TierConfigError, or TierDown if the cause may be temporary."""
    point = find_entry(ENTRY_POINTS, "tier", request.name, ("cpu", "ssd"))
    try:
        open_it: OpenTier = point.load()
        store = open_it(request)
    except TierConfigError:
        raise
    except Exception as error:  # another package may raise any error; the message names it
        may_pass = isinstance(error, OSError) and lasting_cause(error) is None
        kind = TierDown if may_pass else TierConfigError
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
