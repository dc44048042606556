# SPDX-License-Identifier: Apache-2.0
"""Command lines of Python processes, none of which imports from the folder that it is started in.

`python -m` and `python -c` put the working directory first on the path, so a file there, such as a
`msgspec.py`, would run in place of a package. -P keeps it out, and PYTHONSAFEPATH does for
processes whose command line the standard library writes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import SpawnContext


def python_command(*words: str, python: str | None = None) -> list[str]:
    """What starts `python WORDS`, by default with this Python; another one is 3.11 or later."""
    return [python or sys.executable, "-P", *words]


def spawn_context() -> SpawnContext:
    """multiprocessing's, which starts `python -c` for each child and for its resource tracker. The
    environment of this process keeps the variable, for the tracker starts at any later time."""
    os.environ["PYTHONSAFEPATH"] = "1"
    return multiprocessing.get_context("spawn")
