# SPDX-License-Identifier: Apache-2.0
"""The files for serving an engine's blocks: token, certificate, key and client CA.

The serving process reads the files at its start and whenever a file changes, so that renewed files
need no restart."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...errors import TierConfigError
from ...identity.file_state import state_of

if TYPE_CHECKING:
    from ..access.tls import TlsFiles

_MAX_TOKEN_BYTES = 4096


class ServedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of the files as text, since paths are sent as JSON; None for an unused file."""

    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None

    def check_flags(self) -> None:
        """Raise TierConfigError for an invalid combination of flags, or an invalid token."""
        from ..access.tenants import token_digest

        cert, key, client_ca = self.tls_cert, self.tls_key, self.tls_client_ca
        if (cert is None) != (key is None) or (client_ca is not None and cert is None):
            raise TierConfigError(
                "--kv-serve-tls-cert and --kv-serve-tls-key go together, --kv-serve-tls-client-ca "
                "with both"
            )
        token = self.token()
        if token is not None:
            token_digest(token, f"the token in {self.token_file} (--kv-serve-token-file)")

    def token(self) -> str | None:
        """Read the token. Raises TierConfigError for a file unreadable or open to others."""
        return None if self.token_file is None else _read_token(Path(self.token_file))

    def tls(self) -> TlsFiles | None:
        """Return the paths of the TLS files, or None without TLS. Reads no file."""
        from ..access.tls import TlsFiles

        if self.tls_cert is None or self.tls_key is None:
            return None
        client_ca = None if self.tls_client_ca is None else Path(self.tls_client_ca)
        return TlsFiles(Path(self.tls_cert), Path(self.tls_key), client_ca)

    def state(self) -> tuple[object, ...]:
        """Return a value that changes when a file has been written or replaced."""
        return tuple(
            state_of(Path(path))
            for path in (self.token_file, self.tls_cert, self.tls_key, self.tls_client_ca)
            if path is not None
        )


def in_flags_of_serve(message: str) -> str:
    """Replace the flags of a cache server in a message by the engine's flags (`--kv-serve-...`)."""
    message = re.sub(r"--(tls-|token-file|insecure)", r"--kv-serve-\1", message)
    return re.sub(r"--(data-)?(port|host)\b", "--kv-serve", message).replace("--tenants, ", "")


def _read_token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_TOKEN_BYTES + 1).decode().strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise TierConfigError(
            f"--kv-serve-token-file names {path}, which cannot be read as text ({error})"
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise TierConfigError(
            f"--kv-serve-token-file names {path}, which other users can read or write (mode "
            f"{stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
        )
    return text
