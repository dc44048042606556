# SPDX-License-Identifier: Apache-2.0
"""Continuations: the beam searches and prompt sessions of one engine core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...config.engine_config import EngineConfig
from ...models.model_spec import ModelSpec
from ...request.core_messages import TokenOutput
from ...scheduler.scheduler import Scheduler
from ..request_builder import RequestBuilder
from .beam_families import BeamFamilies
from .prompt_sessions import PromptSessions


@dataclass(frozen=True, slots=True)
class Continuations:
    """The core's beam searches and prompt sessions. Called by the engine's thread."""

    beams: BeamFamilies
    sessions: PromptSessions

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        builder: RequestBuilder,
        spec: ModelSpec,
        config: EngineConfig,
    ) -> Continuations:
        """Make the beam searches and sessions of an engine with this model and these settings."""
        return cls(
            BeamFamilies(scheduler, builder, spec.eos_token_ids, spec.vocab_size),
            PromptSessions(
                scheduler,
                builder,
                config.session_idle_seconds,
                config.scheduler.max_waiting_requests,
            ),
        )

    def take(self, outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
        """Process the outputs of requests that a search or a session has made. Return the outputs
        for clients."""
        return self.sessions.take(self.beams.take(outputs))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End the searches and sessions of clients that have disconnected; unknown ids are
        ignored."""
        request_ids = list(request_ids)
        self.beams.abort_choices(request_ids)
        self.sessions.abort_sessions(request_ids)
