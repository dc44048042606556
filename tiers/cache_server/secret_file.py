# SPDX-License-Identifier: Apache-2.0
"""Reads or makes the file with a cache server's secret, which salts the keys of stored blocks.

A process that has the secret can find out which prompts have blocks on a disk. A server without the
old secret does not find the blocks on its disk."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ..errors import TierConfigError

_MOST_BYTES = 4096
SECRET_BYTES = 32


def read_secret(path: Path) -> bytes:
    """Read the secret from `path`. A missing file is made, with random bytes that only this user
    can read. Raises TierConfigError if the file cannot be used."""
    try:
        descriptor = _open(path)
        try:  # `open` would leave the descriptor of a directory open
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
            f"the secret file {path} must be a file that only its owner can read; "
            f"run: chmod 600 {path}"
        )
    if len(content) < SECRET_BYTES:
        raise TierConfigError(
            f"the secret file {path} has {len(content)} bytes and {SECRET_BYTES} are needed; "
            "remove it to have one made"
        )
    return content


def _open(path: Path) -> int:
    """Open the secret file; a missing file is made. May raise OSError."""
    # O_NONBLOCK: opening a pipe does not wait for its other end.
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
        # A link, not a rename: of two servers that start at once, both must get the first secret.
        os.link(fresh, path)
    except FileExistsError:
        pass  # another server has made the file
    finally:
        os.unlink(fresh)
    return os.open(path, flags)
