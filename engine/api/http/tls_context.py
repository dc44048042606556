# SPDX-License-Identifier: Apache-2.0
"""Makes the server's TLS context from files of certificates and keys."""

from __future__ import annotations

import ssl
from pathlib import Path

from ....tiers.settings.values import ConfigError
from ...config.server_options import ServerConfig


class _Encrypted(Exception):
    """The private key needs a password."""


def make_tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the server's sockets (TLS 1.2 or later), or None for plain HTTP.
    The context is made before the model is loaded, so that a bad file is reported early. Raises
    ConfigError, with the flag and the file, for files that cannot be used."""
    certificate, key = server.ssl_certfile, server.ssl_keyfile
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _read_certificates("--ssl-certfile", certificate, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    if key is not None:
        _check_readable("--ssl-keyfile", key)
    flag, place = ("--ssl-certfile", certificate) if key is None else ("--ssl-keyfile", key)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except _Encrypted:
        raise ConfigError(
            f"{flag} {place} holds a key that is encrypted, and a server cannot ask for the "
            "password; give it without (`openssl pkey -in FILE -out NEW`), readable by this user "
            "only"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--ssl-keyfile {place} is not the key of the certificate in --ssl-certfile "
                f"{certificate}; give the two that were made together"
            ) from error
        cure = "; name the key's file with --ssl-keyfile" if key is None else ""
        raise ConfigError(f"{flag} {place} holds no private key as PEM{cure}") from error
    if server.ssl_ca_certs is not None:
        _read_certificates("--ssl-ca-certs", server.ssl_ca_certs, context)
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    return context


def _read_certificates(flag: str, path: Path, context: ssl.SSLContext) -> None:
    """Make `context` trust a file's certificates. Raises ConfigError if the file has none."""
    _check_readable(flag, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag} {path} holds no certificate as PEM; give one") from error


def _check_readable(flag: str, path: Path) -> None:
    # A named pipe is refused, because opening a pipe would wait for a writer.
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag} {path} is no ordinary file; give one in PEM form")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read ({error.strerror})") from error


def _refuse_password() -> str:
    raise _Encrypted
