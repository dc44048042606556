# SPDX-License-Identifier: Apache-2.0
"""Command lines that start Python without imports from the working directory.

`python -m` and `python -c` put the working directory first on the path, so a file in it, such as
`msgspec.py`, would be imported in place of a package. -P keeps the directory off the path;
PYTHONSAFEPATH does the same for processes whose command line the standard library writes."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext

_VARIABLE = "PYTHONSAFEPATH"


def python_command(*words: str, python: str | None = None) -> list[str]:
    """Return the command line of `python WORDS`, by default of this Python (or of 3.11+)."""
    return [python or sys.executable, "-P", *words]


@contextmanager
def spawn_context() -> Iterator[SpawnContext]:
    """Yield multiprocessing's spawn context, which starts `python -c` for each child and for its
    resource tracker. The caller starts children and makes semaphores in the `with` body.
    PYTHONSAFEPATH is set only in this body, so programs started later do not have it."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
