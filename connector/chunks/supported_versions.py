# SPDX-License-Identifier: Apache-2.0
"""The versions of a host that an adapter supports."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError

Version = tuple[int, int, int]
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Supported:
    """The supported versions of `host`, from `oldest` up to but not including `before`. `text`,
    unless empty, replaces the range in messages."""

    host: str
    package: str
    oldest: Version
    before: Version
    text: str = ""

    def installed(self) -> Version:
        """Return the installed package's version. Raises ConfigError for an unsupported one."""
        return self.require_version(importlib.metadata.version(self.package))

    def require_version(self, text: str) -> Version:
        """Return the package's version in `text`. Raises ConfigError for an unsupported one."""
        match = _VERSION.match(text)
        version = (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)
        if not self.oldest <= version < self.before:
            first, last = (".".join(map(str, each)) for each in (self.oldest, self.before))
            raise ConfigError(
                f"StrataKV's tiers for {self.host} were made for its versions "
                f"{self.text or f'{first} and later, below {last}'}, not {format_value(text)}; "
                f"install '{self.package}>={first},<{last}', or a StrataKV that knows this version"
            )
        return version
