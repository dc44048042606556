# SPDX-License-Identifier: Apache-2.0
"""Membership: the list of cache servers, and the server that owns each block. Rendezvous hashing
chooses the owner: every server gets a score for a key, and the server with the highest score owns
the block. When a server is added or removed, only the blocks of this server change their owner. A
membership service could implement `Membership` in place of the fixed list."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import TierConfigError

_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15  # an odd factor, which spreads a product over the upper bits

DEFAULT_PORT = 9400
SCHEMES = ("grpc", "grpcs")
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z]+)://(?P<host>\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~-]+)?\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?/?"
)


class Membership(Protocol):
    """The current servers. `version` changes whenever the servers change."""

    version: int

    def members(self) -> Sequence[ServerAddress]:
        """Return the servers, at least one, in any order and without duplicates."""


class StaticMembership:
    """A fixed list of servers, which the operator configured."""

    version = 0

    def __init__(self, addresses: Sequence[ServerAddress]) -> None:
        self._addresses = tuple(dict.fromkeys(addresses))
        if not self._addresses:
            raise ValueError("a membership has at least one server")

    def members(self) -> Sequence[ServerAddress]:
        return self._addresses


class Rendezvous:
    """The owner of each key among `members`. Clients with the same servers find the same owner."""

    def __init__(self, members: Sequence[ServerAddress]) -> None:
        self._seeds = [
            int.from_bytes(hashlib.sha256(str(member).encode()).digest()[:8], "little")
            for member in members
        ]

    def owners(self, keys: Sequence[bytes]) -> list[int]:
        """Return each key's owner, as an index in `members`, from the key's first 8 bytes."""
        seeds = self._seeds
        if len(seeds) == 1:
            return [0] * len(keys)
        owners = []
        for key in keys:
            number = int.from_bytes(key[:8], "little")
            scores = [((number ^ seed) * _ODD) & _MASK for seed in seeds]
            owners.append(scores.index(max(scores)))
        return owners


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's address. Its `str` is `grpc://host:port`, or `grpcs://host:port` with TLS."""

    host: str  # an IPv6 address has no brackets here
    port: int
    tls: bool = False

    @property
    def target(self) -> str:
        """The text `host:port` that grpc expects, with brackets around an IPv6 address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{SCHEMES[self.tls]}://{self.target}"


def is_address(text: str) -> bool:
    return text.partition("://")[0] in SCHEMES and "://" in text


def parse_address(text: str) -> ServerAddress:
    """Parse `grpc[s]://host[:port]`. Raises TierConfigError for any other text."""
    match = _ADDRESS.fullmatch(text.strip())
    port = int((match and match["port"]) or DEFAULT_PORT)
    if match is None or match["scheme"] not in SCHEMES or not 0 < port < 65536:
        raise TierConfigError(
            f"a cache server's address looks like grpc://host:{DEFAULT_PORT} or "
            f"grpcs://host:{DEFAULT_PORT}, not {text[:200]!r}{_in_brackets(text)}"
        )
    return ServerAddress(match["host"].strip("[]"), port, match["scheme"] == "grpcs")


def _in_brackets(text: str) -> str:
    """Return the hint for an IPv6 address without brackets; empty for other texts."""
    scheme, _, rest = text.strip().partition("://")
    host, _, port = rest.rpartition(":")
    if "[" in rest or host.count(":") < 2 or not port.isdecimal():
        return ""
    return f"; an IPv6 address stands in brackets: {scheme}://[{host[:100]}]:{port[:5]}"
