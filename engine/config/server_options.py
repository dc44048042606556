# SPDX-License-Identifier: Apache-2.0
"""The server's options by name, and the value object they become.

As `engine_options.py` is for the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import Option, flag_of
from ...tiers.settings.values import ConfigError
from ..logs import LOG_LEVELS

MAX_PORT = 65535
ANY = "*"  # any origin, method or header
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # what a method and a header may be
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How `stratakv serve` listens, whom it answers, and what it logs."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)  # None: no key is asked for
    generation_config: str = "auto"  # "none": the model's recommendations do not count
    tool_call_parser: str = ""  # empty: the one whose form the chat template shows
    chat_template: Path | None = None  # None: the model's own
    enable_dev_routes: bool = False
    log_level: str = "info"
    log_json: bool = False
    log_stats: bool = True
    metrics_without_key: bool = False
    # Pages of other origins that may use the server from a browser, and what they may send.
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = (ANY,)
    allowed_headers: tuple[str, ...] = (ANY,)
    allow_credentials: bool = False
    allowed_hosts: tuple[str, ...] = ()  # empty: on loopback without a key its own names
    tenant_header: str | None = None  # in small letters; None: all clients are one tenant
    ssl_certfile: Path | None = None  # None: plain HTTP
    ssl_keyfile: Path | None = None  # None: the key lies in the certificate's file
    ssl_ca_certs: Path | None = None
    ssl_cert_reqs: int = 0  # as `ssl` has it: 0 asks no client for a certificate, 2 every one

    def __post_init__(self) -> None:
        """Raises ConfigError for options that mean nothing, or something unwanted, together."""
        self._check_origins()
        self._check_tls()

    def _check_origins(self) -> None:
        for flag, is_given in (
            ("--allowed-methods", self.allowed_methods != (ANY,)),
            ("--allowed-headers", self.allowed_headers != (ANY,)),
            ("--allow-credentials", self.allow_credentials),
        ):
            if is_given and not self.allowed_origins:
                raise ConfigError(
                    f"{flag} is about pages of the origins in --allowed-origins, which is not "
                    f"given; add it or drop {flag}"
                )
        if self.allow_credentials and ANY in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials would let any page use what a browser keeps for this server, "
                "since --allowed-origins is *; name the origins"
            )

    def _check_tls(self) -> None:
        for flag, is_given in (
            ("--ssl-keyfile", self.ssl_keyfile is not None),
            ("--ssl-ca-certs", self.ssl_ca_certs is not None),
            ("--ssl-cert-reqs", self.ssl_cert_reqs != 0),
        ):
            if is_given and self.ssl_certfile is None:
                raise ConfigError(
                    f"{flag} is given and --ssl-certfile is not, so there would be no TLS; add the "
                    f"server's certificate or drop {flag}"
                )
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} asks clients for certificates, and nothing "
                "says who may have signed them; add --ssl-ca-certs"
            )
        if self.ssl_ca_certs is not None and not self.ssl_cert_reqs:
            raise ConfigError(
                "--ssl-ca-certs says who signs the certificates of clients, and --ssl-cert-reqs 0 "
                "asks for none; give --ssl-cert-reqs 2 or drop --ssl-ca-certs"
            )


def _generation_config(called: str, value: Any) -> str:
    """`vllm`, which is vLLM's word for its own defaults, is none too."""
    return readers.one_of("auto", "none")(called, "none" if value == "vllm" else value)


def _origins(called: str, value: Any) -> tuple[str, ...]:
    """Origins as browsers send them: without a path, which would match none."""
    origins = readers.texts(called, value)
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{called} takes * or origins such as https://example.org or http://localhost:3000 "
                f"(no path, no slash at the end), not {format_value(origin)}"
            )
    return origins


def _tokens(called: str, value: Any) -> tuple[str, ...]:
    """Methods or headers."""
    tokens = readers.texts(called, value)
    for token in tokens:
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"{called} takes * or names with commas between, not {format_value(token)}"
            )
    return tokens


