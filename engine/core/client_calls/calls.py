# SPDX-License-Identifier: Apache-2.0
"""Answers client calls other than requests: statistics, pauses, prefix-cache resets and hints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from ....connector.base import KVConnectorScheduler
from ...request.core_messages import LoadAdapter, LoadedAdapter, ToolCalled, UnloadAdapter
from ...scheduler.scheduler import Pause, Scheduler
from ...structured.manager import GrammarManager
from ..adapter_registry import AdapterRegistry
from ..continued.prompt_sessions import PromptSessions
from ..core_stats import CoreStats
from ..handover import HeldAnswers
from ..request_builder import RequestBuilder, decode_request
from .deferred import Deferred

Message = TypeVar("Message")


class CoreCalls:
    """Answers the calls to one core, on the core's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        connector: KVConnectorScheduler,
        builder: RequestBuilder,
        grammars: GrammarManager,
        held: HeldAnswers,
        sessions: PromptSessions,
        stats: CoreStats,
        adapters: AdapterRegistry,
    ) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._builder = builder
        self.grammars = grammars
        self._held = held
        self._sessions = sessions
        self._core_stats = stats
        self._adapters = adapters
        self._answers: Mapping[str, Callable[[str], Any]] = {
            "stats": self._stats,
            "follow": self._follow,
            "tool_called": self._tool_called,
            "reset_prefix_cache": self._reset_prefix_cache,
            "pause": self._pause,
            "resume": self._resume,
            "paused": self._paused,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }

    def answer(self, name: str, argument: str) -> Any:
        """Answer a `Call` message with plain values, structs, or a Deferred. Raise ValueError, with
        the reason, for an unknown call or a call that is not possible now."""
        if name not in self._answers:
            *names, last = self._answers
            raise ValueError(f"the core answers {', '.join(names)} and {last}, not {name!r}")
        return self._answers[name](argument)

    def _stats(self, _argument: str) -> dict[str, Any]:
        speculation = self._scheduler.speculation
        return {
            "scheduler": self._scheduler.stats(),
            "connector": self._connector.stats() or None,
            "pool": self._scheduler.manager.pool.residency.stats(),
            "core": self._core_stats.stats(),
            "grammar": self.grammars.stats(),
            "speculation": None if speculation is None else speculation.stats(),
            "sessions": self._sessions.stats(),
            "adapters": {**self._scheduler.adapter_counts(), **self._adapters.stats()},
            "handover": {"num_held": len(self._held), **asdict(self._held.counts)},
        }

    def _follow(self, argument: str) -> bool:
        """Record that another engine computes the prompt of this AddRequest (JSON). Return whether
        the connector will load the prompt's blocks. Raise ValueError for other JSON."""
        request = self._builder.make_request(decode_request(argument))
        elsewhere = self._connector.prompts_elsewhere
        if request.skip_reading_prefix_cache or elsewhere is None:
            return False
        return elsewhere.follow_blocks(self._scheduler.manager.keys.of_prompt(request))

    def _tool_called(self, argument: str) -> bool:
        """Record the tool call at the end of a job's latest request, from a ToolCalled (JSON)."""
        try:
            called = msgspec.json.decode(argument, type=ToolCalled)
        except msgspec.MsgspecError as error:
            raise ValueError(f"this names no tool: {error}") from None
        self._scheduler.tool_called(self._builder.job_of(called), called.tool)
        return True

    def _load_adapter(self, argument: str) -> Deferred:
        return self._adapters.begin_load(_decoded(argument, LoadAdapter))

    def _unload_adapter(self, argument: str) -> LoadedAdapter:
        return self._adapters.unload_adapter(_decoded(argument, UnloadAdapter).name)

    def _reset_prefix_cache(self, argument: str) -> dict[str, bool]:
        scope = argument or "pool"
        if scope not in ("pool", "all"):
            raise ValueError(f"reset_prefix_cache takes pool or all, not {scope!r}")
        if not self._scheduler.reset_prefix_cache(scope == "all"):
            raise ValueError("requests still hold blocks of the pool; wait until they have ended")
        return {"done": True}

    def _pause(self, argument: str) -> dict[str, Any]:
        which = argument or Pause.NEW.value
        if which not in [pause.value for pause in Pause]:
            raise ValueError(f"pause takes new or all, not {which!r}")
        self._scheduler.pause(Pause(which))
        return self._paused("")

    def _resume(self, _argument: str) -> dict[str, Any]:
        self._scheduler.resume()
        return self._paused("")

    def _paused(self, _argument: str) -> dict[str, Any]:
        """Return the pause in force, or None, and the numbers of running and waiting requests."""
        scheduler = self._scheduler
        return {
            "paused": None if scheduler.paused is None else scheduler.paused.value,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
        }


def _decoded(argument: str, kind: type[Message]) -> Message:
    try:
        return msgspec.json.decode(argument, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no {kind.__name__}: {error}") from None
