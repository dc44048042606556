# SPDX-License-Identifier: Apache-2.0
"""Remembered: an entry for each of the latest requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

# Requests that were told to the tiers; far above what waits at one time.
REMEMBERED_REQUESTS = 4096

T = TypeVar("T")


class Remembered(OrderedDict[str, T], Generic[T]):
    """The newest `most` entries by request id; older ones are forgotten."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, request_id: str, value: T) -> None:
        """Remember, as the newest."""
        self[request_id] = value
        self.move_to_end(request_id)
        if len(self) > self._most:
            self.popitem(last=False)
