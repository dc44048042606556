# SPDX-License-Identifier: Apache-2.0
"""The token file that a cache server writes for clients of the same user on the same machine.

    $XDG_RUNTIME_DIR/stratakv/cache-server-PORT.token       /run/user/UID where that is not set
    $XDG_CACHE_HOME/stratakv/cache-server-PORT.token        ~/.cache where that is not set

At each start the server writes a new token, with mode 0600, to the first of these paths that it can
write. If the file vanishes (a logout empties $XDG_RUNTIME_DIR), the server writes the file again.
The server removes the file when it ends. The token in the file of a killed server is not valid. A
client reads the first file that exists at these paths."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import TierConfigError

_FOLDER = "stratakv"
_MOST_BYTES = 4096


def leave_token(port: int, token: str) -> Path:
    """Write the token of the server at `port`; return its path. Raises TierConfigError."""
    why = []
    for folder in _folders():
        path = folder / _name(port)
        try:
            _make_private(folder)
            _write(path, token)
        except OSError as error:
            why.append(f"{path}: {error.strerror}")
            continue
        for other in _folders():
            if other != folder:  # left by a killed server
                with suppress(OSError):
                    (other / _name(port)).unlink()
        return path
    raise TierConfigError(
        f"no file takes the token for this user's clients ({'; '.join(why)}); set XDG_RUNTIME_DIR "
        "or XDG_CACHE_HOME to a folder of this user's, name a token with --token-file, or let "
        "every user of this machine in with --insecure"
    )


def take_away_token(path: Path, token: str) -> None:
    """Remove the token file if it still has `token`. The token of another server stays."""
    with suppress(OSError, TierConfigError):
        if _read(path) == token:
            path.unlink()


def token_places(port: int) -> list[Path]:
    """Return the paths at which a client looks for a token of `port`, in order."""
    return [folder / _name(port) for folder in _folders()]


def find_token(port: int) -> str | None:
    """Return the token for `port`, or None. Raises TierConfigError if others can use the file."""
    for folder in _folders():
        try:
            return _read(folder / _name(port))
        except OSError:
            continue
    return None


def _folders() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (runtime, cache):
        if os.path.isabs(parent):
            yield Path(parent) / _FOLDER


def _name(port: int) -> str:
    return f"cache-server-{port}.token"


def _make_private(folder: Path) -> None:
    """Make the folder. Raises OSError on failure, or if other users can write to the folder."""
    # Only the system makes the runtime directory in /run, so parents in /run are not made here.
    folder.mkdir(mode=0o700, exist_ok=True, parents=not folder.is_relative_to("/run"))
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "others can write the folder")


def _write(path: Path, token: str) -> None:
    """Write the file, or raise OSError and leave no file."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        made = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(made, "w") as file:
            file.write(f"{token}\n")
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


def _read(path: Path) -> str:
    """Read a token. Raises OSError for a missing file, TierConfigError if others can access it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        content = os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise TierConfigError(
            f"the token in {path} is not safe, for others can read or write the file; "
            "remove it and restart the cache server"
        )
    return content.decode("ascii", "replace").strip()
