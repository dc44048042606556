# SPDX-License-Identifier: Apache-2.0
"""Eviction policies by name: what a flag may say, and who makes the policy for a capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import TierConfigError
from .adaptive import AdaptivePolicy
from .arc import ArcPolicy
from .base import EvictionPolicy
from .lru import LruPolicy
from .s3_fifo import S3FifoPolicy

# Takes the number of blocks that the owner can hold.
PolicyFactory = Callable[[int], EvictionPolicy]

POLICIES: Mapping[str, PolicyFactory] = {
    "lru": lambda _blocks: LruPolicy(),
    "arc": ArcPolicy,
    "s3-fifo": S3FifoPolicy,
    "adaptive": AdaptivePolicy,
}
DEFAULT_POLICY = "lru"


def policy_factory(name: str) -> PolicyFactory:
    """The maker of a policy. Raises TierConfigError for an unknown name."""
    if name not in POLICIES:
        raise TierConfigError(
            f"there is no eviction policy {name!r}; there are: {', '.join(POLICIES)}"
        )
    return POLICIES[name]
