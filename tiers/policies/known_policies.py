# SPDX-License-Identifier: Apache-2.0
"""Eviction policies by name: the values of the policy flags, and the functions that make policies.

Another package adds a policy in its own `pyproject.toml`:

    [project.entry-points."stratakv.policies"]
    mine = "mypackage.policy:MyPolicy"

`MyPolicy` takes the number of blocks that its owner can hold and returns an EvictionPolicy. The
policy must pass the check in `contract.py` before it is used. A built-in policy of the same name
takes precedence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint

from ..errors import TierConfigError
from ..registry import find_entry, installed
from .adaptive import AdaptivePolicy
from .arc import ArcPolicy
from .base import EvictionPolicy
from .contract import check_policy_contract
from .lru import LruPolicy
from .s3_fifo import S3FifoPolicy

ENTRY_POINTS = "stratakv.policies"

LRU = "lru"

# A function that makes a policy from the number of blocks that the owner can hold.
PolicyFactory = Callable[[int], EvictionPolicy]

POLICIES: Mapping[str, PolicyFactory] = {
    LRU: lambda _blocks: LruPolicy(),
    "arc": ArcPolicy,
    "s3-fifo": S3FifoPolicy,
    "adaptive": AdaptivePolicy,
}
DEFAULT_POLICY = "adaptive"
# The default of the ssd tier. In replays with a slab above, `adaptive` lost more hits than it won:
# it counts hits in its own tier, but prompts begin with blocks that the slab also has.
DEFAULT_SSD_POLICY = LRU


def known_policies() -> list[str]:
    """Return the names of all policies: first built-in policies, then those of other packages."""
    return list(dict.fromkeys([*POLICIES, *installed(ENTRY_POINTS)]))


def policy_factory(name: str) -> PolicyFactory:
    """Return the function that makes a policy: a built-in policy, or a policy of another package by
    name or as `module:attribute`. Raises TierConfigError for an unknown name and for a policy that
    cannot be loaded or breaks the contract of `base.py`."""
    if name in POLICIES:
        return POLICIES[name]
    if ":" in name:
        point = EntryPoint(name, name, ENTRY_POINTS)
    else:
        point = find_entry(ENTRY_POINTS, "eviction policy", name, tuple(POLICIES))
    try:
        make: PolicyFactory = point.load()
        check_policy_contract(make)
    except Exception as error:  # another package may raise any error
        raise _unusable(point, error) from error

    def make_or_say(blocks: int) -> EvictionPolicy:
        try:
            return make(blocks)
        except Exception as error:  # the policy may fail at another capacity
            raise _unusable(point, error) from error

    return make_or_say


def _unusable(point: EntryPoint, error: Exception) -> TierConfigError:
    return TierConfigError(
        f"the eviction policy {point.name} ({point.value}) cannot be used: "
        f"{type(error).__name__}: {error}"
    )
