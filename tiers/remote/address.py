# SPDX-License-Identifier: Apache-2.0
"""The address of a cache server, `grpc://host:port` or with TLS `grpcs://host:port`.

Knows nothing of credentials: those are files, named by settings and never by an address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import TierConfigError

DEFAULT_PORT = 9400
SCHEMES = ("grpc", "grpcs")
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z]+)://(?P<host>\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~-]+)?\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?/?"
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens."""

    host: str  # without brackets
    port: int
    tls: bool = False

    @property
    def target(self) -> str:
        """Host and port, as grpc takes them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{SCHEMES[self.tls]}://{self.target}"


def is_address(text: str) -> bool:
    """Whether this is meant to be the address of a cache server."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def parse_address(text: str) -> ServerAddress:
    """Raises TierConfigError for anything but an address."""
    match = _ADDRESS.fullmatch(text.strip())
    port = int((match and match["port"]) or DEFAULT_PORT)
    if match is None or match["scheme"] not in SCHEMES or not 0 < port < 65536:
        raise TierConfigError(
            f"a cache server's address looks like grpc://host:{DEFAULT_PORT} or "
            f"grpcs://host:{DEFAULT_PORT}, not {text[:200]!r}{_in_brackets(text)}"
        )
    return ServerAddress(match["host"].strip("[]"), port, match["scheme"] == "grpcs")


def _in_brackets(text: str) -> str:
    """What to add where an IPv6 address stands bare."""
    scheme, _, rest = text.strip().partition("://")
    host, _, port = rest.rpartition(":")
    if "[" in rest or host.count(":") < 2 or not port.isdecimal():
        return ""
    return f"; an IPv6 address stands in brackets: {scheme}://[{host[:100]}]:{port[:5]}"
