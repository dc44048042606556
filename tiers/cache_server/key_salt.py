# SPDX-License-Identifier: Apache-2.0
"""The server's own salt: the names under which it keeps a tenant's blocks.

    stored key = HMAC-SHA256(tenant key, key) | the key's group and shard
    tenant key = HMAC-SHA256(server secret, tenant)

A client cannot choose a key that another tenant's block is kept under, and keys on the disk tell
nothing of prompts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from ..block import DIGEST_BYTES, cut_keys
from ..errors import TierConfigError
from ..native.openssl import name_maker

# The server's secret, which the names of kept blocks are salted with: read, or made once.
# Whoever has it can tell which prompts a disk knows; without it the blocks on the disk cannot be
# found any more.

_MOST_BYTES = 4096


def read_secret(path: Path) -> bytes:
    """The content of `path`, which is made with random bytes for this user alone where it is
    missing. Raises TierConfigError with a cure."""
    try:
        descriptor = _open(path)
        try:  # not `open`, which leaves the descriptor of a directory open
            mode = os.fstat(descriptor).st_mode
            content = os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise TierConfigError(
            f"the secret file {path} cannot be read or made ({error.strerror}); name another one "
            "with --secret-file"
        ) from error
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise TierConfigError(
            f"the secret file {path} must be a file that nobody but its owner can read; "
            f"run: chmod 600 {path}"
        )
    if len(content) < SECRET_BYTES:
        raise TierConfigError(
            f"the secret file {path} has {len(content)} bytes and {SECRET_BYTES} are needed; "
            "remove it to have one made"
        )
    return content


def _open(path: Path) -> int:
    """May raise OSError."""
    # Not to wait for whoever opens the other end of a pipe.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    made = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(made, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        # Not a rename: of two servers that start at once both must get the secret of the first.
        os.link(fresh, path)
    except FileExistsError:
        pass  # another was quicker
    finally:
        os.unlink(fresh)
    return os.open(path, flags)


SECRET_BYTES = 32
_BLOCK_BYTES = 64  # of SHA-256


class KeySalt:
    """The names of one tenant's blocks."""

    def __init__(self, secret: bytes, tenant: str) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a server secret has {SECRET_BYTES} bytes or more, not {len(secret)}")
        tenant_key = hmac.digest(secret, tenant.encode(), "sha256")
        self._maker = name_maker(tenant_key)
        padded = tenant_key.ljust(_BLOCK_BYTES, b"\0")
        # HMAC with its two key blocks hashed in advance: half the work for each key.
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def stored(self, keys: Sequence[bytes]) -> list[bytes]:
        """The 40-byte stored keys of 40-byte keys. Takes as long for any of them."""
        if self._maker is not None:
            return cut_keys(self._maker.names(b"".join(keys), len(keys)))
        inner, outer = self._inner, self._outer
        result = []
        for key in keys:
            hasher = inner.copy()
            hasher.update(key)
            outside = outer.copy()
            outside.update(hasher.digest())
            result.append(outside.digest() + key[DIGEST_BYTES:])
        return result
