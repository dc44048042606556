# SPDX-License-Identifier: Apache-2.0
"""The queue of requests that wait, first come, first served.

Knows nothing of why they wait. Its length is bounded by the scheduler, which refuses requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..request import Request


class FCFSQueue:
    """Requests in the order of their arrival; those put back in front come first."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request at the end."""
        self._requests.append(request)

    def peek(self) -> Request:
        """The first request; stays where it is. Raises IndexError if there is none."""
        return self._requests[0]

    def pop(self) -> Request:
        """Take the first request. Raises IndexError if there is none."""
        return self._requests.popleft()

    def prepend(self, request: Request) -> None:
        """Put a request in front of all others."""
        self._requests.appendleft(request)

    def prepend_all(self, requests: Iterable[Request]) -> None:
        """Put requests in front of all others, in this order."""
        self._requests.extendleft(reversed(list(requests)))

    def remove(self, request: Request) -> bool:
        """Take a request out, wherever it stands; whether it was there."""
        try:
            self._requests.remove(request)
        except ValueError:
            return False
        return True
