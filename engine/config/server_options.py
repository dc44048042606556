# SPDX-License-Identifier: Apache-2.0
"""The settings of the HTTP server; each field of `ServerConfig` is an option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.option import Option, options_of, read_fields, setting
from ...tiers.settings.values import ConfigError
from ..logs import LOG_LEVELS
from .option_readers import (
    ANY,
    MAX_PORT,
    generation_config,
    http_header,
    http_methods,
    http_tokens,
    media_domains,
    origins,
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The settings of `stratakv serve`: address, access control, requests and logging."""

    host: str = setting("127.0.0.1", readers.text, "address to listen on", "ADDRESS")
    port: int = setting(8000, readers.integer_within(0, MAX_PORT), "port; 0 takes a free one", "N")
    api_key: str | None = setting(
        None, readers.api_key, "ask clients for this key", "KEY", is_secret=True
    )
    generation_config: str = setting(
        "auto", generation_config,
        "auto: what the model's generation_config.json recommends is the default of requests",
        "WORD",
    )  # fmt: skip
    tool_call_parser: str = setting(
        "", readers.text,
        "the form in which the model calls tools: hermes, llama3_json, mistral, pythonic, one of "
        "another package, or none", "NAME", "found in the chat template",
    )  # fmt: skip
    chat_template: Path | None = setting(
        None, readers.path, "a Jinja file in place of the model's chat template", "FILE",
        "the model's",
    )  # fmt: skip
    enable_dev_routes: bool = setting(
        False, readers.switch, "routes for tests, such as cache resets"
    )
    log_level: str = setting("info", readers.one_of(*LOG_LEVELS), ", ".join(LOG_LEVELS), "LEVEL")
    log_json: bool = setting(False, readers.switch, "one JSON object for each log line")
    log_stats: bool = setting(
        True, readers.switch, "a line with figures every 10 s while there is work"
    )
    metrics_without_key: bool = setting(False, readers.switch, "/metrics asks for no --api-key")
    allowed_origins: tuple[str, ...] = setting(
        (), origins,
        "pages of these origins may use the server from a browser: *, or https://example.org,…",
        "LIST",
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = setting(
        (ANY,), http_methods, "the methods that they may use", "LIST"
    )
    allowed_headers: tuple[str, ...] = setting(
        (ANY,), http_tokens, "the headers that they may send", "LIST"
    )
    allow_credentials: bool = setting(
        False, readers.switch,
        "let them use cookies and what else a browser keeps for this server",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = setting(
        (), readers.hosts,
        "what requests may call this server beside addresses and localhost: *, or names",
        "LIST", "none on loopback without a key, else any",
    )  # fmt: skip
    media_domain: tuple[str, ...] = setting(
        (), media_domains,
        "hosts from which pictures are fetched over https, with :port unless it is 443", "LIST",
        "none: pictures come as data: URLs",
    )  # fmt: skip
    tenant_header: str | None = setting(
        None, http_header,
        "requests name their tenant in this header; only a router may then reach the server",
        "NAME",
    )  # fmt: skip
    ssl_keyfile: Path | None = setting(
        None, readers.path, "the key of the server's certificate, as PEM", "FILE",
        "in the certificate's file",
    )  # fmt: skip
    ssl_certfile: Path | None = setting(
        None, readers.path,
        "the server's certificate with those that lead to its authority, as PEM: speak https",
        "FILE",
    )  # fmt: skip
    ssl_ca_certs: Path | None = setting(
        None, readers.path, "who signs the certificates of clients, as PEM", "FILE"
    )
    ssl_cert_reqs: int = setting(
        0, readers.integer_within(0, 2),
        "certificates of clients: 0 asks for none, 1 takes them, 2 refuses clients without", "N",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise ConfigError for a combination of options that has no effect or an unsafe effect."""
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


SERVER_OPTIONS: Mapping[str, Option] = options_of(ServerConfig, "server")


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    return ServerConfig(**read_fields(SERVER_OPTIONS, given))
