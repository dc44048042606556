# SPDX-License-Identifier: Apache-2.0
"""Which files a model directory holds, looked up so that nothing surprises whoever opens them.

A pipe would be waited for without end, a link to a file that is gone (as a half-cleared download
cache leaves them) would pass for a file that the model does without, and what may not be looked at
would be a traceback. All three are ConfigErrors here.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ....tiers.settings.format import one_line
from ....tiers.settings.values import ConfigError
from .foreign_directory import explain_file


def check_directory(path: Path) -> None:
    """Raise ConfigError unless `path` is a directory whose files may be looked up."""
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
    """Whether the model has this file; raises ConfigError for what is there and no file."""
    mode = _mode(path)
    if mode is None:
        if path.is_symlink():
            raise ConfigError(f"{path} is a link to a file that is gone; download it again")
        return False
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no ordinary file; download it again")
    return True


def _mode(path: Path) -> int | None:
    """None where there is nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{one_line(str(path))} cannot be looked at ({error.strerror}); mend that or give "
            "another"
        ) from error
    except ValueError as error:  # a zero byte, or half of a surrogate pair
        raise ConfigError(f"{one_line(str(path))} can be no path ({error}); correct it") from error
