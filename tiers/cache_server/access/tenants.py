# SPDX-License-Identifier: Apache-2.0
"""The tenants of the cache server, with their credentials and quotas.

    [[tenant]]
    name = "search"
    token_sha256 = "9f86d081..."            # or a list, while tokens are being changed
    certificate_names = ["search.example"]  # common or alternative names of client certificates
    cpu_bytes = "64GiB"
    ssd_bytes = "1TiB"
    pool = "everyone"                       # tenants that name one pool share their blocks in it

Without a file there is one tenant with the whole quota. The file has the hash of a token and not
the token; the hash cannot be used as a token. `auth.py` checks the credentials of calls."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import TierConfigError

DEFAULT_TENANT = "default"
MAX_TENANTS = 1024
_MAX_FILE_CHARACTERS = 4 * 1024**2
_MIN_TOKEN_CHARACTERS = 16  # shorter tokens could be guessed
_MAX_TOKEN_CHARACTERS = 4096
_TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = ("name", "token_sha256", "certificate_names", "cpu_bytes", "ssd_bytes", "pool")

# A function (name for messages, value) that reads a size such as 64 or "64GiB", and raises for any
# other value.
SizeReader = Callable[[str, Any], int]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. Tenants with the same `pool` share a tenant store; each other tenant has one."""

    name: str
    cpu_bytes: int
    ssd_bytes: int = 0
    pool: str = ""
    token_digests: tuple[bytes, ...] = ()
    certificate_names: tuple[str, ...] = ()
    # True for the only tenant of a server without a tenants file.
    takes_any_certificate: bool = False
    takes_anyone: bool = False

    @property
    def tenant_store(self) -> str:
        """The store's name. A pool and a tenant of the same name have different stores."""
        return f"pool:{self.pool}" if self.pool else f"tenant:{self.name}"


@dataclass(frozen=True, slots=True)
class Quota:
    """The sizes of a tenant store: the sums of the sizes of its tenants."""

    cpu_bytes: int
    ssd_bytes: int


class Tenants:
    """A server's tenants. Raises TierConfigError if two tenants share a name or a credential."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        if not 1 <= len(tenants) <= MAX_TENANTS:
            raise TierConfigError(f"a server has 1 to {MAX_TENANTS} tenants, not {len(tenants)}")
        self._all = tuple(tenants)
        self._by_name = _unique(((each.name, each) for each in tenants), "name")
        self._by_token = _unique(
            ((digest, each) for each in tenants for digest in each.token_digests), "token"
        )
        self._by_certificate = _unique(
            ((name.lower(), each) for each in tenants for name in each.certificate_names),
            "certificate name",
        )
        self._any_certificate = next((each for each in tenants if each.takes_any_certificate), None)
        self.anyone = next((each for each in tenants if each.takes_anyone), None)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def quotas(self) -> Mapping[str, Quota]:
        """The quotas of all tenant stores, by name."""
        result: dict[str, Quota] = {}
        for tenant in self._all:
            had = result.get(tenant.tenant_store, Quota(0, 0))
            result[tenant.tenant_store] = Quota(
                had.cpu_bytes + tenant.cpu_bytes, had.ssd_bytes + tenant.ssd_bytes
            )
        return result

    def with_fewer_credentials(self, after: Tenants) -> set[str]:
        """Return the names of tenants without an entry or with fewer credentials in `after`."""
        found = set()
        for tenant in self._all:
            later = after.by_name(tenant.name)
            if (
                later is None
                or set(tenant.token_digests) - set(later.token_digests)
                or set(tenant.certificate_names) - set(later.certificate_names)
                or tenant.takes_anyone > later.takes_anyone
                or tenant.takes_any_certificate > later.takes_any_certificate
            ):
                found.add(tenant.name)
        return found

    def by_name(self, name: str) -> Tenant | None:
        return self._by_name.get(name)

    def by_token(self, token: bytes) -> Tenant | None:
        """Return a token's tenant, or None. Comparing hashes reveals nothing about other tokens."""
        return self.by_digest(hashlib.sha256(token).digest()) if token else None

    def by_digest(self, digest: bytes) -> Tenant | None:
        tenant = self._by_token.get(digest)
        known = digest if tenant is not None else bytes(len(digest))
        return tenant if hmac.compare_digest(known, digest) else None

    def by_certificate(self, names: Iterable[str]) -> Tenant | None:
        """Return the tenant of a verified client certificate with `names`, else the tenant that
        takes any certificate, or None. The result is None if two tenants have a name in `names`."""
        found = {
            self._by_certificate[name.lower()].name: self._by_certificate[name.lower()]
            for name in names
            if name.lower() in self._by_certificate
        }
        if not found:
            return self._any_certificate
        return next(iter(found.values())) if len(found) == 1 else None


def new_token() -> str:
    return secrets.token_urlsafe(_TOKEN_BYTES)