def _header(called: str, value: Any) -> str:
    name = readers.text(called, value).lower()
    if not _TOKEN.fullmatch(name):
        raise ConfigError(
            f"{called} takes the name of a header such as X-Tenant, not {format_value(value)}"
        )
    return name


def _methods(called: str, value: Any) -> tuple[str, ...]:
    return tuple(method.upper() for method in _tokens(called, value))


SERVER_OPTIONS: Mapping[str, Option] = {
    "host": Option("server", "host", readers.text, "address to listen on", "ADDRESS"),
    "port": Option(
        "server", "port", readers.integer_within(0, MAX_PORT), "port; 0 takes a free one", "N"
    ),
    "api_key": Option(
        "server", "api_key", readers.api_key, "ask clients for this key", "KEY", is_secret=True
    ),
    "generation_config": Option(
        "server", "generation_config", _generation_config,
        "auto: what the model's generation_config.json recommends is the default of requests",
        "WORD",
    ),
    "tool_call_parser": Option(
        "server", "tool_call_parser", readers.text,
        "the form in which the model calls tools: hermes, llama3_json, mistral, pythonic, one of "
        "another package, or none",
        "NAME", "found in the chat template",
    ),
    "chat_template": Option(
        "server", "chat_template", readers.path,
        "a Jinja file in place of the model's chat template", "FILE", "the model's",
    ),
    "enable_dev_routes": Option(
        "server", "enable_dev_routes", readers.switch, "routes for tests, such as cache resets"
    ),
    "log_level": Option(
        "server", "log_level", readers.one_of(*LOG_LEVELS), ", ".join(LOG_LEVELS), "LEVEL"
    ),
    "log_json": Option("server", "log_json", readers.switch, "one JSON object for each log line"),
    "log_stats": Option(
        "server", "log_stats", readers.switch, "a line with figures every 10 s while there is work"
    ),
    "metrics_without_key": Option(
        "server", "metrics_without_key", readers.switch, "/metrics asks for no --api-key"
    ),
    "allowed_origins": Option(
        "server", "allowed_origins", _origins,
        "pages of these origins may use the server from a browser: *, or https://example.org,…",
        "LIST",
    ),
    "allowed_methods": Option(
        "server", "allowed_methods", _methods, "the methods that they may use", "LIST"
    ),
    "allowed_headers": Option(
        "server", "allowed_headers", _tokens, "the headers that they may send", "LIST"
    ),
    "allow_credentials": Option(
        "server", "allow_credentials", readers.switch,
        "let them use cookies and what else a browser keeps for this server",
    ),
    "allowed_hosts": Option(
        "server", "allowed_hosts", readers.hosts,
        "what requests may call this server beside addresses and localhost: *, or names",
        "LIST", "none on loopback without a key, else any",
    ),
    "tenant_header": Option(
        "server", "tenant_header", _header,
        "requests name their tenant in this header; only a router may then reach the server",
        "NAME",
    ),
    "ssl_keyfile": Option(
        "server", "ssl_keyfile", readers.path, "the key of the server's certificate, as PEM",
        "FILE", "in the certificate's file",
    ),
    "ssl_certfile": Option(
        "server", "ssl_certfile", readers.path,
        "the server's certificate with those that lead to its authority, as PEM: speak https",
        "FILE",
    ),
    "ssl_ca_certs": Option(
        "server", "ssl_ca_certs", readers.path, "who signs the certificates of clients, as PEM",
        "FILE",
    ),
    "ssl_cert_reqs": Option(
        "server", "ssl_cert_reqs", readers.integer_within(0, 2),
        "certificates of clients: 0 asks for none, 1 takes them, 2 refuses clients without", "N",
    ),
}  # fmt: skip


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    """The server's settings from the options given; those of the engine are left alone."""
    fields = {
        option.field: option.read(flag_of(name), given[name])
        for name, option in SERVER_OPTIONS.items()
        if name in given
    }
    return ServerConfig(**fields)
