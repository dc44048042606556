# SPDX-License-Identifier: Apache-2.0
"""The real engine core over simulated parts: what it adds, steps, holds and ends is the product's;
the model is numbers, and the executor computes them in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import Choice
from stratakv.connector.costs.rates import PrefillRate
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.parts import Parts
from stratakv.engine.config.engine_config import ModelConfig, SchedulerConfig
from stratakv.engine.config.lora_config import LoraConfig
from stratakv.engine.core.adapter_registry import AdapterRegistry
from stratakv.engine.core.client_calls.calls import CoreCalls
from stratakv.engine.core.continued.beam_families import BeamFamilies
from stratakv.engine.core.continued.continuations import Continuations
from stratakv.engine.core.continued.prompt_sessions import PromptSessions
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import StepHandle
from stratakv.engine.core.handover import HeldAnswers
from stratakv.engine.core.request_adder import RequestAdder
from stratakv.engine.core.request_builder import RequestBuilder
from stratakv.engine.core.step_pipeline import StepPipeline
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from stratakv.engine.scheduler.speculation import Speculation
from stratakv.engine.structured.manager import GrammarManager
from stratakv.tiers.base import StoreTier
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.policies.known_policies import policy_factory

from ..engine.scheduler.conftest import HASHER, SIZE, VOCAB
from .clock import VirtualClock
from .device import COPY_SECONDS, SimDevice
from .small_slab import small_slab
from .tiny_engine import LAYOUT, EngineParts, InjectedFault, Slots, TinyEngine

# A session waits so long for a part.
SESSION_IDLE_SECONDS = 2.0


class SimExecutor:
    """Computes a step where the core asks for its result. `fails`: whether this one raises, and
    whether before its pass. `spoils`: which request of it writes NaN, if any."""

    is_alive = True

    def __init__(
        self,
        engine: TinyEngine,
        fails: Callable[[], bool | None],
        spoils: Callable[[SchedulerOutput], str],
    ) -> None:
        self._engine = engine
        self._fails = fails
        self._spoils = spoils
        self.wrong: AssertionError | None = None  # the core takes it for a fault of a worker

    def dispatch(self, step: SchedulerOutput) -> StepHandle:
        return StepHandle(step)

    def sample(self, handle: StepHandle, mask: object = None) -> None:
        pass

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        step = handle.step
        before = self._fails() if step.num_scheduled_tokens else None
        try:
            if before is None:
                if step.num_scheduled_tokens and (name := self._spoils(step)):
                    self._engine.spoil(name)
                return self._engine.run(step)
            self._engine.begin(step)
            if not before:
                self._engine.compute(step)
        except AssertionError as error:
            self.wrong = error
            raise
        raise InjectedFault("the worker was to fail")


class _NoStats:
    """In place of what the core measures."""

    def __init__(self) -> None:
        self.savings = self

    def note_step(self, *_facts: Any) -> None:
        pass

    def add_counts(self, _counts: Any) -> None:
        pass


class SimCore(EngineCore):
    """Drawn from `rng`. `store` is what it shares with others; `role` as of `--role`. `more` draws
    what other draws do not depend on, the drafts of a core with `speculation` among it."""

    def __init__(  # what the product's does opens models
        self,
        role: str,
        store: StoreTier,
        clock: VirtualClock,
        rng: random.Random,
        contents: dict[bytes, list[int]],
        max_model_len: int,
        *,
        fault_rate: float,
        pass_seconds: float,
        fails: Callable[[], bool | None],
        spoils: Callable[[SchedulerOutput], str],
        speculation: Speculation | None,
        more: random.Random,
    ) -> None:
        slots = Slots(1 + max_model_len // SIZE + rng.choice([0, 1, 4, 20]))
        num_slots = rng.choice([2, 8, 40])
        self.slab = small_slab(LAYOUT, num_slots, policy_factory("lru")(num_slots))
        signal = CopySignal()
        hierarchy = Hierarchy(
            self.slab,
            [store],
            wakeup=signal.wake,
            options=HierarchyOptions(
                watermark=rng.choice([0.25, 1.0]),
                read_seconds=rng.choice([0.05, 5.0]),
                write_seconds=rng.choice([0.05, 15.0]),
            ),
        )
        device = SimDevice(clock, rng, fault_rate, copy_seconds=COPY_SECONDS)
        device.register_slab(self.slab)
        choice = rng.choice([Choice.AUTO, Choice.AUTO, Choice.LOAD, Choice.LOAD])
        prefill = PrefillRate()
        if seconds := rng.choice([None, 0.01, 0.05]):  # a token, as it once was
            prefill.record_prefill(1, 0, seconds)
        side = OffloadScheduler(
            ConnectorContext(hierarchy, Parts(SIZE), signal, choice=choice, prefill=prefill)
        )
        if role == "decode":
            side.prompts_elsewhere.expect_prompts()
        worker = OffloadWorker(device, signal.note_ended, store_wait_seconds=1.0)
        worker.register_pool(slots.pool)  # type: ignore[arg-type]
        num_seqs = rng.randint(1, 4)
        self.engine = TinyEngine(
            EngineParts(side, worker),
            slots,
            SchedulerConfig(
                max_num_batched_tokens=num_seqs + rng.choice([3, 9, max_model_len]),
                max_num_seqs=num_seqs,
                enable_chunked_prefill=True,
                admit_below=0.8,
                preempt_above=rng.choice([0.8, 1.0]),
            ),
            max_model_len=max_model_len,
            targets=lambda: device.targets,
            pass_time=lambda: clock.advance(pass_seconds),
            speculation=speculation,
            drafts=more,
        )
        self.engine.contents = contents
        self.scheduler = self.engine.scheduler
        self._connector = side
        self.simulated = SimExecutor(self.engine, fails, spoils)
        self._executor = self.simulated  # type: ignore[assignment]
        self._stats = _NoStats()  # type: ignore[assignment]
        self._held = HeldAnswers(self.scheduler.manager, side.handover if side.wants_all else None)
        self._request_builder = RequestBuilder(VOCAB, 8, max_model_len, HASHER, b"", role)
        # Nobody asks for a grammar here, so no model's vocabulary is read.
        self._grammars = GrammarManager(Path(), VOCAB, (), most_waiting=1)
        self._continuations = Continuations(
            BeamFamilies(self.scheduler, self._request_builder, (), VOCAB),
            PromptSessions(
                self.scheduler, self._request_builder, SESSION_IDLE_SECONDS, more.choice([1, 3])
            ),
        )
        self.sessions = self._continuations.sessions
        self.steps = StepPipeline(
            self.scheduler, self.executor, self._grammars, self._continuations, self._stats, depth=1
        )
        self._adder = RequestAdder(
            self.scheduler,
            self._request_builder,
            self._grammars,
            self._held,
            side,
            self._continuations,
            max_steps_in_flight=1,
        )
        self.adapters = AdapterRegistry(
            LoraConfig(), ModelConfig(Path("none"), "simulated"), self._executor
        )
        self._calls = CoreCalls(
            self.scheduler,
            side,
            self._request_builder,
            self._grammars,
            self._held,
            self._continuations.sessions,
            self._stats,
            self.adapters,
        )
