# SPDX-License-Identifier: Apache-2.0
"""The contract of an engine client with HTTP and the Python API.

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

# So many failed steps are not the fault of one request; a few more end the core.
UNHEALTHY_FAILED_STEPS = 3


class EngineDead(RuntimeError):
    """The core is gone or cannot answer; the client gives no more outputs."""


class PromptUnknown(ValueError):
    """A prompt that was opened, or its last output, is not known any more."""


class PromptEnded(ValueError):
    """The request of an opened prompt has ended before the prompt was whole."""


class EngineClient(ABC):
    """The client of one engine core."""

    ready: Ready
    # The worker's failed steps since the last good one, by the core's last message.
    num_failed_steps: int = 0

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """False once the core is known to be gone."""

    @abstractmethod
    def generate(self, request: AddRequest) -> AsyncIterator[TokenOutput]:
        """Run one request; see the contract above."""

    @abstractmethod
    async def open_prompt(self, request: AddRequest) -> None:
        """Begin a request whose prompt goes on (`RequestExtras.more_follows`). Its outputs wait for
        `generate` with the same id, or for `drop_prompt`. Raises ValueError for an id in use."""

    @abstractmethod
    async def extend_prompt(self, part: ExtendPrompt) -> None:
        """Send the next part of an opened prompt. Raises PromptEnded with the reason if its request
        has ended (`generate` yields the last output), and PromptUnknown if the prompt is not known
        any more."""

    @abstractmethod
    async def drop_prompt(self, request_id: str) -> None:
        """Abort a request whose prompt was opened and whose outputs no caller has asked for; other
        ids are ignored."""

    def has_enough(self, request_id: str) -> None:  # noqa: B027 - a hint, not a duty
        """Note that a stop string has come: closing the iterator of this request then ends it as
        stopped, not as aborted."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """Stop requests; unknown ids are ignored."""

    @abstractmethod
    async def call(self, name: str, argument: str = "", timeout_seconds: float = 10.0) -> Any:
        """Make a `core_messages.Call` and return its decoded JSON result. Raises TimeoutError,
        EngineDead or ValueError (the core refused)."""

    @abstractmethod
    async def close(self, timeout_seconds: float = 30.0) -> None:
        """Shut down the core in order (tiers written back). Idempotent."""
