# SPDX-License-Identifier: Apache-2.0
"""Which policy and which admission filter the ratios are about: those named, or the product's own.

The tables themselves belong to the tiers; what is added there is compared at once. One that another
package brings is compared where it is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...tiers.admission import DEFAULT_FILTER, known_filters
from ...tiers.errors import TierConfigError
from ...tiers.policies.choice import DEFAULT_POLICY, known_policies, policy_factory
from ...tiers.settings.format import format_value
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError

ADMIT_ALL = "all"


def choose_policy(name: str | None) -> str:
    """The policy that the ratios are about: a name, or the `module:attribute` that makes it. Raises
    ConfigError for an unknown one, and for one that cannot be loaded or breaks the contract."""
    if name is None:
        return DEFAULT_POLICY
    if ":" not in name:
        _known("--policy", name, known_policies())
    try:
        policy_factory(name)
    except TierConfigError as error:
        raise ConfigError(f"--policy {format_value(name)}: {error}") from error
    return name


def choose_filter(name: str | None) -> str:
    """The admission filter that the ratios are about. Raises ConfigError for an unknown one."""
    return DEFAULT_FILTER if name is None else _known("--admission", name, known_filters())


def _known(flag: str, name: str, table: Sequence[str]) -> str:
    if name not in table:
        near = did_you_mean(name, table) or f"; there are: {', '.join(table)}"
        raise ConfigError(f"{flag} takes a name, and there is no {format_value(name)}{near}")
    return name
