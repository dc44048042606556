# SPDX-License-Identifier: Apache-2.0
"""Which versions of a host an adapter was made for."""

from __future__ import annotations

import importlib.metadata
import re

from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError

Version = tuple[int, int, int]
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def host_version(package: str, called: str, oldest: Version, before: Version) -> Version:
    """The version of an installed package. Raises ConfigError for one that is not supported."""
    return check_version(importlib.metadata.version(package), package, called, oldest, before)


def check_version(
    text: str, package: str, called: str, oldest: Version, before: Version
) -> Version:
    """The same, of what the package says of itself."""
    match = _VERSION.match(text)
    version = (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)
    if not oldest <= version < before:
        first, last = (".".join(map(str, each)) for each in (oldest, before))
        raise ConfigError(
            f"StrataKV's tiers for {called} were made for its versions {first} and later, below "
            f"{last}, not {format_value(text)}; install '{package}>={first},<{last}', or a "
            "StrataKV that knows this version"
        )
    return version
