# SPDX-License-Identifier: Apache-2.0
"""The interface of an engine client, which the HTTP server and the Python API call.

A client guarantees:
- `generate` yields outputs in order and ends after the output with a finish reason, or raises
  EngineDead; closing the iterator early aborts the request in the engine core;
- every wait ends at a deadline or when the engine core ends;
- a bad request does not affect other requests: its last output has the finish reason "error"."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from ..request.core_messages import AddRequest, ExtendPrompt, Ready, TokenOutput

# Failed steps in a row, too many to be caused by one request, after which an engine is unhealthy.
UNHEALTHY_FAILED_STEPS = 3


class EngineDead(RuntimeError):
    """The engine core has ended or does not answer, so the client yields no more outputs."""


class PromptUnknown(ValueError):
    """The client has no opened prompt with an id, or has dropped the prompt and its last output."""


class PromptEnded(ValueError):
    """The request of an opened prompt has ended before the prompt was whole."""


class EngineClient(ABC):
    """The client of one engine core."""

    ready: Ready
    # The failed steps since the worker's last good step, by the engine core's last message.
    num_failed_steps: int = 0

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the engine core runs; False after the client has detected the core's end."""

    @abstractmethod
    def generate(self, request: AddRequest) -> AsyncIterator[TokenOutput]:
        """Run one request, and yield its outputs. This module's docstring has the guarantees."""

    @abstractmethod
    async def open_prompt(self, request: AddRequest) -> None:
        """Start a request whose prompt comes in parts (`RequestExtras.more_follows`). The request's
        outputs are kept until `generate` or `drop_prompt` is called with the request's id. Raises
        ValueError for an id in use."""

    @abstractmethod
    async def extend_prompt(self, part: ExtendPrompt) -> None:
        """Send the next part of an opened prompt. Raises PromptEnded, with the reason, if the
        request has ended (`generate` then yields its last output), and PromptUnknown if the client
        has no prompt with the id."""

    @abstractmethod
    async def drop_prompt(self, request_id: str) -> None:
        """Abort a request of `open_prompt` that has no `generate` call. Ignore unknown ids."""

    def has_enough(self, request_id: str) -> None:  # noqa: B027 - a hint that may be ignored
        """Record that the request has reached a stop string. Closing the request's iterator then
        ends the request as stopped instead of aborted."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """Abort the requests with these ids. Ignore unknown ids."""

    @abstractmethod
    async def call(
        self, name: str, argument: str = "", timeout_seconds: float | None = 10.0
    ) -> Any:
        """Send a `core_messages.Call`, and return the decoded JSON of the reply. Raises EngineDead,
        TimeoutError, and ValueError if the engine core refuses the call. With `timeout_seconds`
        None only a reply or the engine's end ends the wait."""

    @abstractmethod
    async def close(self, timeout_seconds: float = 30.0) -> None:
        """Shut down the engine core, which stores the KV pool's blocks in the tiers. Idempotent."""
