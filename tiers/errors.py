# SPDX-License-Identifier: Apache-2.0
"""The errors that a tier may raise, and the cause of each error.

    TierError
    ├── InvalidBlock     the caller gave a key, layout or buffer that cannot be right
    ├── TierConfigError  a path, size or option of the operator cannot work; the message has a cure
    │   └── TierDown     the setting may work later: a disk or server is missing or does not answer
    ├── TierBusy         the tier's bounded queue is full; drop the blocks or call again later
    └── TierClosed       the tier was closed; it takes no more calls

A damaged, missing or misplaced record is not an error: the tier counts it and returns a miss. The
hierarchy turns each TierError of a store into a miss and counts it by the name of its class."""

import errno
import os
from pathlib import Path

# Permanent errors of a file system, and their remedies. Other errors may be temporary: a disk is
# not mounted, full, read-only or broken, permissions are wrong, memory or descriptors are short.
LASTING = {
    errno.ELOOP: "its links lead in a circle; name a directory",
    errno.ENAMETOOLONG: "a name in it is too long; use a shorter path",
    errno.ENOTDIR: "a file is in the way of a directory; use another path or remove that file",
    errno.EEXIST: "a file is in the way of a directory; use another path or remove that file",
    errno.EISDIR: "a directory is in the way of a file; use another path or remove it",
    errno.EFBIG: "a file may not become so large there; give the tier less, raise `ulimit -f`, or "
    "use another path on a file system that takes larger files",
    errno.EOPNOTSUPP: "its file system cannot do what the tier needs; use another path",
    errno.ENOSYS: "its file system cannot do what the tier needs; use another path",
}


class TierError(Exception):
    """The base of all errors of a tier."""


class InvalidBlock(TierError, ValueError):
    """The caller passed an invalid key, layout or buffer."""


class TierConfigError(TierError, ValueError):
    """A setting is invalid. The message has the expected value, the actual value and a remedy."""


class TierDown(TierConfigError):
    """A mount or server is missing. A later attempt may succeed with the same settings."""


def lasting_cause(error: BaseException, path: Path | None = None) -> str | None:
    """Return the remedy of a permanent file system error, or None for a temporary error and for any
    other exception. If the error was raised while making a directory, `path` is that directory."""
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if path is not None and error.errno in (errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
        around = (path, *path.parents)
        if any(os.path.islink(each) and not os.path.exists(each) for each in around):
            return None if not _is_circle(path) else LASTING[errno.ELOOP]
        if error.errno == errno.ENOENT and os.path.isdir(path.parent):
            return "no directory can be made there; use another path"  # as in /proc
    return LASTING.get(error.errno)


def _is_circle(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


class TierBusy(TierError):
    """The queue of the tier is full."""


class TierClosed(TierError):
    """The tier was closed."""
