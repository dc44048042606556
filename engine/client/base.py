# SPDX-License-Identifier: Apache-2.0
"""The promise of an engine client: what HTTP and the Python API may rely on.

A caller may rely on this:
- `generate` yields outputs in order and ends after the one with a finish reason, or raises
  EngineDead; closing the iterator early aborts the request in the core;
- every wait has a deadline or ends with the core;
- a bad request fails alone: its last output carries `error` and finish reason "error".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from ..request.core_messages import AddRequest, ExtendPrompt, Ready, TokenOutput

# So many are no accident of one request; a few more end the core.
UNHEALTHY_FAILED_STEPS = 3


class EngineDead(RuntimeError):
    """The core is gone or cannot answer; nothing more will come of this client."""


class PromptUnknown(ValueError):
    """A prompt that was opened is not known any more, nor is its last output."""


class PromptEnded(ValueError):
    """The request of a prompt that was opened has ended, before the prompt was whole."""


class EngineClient(ABC):
    """One engine core."""

    ready: Ready
    # Steps that the core's worker has failed since the last good one, as far as it has told.
    num_failed_steps: int = 0

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """False once the core is known to be gone."""

    @abstractmethod
    def generate(self, request: AddRequest) -> AsyncIterator[TokenOutput]:
        """Run one request; see the promise above."""

    @abstractmethod
    async def open_prompt(self, request: AddRequest) -> None:
        """Begin a request whose prompt goes on (`RequestExtras.more_follows`). Its outputs wait for
        `generate` with the same id, or until `drop_prompt`. Raises ValueError for an id in use."""

    @abstractmethod
    async def extend_prompt(self, part: ExtendPrompt) -> None:
        """The next part of a prompt that was opened. Raises PromptEnded with the reason where its
        request has ended, whose last output `generate` gives; and PromptUnknown where nothing is
        known of it any more."""

    @abstractmethod
    async def drop_prompt(self, request_id: str) -> None:
        """Abort a request whose prompt was opened, before its outputs are asked for; any other id
        is ignored."""

    def has_enough(self, request_id: str) -> None:  # noqa: B027 - a hint, not a duty
        """A stop string has come: closing the iterator of this request ends it as stopped, not as
        aborted."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """Stop requests; unknown ids are ignored."""

    @abstractmethod
    async def call(self, name: str, argument: str = "", timeout_seconds: float = 10.0) -> Any:
        """A `wire.Call`; its decoded JSON result. Raises TimeoutError, EngineDead or ValueError
        (the core refused)."""

    @abstractmethod
    async def close(self, timeout_seconds: float = 30.0) -> None:
        """Shut the core down in an orderly way (tiers written back). Idempotent."""
