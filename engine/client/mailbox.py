# SPDX-License-Identifier: Apache-2.0
"""The mailbox of one request: outputs wait here, merged into one, until their reader comes.

Merging bounds it by the request's own length, so a slow reader neither holds up the others nor
fills the memory. Lives in one event loop. Knows nothing of how outputs arrive.
"""

from __future__ import annotations

import asyncio

from ..wire import TokenOutput


class Mailbox:
    """One writer, one reader."""

    __slots__ = ("_error", "_filled", "_pending")

    def __init__(self) -> None:
        self._pending: TokenOutput | None = None
        self._error: BaseException | None = None
        self._filled = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        """Add an output behind those that wait. Takes over the object."""
        if self._pending is None:
            self._pending = output
        else:
            _merge(self._pending, output)
        self._filled.set()

    def fail(self, error: BaseException) -> None:
        """Let the reader have this error, after what waits."""
        self._error = error
        self._filled.set()

    async def get(self) -> TokenOutput:
        """Everything that came since the last call; waits for the first of it. Raises the error
        given to `fail`. Whoever owns the mailbox calls `fail` when nothing more can come."""
        await self._filled.wait()
        output, self._pending = self._pending, None
        if self._error is None:
            self._filled.clear()
        if output is not None:
            return output
        if self._error is None:
            raise RuntimeError("a mailbox has one reader only")
        raise self._error


def _merge(first: TokenOutput, later: TokenOutput) -> None:
    first.new_token_ids = first.new_token_ids + later.new_token_ids
    if later.logprobs is not None:
        first.logprobs = (first.logprobs or []) + later.logprobs
    for name in _MERGED_FIELDS:
        value = getattr(later, name)
        if value is not None:
            setattr(first, name, value)


_MERGED_FIELDS = tuple(
    name
    for name in TokenOutput.__struct_fields__
    if name not in ("request_id", "new_token_ids", "logprobs")
)
