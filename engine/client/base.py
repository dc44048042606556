# SPDX-License-Identifier: Apache-2.0
"""The contract between an engine client and its callers, the HTTP server and the Python API.

A client guarantees:
- `generate` yields outputs in order and ends after the output with a finish reason, or raises
  EngineDead; closing the iterator early aborts the request in the core;
- every wait ends at a deadline or when the core ends;
- a bad request fails alone: its last output carries `error` and finish reason "error"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from ..request.core_messages import AddRequest, ExtendPrompt, Ready, TokenOutput

# After so many failed steps one request cannot be the cause; a few more steps end the core.
UNHEALTHY_FAILED_STEPS = 3


class EngineDead(RuntimeError):
    """The engine core has ended or does not answer; the client yields no more outputs."""


class PromptUnknown(ValueError):
    """The client no longer knows an opened prompt or its last output."""


class PromptEnded(ValueError):
    """The request of an opened prompt has ended before the prompt was whole."""


class EngineClient(ABC):
    """The client of one engine core."""

    ready: Ready
    # The worker's failed steps since its last good step, as of the core's last message.
    num_failed_steps: int = 0

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """False once the client knows that the core has ended."""

    @abstractmethod
    def generate(self, request: AddRequest) -> AsyncIterator[TokenOutput]:
        """Run one request, and yield its outputs as this module's docstring says."""

    @abstractmethod
    async def open_prompt(self, request: AddRequest) -> None:
        """Start a request whose prompt comes in parts (`RequestExtras.more_follows`). The request's
        outputs are kept until `generate` or `drop_prompt` is called with the request's id. Raises
        ValueError for an id in use."""

    @abstractmethod
    async def extend_prompt(self, part: ExtendPrompt) -> None:
        """Send the next part of an opened prompt. Raises PromptEnded, with the reason, if the
        request has ended (`generate` yields its last output), and PromptUnknown if the client no
        longer knows the prompt."""

    @abstractmethod
    async def drop_prompt(self, request_id: str) -> None:
        """Abort a request of `open_prompt` that `generate` has not taken; other ids are ignored."""

    def has_enough(self, request_id: str) -> None:  # noqa: B027 - a hint, not a duty
        """Record that the request has reached a stop string. Closing the request's iterator then
        ends the request as stopped instead of aborted."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """Abort requests; unknown ids are ignored."""

    @abstractmethod
    async def call(self, name: str, argument: str = "", timeout_seconds: float = 10.0) -> Any:
        """Make a `core_messages.Call` and return its decoded JSON result. Raises TimeoutError,
        EngineDead, or ValueError if the core refuses the call."""

    @abstractmethod
    async def close(self, timeout_seconds: float = 30.0) -> None:
        """Shut down the core, which first stores the pool's blocks in the tiers. Idempotent."""
