# SPDX-License-Identifier: Apache-2.0
"""Authenticator: finds the tenant of a call by its credentials. Handlers call `current_tenant`.

Credentials are a token in `authorization: Bearer ...` or a client certificate that TLS has verified
(TLS refuses expired certificates). A call's token and certificate must belong to one tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from ...wire.status import Unauthenticated
from .tenants import Tenant, Tenants

_HEADER = "authorization"
_SCHEME = "bearer"
_CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")

_CALLER: ContextVar[Caller] = ContextVar("caller")


class Caller(NamedTuple):
    """The tenant of a call, with the digest of its token or the names in its certificate."""

    tenant: Tenant
    token_digest: bytes = b""
    certificate_names: tuple[str, ...] = ()

    def is_known_to(self, tenants: Tenants) -> bool:
        """Whether these credentials belong to the same tenant in `tenants`, after a reload."""
        if self.token_digest:
            found = tenants.by_digest(self.token_digest)
        elif self.certificate_names:
            found = tenants.by_certificate(self.certificate_names)
        else:
            found = tenants.anyone
        return found is not None and found.name == self.tenant.name


def set_caller(caller: Caller) -> None:
    _CALLER.set(caller)


def current_caller() -> Caller:
    return _CALLER.get()


def current_tenant() -> Tenant:
    return _CALLER.get().tenant


class Authenticator:
    """Finds the tenant of a call."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def set_tenants(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def caller_of(
        self,
        metadata: Iterable[tuple[str, str | bytes]],
        peer: Mapping[str, Sequence[bytes]],
    ) -> Caller:
        """Return the caller. `metadata` is the call's metadata, `peer` is grpc's `auth_context`.
        Raises Unauthenticated if the credentials are unknown or belong to two tenants."""
        tenants = self._tenants
        if tenants.anyone is not None:
            return Caller(tenants.anyone)
        headers = [value for key, value in metadata if key.lower() == _HEADER]
        token = _token(headers) if headers else b""
        by_token = tenants.by_token(token) if headers else None
        names = _names(peer)
        by_certificate = tenants.by_certificate(names) if names else None
        tenant = by_token or by_certificate
        if tenant is None or (headers and by_token is None):
            raise Unauthenticated("the call has no credentials that this server knows")
        if by_certificate is not None and by_certificate is not tenant:
            raise Unauthenticated("the call's token and its certificate are those of two tenants")
        if by_token is not None:
            return Caller(tenant, token_digest=hashlib.sha256(token).digest())
        return Caller(tenant, certificate_names=tuple(names))


def _token(headers: Sequence[str | bytes]) -> bytes:
    """Return the bearer token of the only header; "" without one. No tenant has the empty token."""
    header = headers[0]
    raw = header if isinstance(header, bytes) else header.encode("utf-8", "surrogateescape")
    scheme, _, token = raw.partition(b" ")
    is_bearer = scheme.lower() == _SCHEME.encode()
    return token.strip() if len(headers) == 1 and is_bearer else b""


def _names(peer: Mapping[str, Sequence[bytes]]) -> list[str]:
    return [
        name.decode("utf-8", "replace")
        for kind in _CERTIFICATE_NAMES
        for name in peer.get(kind, ())
    ]
