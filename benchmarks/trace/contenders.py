# SPDX-License-Identifier: Apache-2.0
"""Which policy and which admission filter the ratios are about: those named, or the product's own.

The tables themselves belong to the tiers; what is added there is compared at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...engine.config_values import ConfigError
from ...engine.nearest import did_you_mean
from ...engine.shown import shown
from ...tiers.admission import DEFAULT_FILTER, FILTERS
from ...tiers.policies.choice import DEFAULT_POLICY, POLICIES

ADMIT_ALL = "all"
_OURS = "adaptive"


def choose_policy(name: str | None) -> str:
    """The policy that the ratios are about. Raises ConfigError for an unknown one."""
    if name is None:
        return _OURS if _OURS in POLICIES else DEFAULT_POLICY
    return _known("--policy", name, POLICIES)


def choose_filter(name: str | None) -> str:
    """The admission filter that the ratios are about. Raises ConfigError for an unknown one."""
    return DEFAULT_FILTER if name is None else _known("--admission", name, FILTERS)


def _known(flag: str, name: str, table: Mapping[str, object]) -> str:
    if name not in table:
        near = did_you_mean(name, table) or f"; there are: {', '.join(table)}"
        raise ConfigError(f"{flag} takes a name, and there is no {shown(name)}{near}")
    return name
