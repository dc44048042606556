# SPDX-License-Identifier: Apache-2.0
"""The token that a cache server leaves for clients of its own user on its own machine.

    $XDG_RUNTIME_DIR/stratakv/cache-server-PORT.token       /run/user/UID where that is not set
    $XDG_CACHE_HOME/stratakv/cache-server-PORT.token        ~/.cache where that is not set

The server writes the first that it can write, with mode 0600, anew at each start, again where the
file went, as all of $XDG_RUNTIME_DIR does at a logout, and takes it away at its end; a client reads
the first that is there. One that a killed server has left opens nothing.
"""

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
    """Write the token of the server at `port`, in place of any other; its path. Raises
    TierConfigError where no folder takes it."""
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
            if other != folder:  # of a server that was killed
                with suppress(OSError):
                    (other / _name(port)).unlink()
        return path
    raise TierConfigError(
        f"no file takes the token for this user's clients ({'; '.join(why)}); set XDG_RUNTIME_DIR "
        "or XDG_CACHE_HOME to a folder of this user's, name a token with --token-file, or let "
        "anybody on this machine in with --insecure"
    )


def take_away_token(path: Path, token: str) -> None:
    """At the end of the server that wrote it; what another has written there stays."""
    with suppress(OSError, TierConfigError):
        if _read(path) == token:
            path.unlink()


def token_places(port: int) -> list[Path]:
    """Where a token for `port` may lie, in the order in which they are read."""
    return [folder / _name(port) for folder in _folders()]


def find_token(port: int) -> str | None:
    """What a server of this user has left for `port`; None where none has. Raises TierConfigError
    for a file that others can read or write."""
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
    """May raise OSError."""
    # The runtime directory is made by the system or not at all.
    folder.mkdir(mode=0o700, exist_ok=True, parents=not folder.is_relative_to("/run"))
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, "others can write the folder")


def _write(path: Path, token: str) -> None:
    """May raise OSError, and then leaves nothing."""
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
    """Raises OSError where there is none, TierConfigError for one that others can use."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        content = os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise TierConfigError(
            f"the token in {path} may be somebody else's, for others can read or write the file; "
            "remove it and restart the cache server"
        )
    return content.decode("ascii", "replace").strip()
