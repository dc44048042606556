# SPDX-License-Identifier: Apache-2.0
"""A clock for tests: in the place of a module's `time`, or of its `time.monotonic`."""

from __future__ import annotations


class Clock:
    """A monotonic clock, in seconds, that goes on only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    __call__ = monotonic
