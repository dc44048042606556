# SPDX-License-Identifier: Apache-2.0
"""Checks of the address on which a server listens: exposure without credentials, ports in use."""

from __future__ import annotations

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from ..errors import TierConfigError

LARGEST_PORT = 65535
_OWN = "localhost"
_NO_HOST = frozenset(b"@/?#\\")  # characters that separate other parts of a URL


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host.lower() == _OWN:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to any address


def host_in(header: bytes) -> str:
    """Return the name in the HTTP header Host, in lower case, without the port; "" if invalid."""
    if not _NO_HOST.isdisjoint(header):
        return ""
    try:
        return (urlsplit(f"//{header.decode('latin-1')}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_no_foreign_name(host: str) -> bool:
    """Whether `host` is an IP address, localhost or a name below localhost. An attacker cannot use
    an IP address or localhost for DNS rebinding."""
    if host == _OWN or host.endswith(f".{_OWN}"):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def check_exposure(host: str, *, has_tls: bool, has_credentials: bool, insecure: bool) -> None:
    """Raise TierConfigError if other machines can reach `host` without TLS and credentials."""
    if insecure or is_loopback(host) or (has_tls and has_credentials):
        return
    missing = [
        what
        for what, there in (
            ("TLS (--tls-cert, --tls-key)", has_tls),
            ("credentials (--tenants, --token-file or --tls-client-ca)", has_credentials),
        )
        if not there
    ]
    raise TierConfigError(
        f"other machines can reach {host} and there is no {' and no '.join(missing)}; give them, "
        "listen on 127.0.0.1, or say --insecure"
    )


def check_metrics_exposure(host: str, *, exposed: bool) -> None:
    """Raise TierConfigError if other machines can reach /metrics on `host`, unless `exposed`."""
    if not (exposed or is_loopback(host)):
        raise TierConfigError(
            f"other machines can reach {host}, and /metrics, which shows the tenants' names and "
            "loads, has neither TLS nor credentials; use --metrics-host 127.0.0.1, or say "
            "--metrics-exposed"
        )


def host_port(host: str, port: int) -> str:
    """Return the text `host:port` that grpc expects, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int, flag: str) -> None:
    """Check a listen address. Raises TierConfigError if no server can listen there now."""
    if not 0 <= port <= LARGEST_PORT:
        raise TierConfigError(f"{flag} takes a port from 0 to {LARGEST_PORT}, not {port}")
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise TierConfigError(
            f"{host or repr(host)} is no address of this machine ({error}); use 127.0.0.1 or the "
            "address of an interface"
        ) from error
    with socket.socket(info[0], info[1], info[2]) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(info[4])
        except OSError as error:
            raise TierConfigError(explain_bind(error, host, port, flag)) from error


def explain_bind(error: OSError, host: str, port: int, flag: str) -> str:
    """Explain in one sentence why the port cannot be opened, and the remedy."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; end what uses it or take another with {flag}"
    if error.errno == errno.EACCES:
        return f"port {port} may not be opened by this user; take one from 1024 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; use 127.0.0.1 or that of an interface"
    return f"{host_port(host, port)} cannot be opened ({error.strerror}); take another with {flag}"