def token_digest(token: str, called: str = "the token") -> bytes:
    """Return the SHA-256 of a token, as in a tenants file. Raises TierConfigError for a token that
    a header cannot carry or that is too short. Messages never contain the token."""
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise TierConfigError(
            f"{called} holds a space, a line break or a letter beyond ASCII, which clients cannot "
            "send; choose another one"
        )
    if not _MIN_TOKEN_CHARACTERS <= len(token) <= _MAX_TOKEN_CHARACTERS:
        raise TierConfigError(
            f"{called} has {len(token)} characters; expected {_MIN_TOKEN_CHARACTERS} to "
            f"{_MAX_TOKEN_CHARACTERS}"
        )
    return hashlib.sha256(token.encode()).digest()


def only_tenant(
    cpu_bytes: int, ssd_bytes: int, token: str | None, *, has_client_ca: bool
) -> Tenants:
    """Make the only tenant of a server without a tenants file. Without a token and without a client
    CA, the tenant accepts every caller."""
    return Tenants(
        [
            Tenant(
                DEFAULT_TENANT,
                cpu_bytes,
                ssd_bytes,
                token_digests=() if token is None else (token_digest(token),),
                takes_any_certificate=has_client_ca and token is None,
                takes_anyone=token is None and not has_client_ca,
            )
        ]
    )


def read_tenants(text: str, called: str, size: SizeReader) -> Tenants:
    """Parse a tenants file named `called`. Raises TierConfigError, or the errors of `size`."""
    if len(text) > _MAX_FILE_CHARACTERS:
        raise TierConfigError(f"{called} is longer than {_MAX_FILE_CHARACTERS} characters")
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TierConfigError(f"{called} is no TOML: {error}") from error
    entries = document.pop("tenant", [])
    if document or not isinstance(entries, list) or not entries:
        other = ", ".join(sorted(document)) or "nothing else"
        raise TierConfigError(
            f"{called} must hold one [[tenant]] or more and nothing else; it has {other}"
        )
    return Tenants(
        [
            _tenant(entry, f"{called}, [[tenant]] {number}", size)
            for number, entry in enumerate(entries, 1)
        ]
    )


def check_totals(tenants: Tenants, cpu_bytes: int, ssd_bytes: int) -> None:
    """Raise TierConfigError if the quotas together exceed the server's memory or disk."""
    for field, total in (("cpu_bytes", cpu_bytes), ("ssd_bytes", ssd_bytes)):
        given = sum(getattr(tenant, field) for tenant in tenants)
        if given > total:
            raise TierConfigError(
                f"the tenants' {field} are {given} together and the server has {total}; give them "
                f"less, or raise --{field.replace('_', '-')}"
            )


def _tenant(entry: Any, where: str, size: SizeReader) -> Tenant:
    if not isinstance(entry, dict):
        raise TierConfigError(f"{where}: expected a table of fields")
    unknown = sorted(entry.keys() - set(_FIELDS))
    if unknown:
        raise TierConfigError(
            f"{where}: unknown field {unknown[0]}; the fields are {', '.join(_FIELDS)}"
        )
    name = _name(entry.get("name"), f"{where}, name")
    where = f"{where} ({name})"
    if "cpu_bytes" not in entry:
        raise TierConfigError(f"{where}: cpu_bytes is missing; say how much memory it gets")
    tenant = Tenant(
        name=name,
        cpu_bytes=_positive(size(f"{where}, cpu_bytes", entry["cpu_bytes"]), where),
        ssd_bytes=size(f"{where}, ssd_bytes", entry.get("ssd_bytes", 0)),
        pool=_name(entry["pool"], f"{where}, pool") if "pool" in entry else "",
        token_digests=tuple(
            _digest(text, f"{where}, token_sha256")
            for text in _texts(entry.get("token_sha256", []), f"{where}, token_sha256")
        ),
        certificate_names=tuple(
            _texts(entry.get("certificate_names", []), f"{where}, certificate_names")
        ),
    )
    if tenant.ssd_bytes < 0:
        raise TierConfigError(f"{where}: ssd_bytes is a size, not {tenant.ssd_bytes}")
    if not (tenant.token_digests or tenant.certificate_names):
        raise TierConfigError(
            f"{where}: nothing says who it is; give it token_sha256 or certificate_names. "
            f"`stratakv cache-server --new-token {name}` makes a token"
        )
    return tenant


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise TierConfigError(
            f"{where}: expected up to 64 letters, digits, dots, dashes and underscores, "
            f"not {str(value)[:80]!r}"
        )
    return value


def _positive(number: int, where: str) -> int:
    if number < 1:
        raise TierConfigError(f"{where}: cpu_bytes is a size above 0, not {number}")
    return number


def _texts(value: Any, where: str) -> list[str]:
    """Return the texts in a field whose value is one text or a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise TierConfigError(f"{where}: expected a text or a list of texts")
    return texts


def _digest(text: str, where: str) -> bytes:
    if not _DIGEST.fullmatch(text):
        raise TierConfigError(
            f"{where}: expected the SHA-256 of the token as 64 hexadecimal digits, "
            f"got {len(text)} characters"
        )
    return bytes.fromhex(text)


def _unique(pairs: Iterable[tuple[Any, Tenant]], what: str) -> dict[Any, Tenant]:
    result: dict[Any, Tenant] = {}
    for key, tenant in pairs:
        if key in result:
            raise TierConfigError(
                f"the tenants {result[key].name} and {tenant.name} have the same {what}; "
                "give each its own"
            )
        result[key] = tenant
    return result
