# SPDX-License-Identifier: Apache-2.0
"""Counts the generating requests that are being answered, for whoever spreads load over servers.

Knows nothing of what the requests ask for.
"""

from __future__ import annotations

from types import TracebackType


class InFlight:
    """`with in_flight:` around a request. Belongs to one event loop."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.count -= 1
