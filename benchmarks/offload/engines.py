# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, stepped without a server, and what their work costs the processors.

A run of an engine with tiers is charged for the threads behind it too, also for what they do after
the last token, up to the engine's next run; one without tiers has no such threads. Only one engine
runs at a time.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from ...engine.core import offload
from ...engine.core.engine_core import EngineCore
from ...engine.options import engine_config
from ...engine.sampling_params import SamplingParams
from ...engine.wire import AddRequest, TokenOutput
from ...tiers.base import StoreTier

Prompts = Sequence[Sequence[int]]
WrapStore = Callable[[StoreTier], StoreTier]

# Far above what any run takes.
RUN_SECONDS = 300.0
# After a run: completions are taken in until there are none for so long, at most this long in all.
_QUIET_SECONDS = 0.01
_SETTLE_SECONDS = 0.5
_REST_SECONDS = 60.0


class RunFailed(RuntimeError):
    """An engine did not answer, or not as it should."""


@dataclass(slots=True)
class Step:
    """One step that computed tokens."""

    tokens: int
    wall_seconds: float
    thread_seconds: float  # of processors, by the thread that steps
    stored_blocks: int  # that left the pool for the slab


@dataclass(slots=True)
class Run:
    """The answers to some prompts, in their order, and what they cost."""

    token_ids: list[list[int]]
    cached_tokens: Counter[str] = field(default_factory=Counter)  # by tier, of all prompts
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)  # if they were asked for


class _Threads:
    """Processor time of all threads of this process but the one that steps engines."""

    def __init__(self) -> None:
        self._charged = self._now()

    def take(self) -> float:
        """What they have used since the last call."""
        before, self._charged = self._charged, self._now()
        return self._charged - before

    def _now(self) -> float:
        return time.process_time() - time.thread_time()


class MeasuredEngine:
    """One engine core. `wrap_store` is put around the stores below its slab."""

    def __init__(
        self, model: Path, options: dict[str, Any], wrap_store: WrapStore | None = None
    ) -> None:
        real = vars(offload)["build_offload"]

        def build(*args: Any, **given: Any) -> Any:
            return real(*args, **given | ({"wrap_store": wrap_store} if wrap_store else {}))

        with patch.multiple(offload, build_offload=build):
            self.core = EngineCore(engine_config(model, {"dtype": "float32"} | options))
        self.has_tiers = "kv_offload" in options
        self._threads = _Threads()
        self._wake = threading.Event()
        self.core.set_wakeup(self._wake.set)
        self._num_requests = 0

    def run(
        self,
        prompts: Prompts,
        params: SamplingParams,
        *,
        one_by_one: bool = False,
        watch_steps: bool = False,
    ) -> Run:
        """Answer all prompts, together or one after the other. Raises RunFailed."""
        run = Run([[] for _ in prompts])
        groups = [[index] for index in range(len(prompts))] if one_by_one else [range(len(prompts))]
        busy, began = time.thread_time(), time.perf_counter()
        for group in groups:
            self._answer({index: prompts[index] for index in group}, params, run, watch_steps)
        run.wall_seconds = time.perf_counter() - began
        if self.has_tiers:
            self._settle()
        run.cpu_seconds = time.thread_time() - busy
        if self.has_tiers:
            run.cpu_seconds += self._threads.take()
        return run

    def likeliest(self, context: Sequence[int], count: int) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens."""
        packed = np.asarray(context, "<i4").tobytes()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=count)
        request = AddRequest("likeliest", packed, params, skip_reading_prefix_cache=True)
        self._take(self.core.add(request), {}, Run([]))
        found: dict[int, float] = {}
        while self.core.has_work():
            for output in self.core.step():
                for each in output.logprobs or ():
                    # The chosen token comes first, and again in its rank.
                    found = dict(zip(each.token_ids[1:], each.logprobs[1:], strict=True))
        self.forget("pool")  # whoever asks next is to find what was there: nothing
        return found

    def rest(self) -> None:
        """Wait until nothing is on its way to or from a store. Raises RunFailed."""
        deadline = time.monotonic() + _REST_SECONDS
        while True:
            self._settle()
            traffic = self.stats()["traffic"].values()
            if not any(each["active_promotions"] or each["active_cascades"] for each in traffic):
                return
            if time.monotonic() > deadline:
                raise RunFailed(f"a tier was still at work after {_REST_SECONDS:g} s")

    def forget(self, scope: str) -> None:
        """Reset the prefix cache: "pool", or "all" for the tiers too."""
        self.core.call("reset_prefix_cache", scope)

    def stats(self) -> dict[str, Any]:
        """The connector's counters."""
        found: dict[str, Any] = self.core.call("stats", "")["connector"]
        return found

    def close(self) -> None:
        """Without writing back what nobody will ask for."""
        self.core.shutdown(0.0)

    def _answer(
        self, prompts: dict[int, Sequence[int]], params: SamplingParams, run: Run, watch_steps: bool
    ) -> None:
        core, deadline = self.core, time.monotonic() + RUN_SECONDS
        names = {}
        for index, prompt in prompts.items():
            self._num_requests += 1
            names[str(self._num_requests)] = index
            packed = np.asarray(prompt, "<i4").tobytes()
            self._take(core.add(AddRequest(str(self._num_requests), packed, params)), names, run)
        while names:
            if time.monotonic() > deadline:
                raise RunFailed(f"{len(names)} requests had no answer after {RUN_SECONDS:g} s")
            if not core.has_work():
                self._wake.wait(core.idle_seconds())
                self._wake.clear()
            elif watch_steps:
                self._take(self._watch_step(run.steps), names, run)
            else:
                self._take(core.step(), names, run)

    def _watch_step(self, steps: list[Step]) -> list[TokenOutput]:
        counts = self.core.scheduler.counts
        tokens = counts["scheduled_tokens"]
        stored = self._num_stored()
        busy, began = time.thread_time(), time.perf_counter()
        outputs = self.core.step()
        wall, busy = time.perf_counter() - began, time.thread_time() - busy
        tokens = counts["scheduled_tokens"] - tokens
        if tokens:
            steps.append(Step(tokens, wall, busy, self._num_stored() - stored))
        return outputs

    def _num_stored(self) -> int:
        return int(self.stats()["stored_blocks"]) if self.has_tiers else 0

    def _take(self, outputs: list[TokenOutput], names: dict[str, int], run: Run) -> None:
        for output in outputs:
            if output.error is not None:
                raise RunFailed(f"a request failed: {output.error}")
            run.token_ids[names[output.request_id]] += output.new_token_ids
            run.cached_tokens.update(output.cached_tokens_by_tier or {})
            if output.finish_reason is not None:
                del names[output.request_id]

    def _settle(self) -> None:
        """Take in what copies and disks have ended, so that a run begins with nothing waiting."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            while self.core.has_work() and time.monotonic() < deadline:
                self.core.step()
            if not self._wake.wait(_QUIET_SECONDS):
                return
            self._wake.clear()
