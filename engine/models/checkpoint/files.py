# SPDX-License-Identifier: Apache-2.0
"""Checks of the files in a model directory, before a reader opens them.

Without these checks a reader would wait for ever on a named pipe. A reader would also treat a
symbolic link to a deleted file (from a half-cleared download cache) like an absent optional file,
and show a traceback for an unreadable file. The checks raise ConfigError for all three."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ....tiers.settings.format import one_line
from ....tiers.settings.values import ConfigError
from .foreign_directory import explain_file


def check_directory(path: Path) -> None:
    """Raise ConfigError unless `path` is a directory that this user may read and search."""
    mode = _mode(path)
    if mode is None or not stat.S_ISDIR(mode):
        found = "" if mode is None else explain_file(path)
        raise ConfigError(
            found
            or f"{path} is not a directory; give a model directory as Hugging Face saves it, the "
            "id of a model on the Hub as org/model, or leave MODEL out for the embedded one"
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"the directory {path} may not be read by this user; change its mode")


def is_there(path: Path) -> bool:
    """Whether the file `path` exists. Raises ConfigError for a symbolic link to a missing file, and
    for a path that is not a regular file."""
    mode = _mode(path)
    if mode is None:
        if path.is_symlink():
            raise ConfigError(f"{path} is a link to a file that is gone; copy the file there")
        return False
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no ordinary file; copy the file itself there")
    return True


def _mode(path: Path) -> int | None:
    """Return the file mode after links are followed, or None if the path does not exist."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{one_line(str(path))} cannot be looked at ({error.strerror}); mend that or give "
            "another"
        ) from error
    except ValueError as error:  # the path has a zero byte, or half of a surrogate pair
        raise ConfigError(f"{one_line(str(path))} can be no path ({error}); correct it") from error
