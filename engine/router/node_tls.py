# SPDX-License-Identifier: Apache-2.0
"""TLS for connections to https nodes, with certificate authorities from a file that may change.

Every request has its own connection. The router checks the file of authorities before each
connection, so a changed file needs no restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from ...tiers.identity.file_state import state_of
from ...tiers.settings.values import ConfigError
from .router_settings import RouterConfig

logger = logging.getLogger(__name__)


class NodeTls:
    """The TLS context for https nodes, for one event loop. Raises ConfigError for a bad file."""

    def __init__(self, ca_file: Path | None) -> None:
        self._ca_file = ca_file
        self._seen = None if ca_file is None else state_of(ca_file)
        self._context = _read(ca_file)

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for the next connection. If a changed file cannot be used, the
        previous context stays, and the error is logged once."""
        seen = None if self._ca_file is None else state_of(self._ca_file)
        if seen != self._seen:
            self._seen = seen
            try:
                self._context = _read(self._ca_file)
            except ConfigError as error:
                logger.error("%s; those that were read before stay", error)
            else:
                logger.info("--node-ca-file %s was read anew", self._ca_file)
        return self._context


def make_node_tls(config: RouterConfig) -> NodeTls | None:
    """Return a `NodeTls`; None if no node is https. Raises ConfigError for an unusable file."""
    path = config.node_ca_file
    if not any(address.is_tls for address in (*config.prefill, *config.decode)):
        if path is not None:
            raise ConfigError(
                f"--node-ca-file {path} is for https nodes and all are http; drop it, or write "
                "https://"
            )
        return None
    return NodeTls(path)


def _read(path: Path | None) -> ssl.SSLContext:
    if path is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--node-ca-file {path} holds no certificates as PEM ({error}); give one that does"
        ) from error
