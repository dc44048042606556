# SPDX-License-Identifier: Apache-2.0
"""MacKey: a secret that authenticates the records of a store or the tags of blocks on cache
servers. The operator provides the key in a file; StrataKV never generates a key.

    id                 the first 8 bytes of HMAC-SHA256(key, "id")
    key of one store   HMAC-SHA256(key, "store" ‖ 0 ‖ namespace)
    key of tags        HMAC-SHA256(key, "tag")

The key of a store is derived from the store's namespace. Therefore a record is not valid in a store
of another namespace, even if the two stores use the same MAC key and block keys that do not
identify the model."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from pathlib import Path

from .errors import TierConfigError
from .record import Seal

log = logging.getLogger(__name__)

LEAST_BYTES = 32
MOST_BYTES = 4096
ID_BYTES = 8


class MacKey:
    """A key whose `repr` does not show its bytes. Raises TierConfigError for a wrong length."""

    def __init__(self, key: bytes) -> None:
        if not LEAST_BYTES <= len(key) <= MOST_BYTES:
            raise TierConfigError(
                f"a key for records or tags has {LEAST_BYTES} to {MOST_BYTES} bytes, not {len(key)}"
            )
        self._key = key
        self.id = self._derive(b"id")[:ID_BYTES]

    @property
    def tag_key(self) -> bytes:
        """The key for the tags of blocks, derived from this key."""
        return self._derive(b"tag")

    def seal(self, namespace: bytes) -> Seal:
        return Seal(self._derive(b"store\0" + namespace))

    def _derive(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256")


def read_mac_key(path: Path, flag: str, store: Path | None = None) -> MacKey:
    """Read the key from the file `path`: all its bytes, including a line end. `flag` is the option
    that names the file. The file must not lie in the store's folder `store`, where any process that
    writes to the folder could replace the key. Logs a warning if other users may access the file.
    Raises TierConfigError."""
    if store is not None and _lies_in(store, path):
        raise TierConfigError(
            f"{flag} names {path}, which lies in {store}, where any writer could exchange "
            "it; keep it elsewhere"
        )
    try:
        # O_NONBLOCK: opening a pipe does not wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:  # `open` would leave the descriptor of a directory open
            mode = os.fstat(descriptor).st_mode
            key = os.read(descriptor, MOST_BYTES + 1) if stat.S_ISREG(mode) else None
        finally:
            os.close(descriptor)
    except OSError as error:
        raise TierConfigError(
            f"{flag} names {path}, which cannot be read ({error.strerror}); {_how_to_make(path)}"
        ) from error
    if key is None:
        raise TierConfigError(
            f"{flag} names {path}, which is no regular file; {_how_to_make(path)}"
        )
    if not LEAST_BYTES <= len(key) <= MOST_BYTES:
        size = f"more than {MOST_BYTES}" if len(key) > MOST_BYTES else len(key)
        raise TierConfigError(
            f"{flag} names {path}, which has {size} bytes where {LEAST_BYTES} to {MOST_BYTES} are "
            f"expected; {_how_to_make(path)}"
        )
    if mode & 0o077:
        log.warning(
            "%s names %s, which users other than its owner may use (mode %04o); run: chmod 600 %s",
            flag, path, stat.S_IMODE(mode), path,
        )  # fmt: skip
    return MacKey(key)


def _lies_in(folder: Path, path: Path) -> bool:
    """Whether `path`, or the file to which a link at `path` leads, lies in `folder`."""
    # realpath does not raise for a circle of links.
    places = Path(os.path.realpath(path.parent), path.name), Path(os.path.realpath(path))
    return any(place.is_relative_to(os.path.realpath(folder)) for place in places)


def _how_to_make(path: Path) -> str:
    return f"make one with: (umask 077; head -c {LEAST_BYTES} /dev/urandom > {path})"
