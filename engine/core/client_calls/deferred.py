# SPDX-License-Identifier: Apache-2.0
"""Deferred: the answer to a call of a core that comes later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """A call whose work runs in another thread. `finish` runs on the core's thread once the future
    is done, failed or not, and returns the answer or raises the error."""

    future: Future[Any]
    finish: Callable[[Future[Any]], Any]
