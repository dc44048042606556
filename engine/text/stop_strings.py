# SPDX-License-Identifier: Apache-2.0
"""The stop strings of one request, looked for in text that arrives in pieces.

Text that may be the beginning of a stop string is held back, and nothing else is; so a match never
begins in text that was given out. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Joined, the results of `push` and `finish` are the text up to the first stop string."""

    __slots__ = ("_begun", "_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        # Of each stop string, how much of its beginning the held text ends with. A string cannot
        # have begun before that, so however much another one has held back is not looked at again.
        self._begun = [0] * len(self._stops)
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take text; what of it is certain. After a match `matched` is set and nothing follows."""
        if self.matched is not None:
            return ""
        num_held = len(self._held)
        text = self._held + text
        found = self._first_match(text, num_held)
        if found is not None:
            start, stop = found
            self.matched, self._held = stop, ""
            return text[: start + len(stop)] if self._include else text[:start]
        num_new = len(text) - num_held
        self._begun = [
            _overlap(text, stop, begun + num_new)
            for stop, begun in zip(self._stops, self._begun, strict=True)
        ]
        keep = max(self._begun, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_held: int) -> tuple[int, str] | None:
        """The match that begins first; of several there, the one that was listed first."""
        best: tuple[int, str] | None = None
        for stop, begun in zip(self._stops, self._begun, strict=True):
            start = text.find(stop, num_held - begun)
            if start >= 0 and (best is None or start < best[0]):
                best = (start, stop)
        return best


def _overlap(text: str, stop: str, most: int) -> int:
    """Length of the longest end of `text`, up to `most`, that is a proper beginning of `stop`."""
    for length in range(min(most, len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
