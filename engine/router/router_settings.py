# SPDX-License-Identifier: Apache-2.0
"""The settings of the router: its nodes, limits and time-outs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import Option, options_of, setting
from ...tiers.settings.values import MIB, ConfigError
from ..logs import LOG_LEVELS

_DEFAULT_PORTS = {"http": 80, "https": 443}
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Headers that the router sets itself, or that belong to one connection.
_OWN_HEADERS = ("connection", "content-length", "expect", "host", "te", "trailer",
                "transfer-encoding", "upgrade")  # fmt: skip
_MOST_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class NodeAddress:
    host: str
    port: int
    is_tls: bool = False

    @property
    def authority(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a URL, which is the node's name in logs and on `/nodes`."""
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"


def read_node(called: str, value: Any) -> NodeAddress:
    """Return the address in a URL. Raises ConfigError for a URL unlike `http(s)://host:port`."""
    text = readers.text(called, value)
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        url, port = urlsplit(""), None
    is_plain = not (url.path.strip("/") or url.query or url.fragment or "@" in url.netloc)
    is_url = url.scheme in _DEFAULT_PORTS and url.hostname and port != 0 and is_plain
    if not is_url or not url.hostname or not text.isascii() or any(c.isspace() for c in text):
        bare = text.partition("//")[2].count(":") > 1 and "[" not in text
        raise ConfigError(
            f"{called} takes the URL of a node, such as http://10.0.0.5:8000 (no path, no user), "
            f"not {format_value(value)}"
            f"{'; an IPv6 address stands in brackets, as in http://[::1]:8000' * bare}"
        )
    return NodeAddress(url.hostname, port or _DEFAULT_PORTS[url.scheme], url.scheme == "https")


def _seconds(called: str, value: Any) -> float:
    seconds: float = readers.number(called, value)
    if not 0.01 <= seconds <= _MOST_SECONDS:
        raise ConfigError(f"{called} takes seconds from 0.01 to {_MOST_SECONDS:g}, not {seconds:g}")
    return seconds


def _header(called: str, value: Any) -> str:
    name = readers.text(called, value).lower()
    if not _HEADER.fullmatch(name) or name in _OWN_HEADERS:
        raise ConfigError(
            f"{called} takes the name of a header such as X-Tenant, not {format_value(value)}"
        )
    return name


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The settings of `stratakv route`. Raises ConfigError for settings that cannot work."""

    decode: tuple[NodeAddress, ...] = ()
    prefill: tuple[NodeAddress, ...] = ()
    host: str = setting("127.0.0.1", readers.text, "address to listen on", "ADDRESS")
    port: int = setting(8100, readers.integer_within(0, 65535), "port; 0 takes a free one", "N")
    disaggregate_above: int = setting(
        512, readers.integer_within(0, 1_000_000_000),
        "prompts of more tokens are computed by a prefill node first", "N",
    )  # fmt: skip
    kv_transfer_params: str = setting(
        "on", readers.one_of("off", "on"),
        "on: nodes know the field kv_transfer_params; off: the shared cache alone carries blocks",
        "on|off",
    )  # fmt: skip
    tenant_header: str | None = setting(
        None, _header, "one more header of clients that nodes get", "NAME"
    )
    allowed_hosts: tuple[str, ...] | None = setting(
        None, readers.hosts, "what requests may call this router beside addresses and localhost",
        "LIST", "none on loopback, else any",
    )  # fmt: skip
    admin_key_file: Path | None = setting(
        None, readers.path, "file with the key that /nodes asks for", "FILE"
    )
    node_ca_file: Path | None = setting(
        None, readers.path, "PEM file of who signed the certificates of https nodes", "FILE",
        "the system's authorities",
    )  # fmt: skip
    max_waiting: int = setting(
        1024, readers.integer_within(1, 1_000_000), "client requests at once", "N"
    )
    max_body_bytes: int = setting(16 * MIB, readers.size, "longest request body", "SIZE")
    retries: int = setting(
        2, readers.integer_within(0, 100), "other nodes that a request is tried on", "N"
    )
    connect_seconds: float = setting(2.0, _seconds, "for connecting to a node", "SECONDS")
    prefill_seconds: float = setting(120.0, _seconds, "for the whole prefill leg", "SECONDS")
    answer_seconds: float = setting(
        600.0, _seconds, "for the next bytes of a node's answer", "SECONDS"
    )
    request_seconds: float = setting(3600.0, _seconds, "for a whole request", "SECONDS")
    body_seconds: float = setting(60.0, _seconds, "for a client to send its body", "SECONDS")
    health_seconds: float = setting(
        2.0, _seconds, "between two looks at a node's health, and for its answer", "SECONDS"
    )
    drain_seconds: float = setting(
        30.0, _seconds, "for running requests when the router ends", "SECONDS"
    )
    log_level: str = setting("info", readers.one_of(*LOG_LEVELS), ", ".join(LOG_LEVELS), "LEVEL")
    log_json: bool = setting(False, readers.switch, "one JSON object for each log line")

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError(
                "there is no decode node, so no request could be answered; give one or more with "
                "--decode http://host:port"
            )
        seen: set[NodeAddress] = set()
        for flag, addresses in (("--prefill", self.prefill), ("--decode", self.decode)):
            for address in addresses:
                if address in seen:
                    raise ConfigError(
                        f"{flag} {address.url} was given before; a node has one role, so name "
                        "each node once"
                    )
                if (address.host, address.port) == (self.host, self.port):
                    raise ConfigError(
                        f"{flag} {address.url} is this router's own address; name the node's, or "
                        "take another --port"
                    )
                seen.add(address)
        for name in ("max_waiting", "max_body_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")


# The options of all flags except the repeatable flags --prefill and --decode.
ROUTER_OPTIONS: Mapping[str, Option] = options_of(RouterConfig, "router")
