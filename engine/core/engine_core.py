# SPDX-License-Identifier: Apache-2.0
"""The engine core: builds model, pool, tiers, scheduler and worker, and runs their steps.

One thread makes all calls. `core_messages.py` defines the messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ...connector.base import KVConnectorScheduler, NullConnector
from ...connector.costs.rates import PrefillRate
from ...connector.messages import NOTHING_FINISHED
from ...tiers.block import Identity
from ...tiers.settings.sizes import show_size
from ..cache.block_hash import make_block_hasher
from ..cache.kv_cache_manager import KVCacheManager
from ..config.engine_config import EngineConfig
from ..models.checkpoint.fingerprint import ModelFiles
from ..models.dtypes import dtype_name
from ..models.model_spec import resolve_max_model_len
from ..models.spec.spec_parser import load_model_spec
from ..observer import Observer
from ..request.core_messages import (
    ABORTED,
    PROTOCOL_VERSION,
    STOPPED,
    AddRequest,
    ExtendPrompt,
    Ready,
    TokenOutput,
)
from ..request.request import BlockHasher, RequestStatus
from ..scheduler.scheduler import RETRY_SECONDS, Pause, Scheduler
from ..scheduler.speculation import Speculation
from ..scheduler.step import Pipelining
from ..structured.manager import GrammarManager
from ..trace.step_trace import NO_CONNECTOR, StepTrace
from ..worker.pool_demand import check_pool_size
from ..worker.runtime.pool_sizing import context_that_fits
from .adapter_registry import open_registry
from .client_calls.calls import CoreCalls
from .continued.continuations import Continuations
from .core_stats import CoreStats
from .executor import Executor, InProcessExecutor, load_runner
from .handover import HeldAnswers
from .offload import OpenTiers, describe_identity, open_tiers, parts_of
from .request_adder import RequestAdder
from .request_builder import RequestBuilder
from .setup.model_check import blocks_of_pool, check_backend, demand_of, find_draft
from .setup.resolve_placement import dtype_for, placement_of
from .setup.start_calibration import CalibrationBudget, calibrate
from .step_pipeline import StepPipeline
from .worker_process.process_executor import ProcessExecutor

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

_IDLE_SECONDS = 5.0
# The least seconds for copies under way at shutdown, even if no time is left.
MIN_COPY_SECONDS = 1.0


class EngineCore:
    """The core of one served model.

    A ConfigError, for settings, a model directory or tiers that cannot work, leaves nothing open.
    `progress` is called with a line for each phase of the start. Up to `max_steps_in_flight` steps
    are in flight; the default is 2 if a step is scheduled while another is computed, else 1.
    `observer` is called with every decision, and must change none."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        max_steps_in_flight: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self._progress = progress or logger.info
        self._closed = False
        self.spec = load_model_spec(config.model.path)
        self.max_model_len = resolve_max_model_len(self.spec, config.model.max_model_len)
        check_backend(config)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self._placement = placement_of(config)
        device = self._placement.device
        if max_steps_in_flight is None:
            # With a CPU in the core's process, one thread computes and schedules in turn, without
            # overlap.
            overlaps = config.executor == "mp" or device.type != "cpu"
            max_steps_in_flight = 2 if config.async_scheduling and overlaps else 1
        self._dtype = dtype_for(config, self.spec, device)
        self._largest_embedding = float(torch.finfo(self._dtype).max)
        dtype = dtype_name(self._dtype)
        self._draft = find_draft(config, self.spec)
        demand = demand_of(config, self.spec, dtype, self._draft)
        self._groups = demand.groups
        num_blocks = blocks_of_pool(config, self.spec, demand, self._draft)
        if num_blocks is not None:
            if config.model.max_model_len is None:
                self.max_model_len = context_that_fits(demand, num_blocks, self.max_model_len)
            check_pool_size(demand, num_blocks, self.max_model_len, on_host=device.type == "cpu")
        files = self._read_model_files()
        identity = Identity(
            self._groups.bound(*[each.fingerprint for each in files]),
            config.model.revision + self._page_order(),
            dtype,
            self._groups.layout.kv_dtype,
            config.cache.block_size,
        )
        self._max_steps_in_flight = max_steps_in_flight
        self._observers = [] if observer is None else [observer]
        self._trace: StepTrace | None = None
        self._connector: KVConnectorScheduler = NullConnector()
        self._tiers: OpenTiers | None = None
        self._executor: Executor | None = None
        self._prefill = PrefillRate()  # one estimate, read by the tiers too
        try:
            if config.offload.enabled:
                self._tiers = open_tiers(
                    config.offload,
                    self._groups.layout,
                    # Digests of `sha256_cbor` do not include the identity, so the store checks it.
                    identity.root() if config.cache.block_hash == "sha256_cbor" else b"",
                    self._progress,
                    device=config.model.device,
                    prefill=self._prefill,
                    with_worker=config.executor != "mp",
                    parts=parts_of(self._groups),
                )
                self._connector = self._tiers.side
                elsewhere = self._connector.prompts_elsewhere
                if config.role == "decode" and elsewhere is not None:
                    elsewhere.expect_prompts()
            self._build_engine(num_blocks)
            for each in files:  # the hashed files must be the loaded files
                each.check_unchanged()
            self.adapters = open_registry(config, self.executor)
            self._request_builder = RequestBuilder(
                self.spec.vocab_size,
                self.spec.hidden_size,
                self.max_model_len,
                self._make_hasher(identity.root()),
                config.tenant_secret,
                config.role,
                takes_priority=self.scheduler.takes_priority,
                largest_embedding=self._largest_embedding,
                tells_experts=config.model.enable_return_routed_experts,
                adapters=self.adapters,
                picture_token=None if self.spec.vision is None else self.spec.vision.token_id,
            )
            self._grammars = GrammarManager(
                config.model.path,
                self.spec.vocab_size,
                self.spec.eos_token_ids,
                backend=config.structured_outputs_backend,
                most_waiting=config.scheduler.max_waiting_requests,
            )
            self._continuations = Continuations.of(
                self.scheduler, self._request_builder, self.spec, config
            )
            self.steps = StepPipeline(
                self.scheduler,
                self.executor,
                self._grammars,
                self._continuations,
                self._stats,
                max_steps_in_flight,
            )
            self._adder = RequestAdder(
                self.scheduler,
                self._request_builder,
                self._grammars,
                self._held,
                self._connector,
                self._continuations,
                max_steps_in_flight=max_steps_in_flight,
            )
            self._calls = CoreCalls(
                self.scheduler,
                self._connector,
                self._request_builder,
                self._grammars,
                self._held,
                self._continuations.sessions,
                self._stats,
                self.adapters,
            )
            self._identity = describe_identity(config, identity, self._groups)
            self._try_offload()
        except BaseException:
            self._drain_and_close(0.0)
            raise

    @property
    def executor(self) -> Executor:
        assert self._executor is not None
        return self._executor

    @property
    def num_failed_steps(self) -> int:
        """The number of steps that the worker has failed in a row."""
        return self.steps.num_failed_steps

    def ready(self) -> Ready:
        """Return the properties of the engine that clients need."""
        estimates = self._connector.estimates
        return Ready(
            protocol_version=PROTOCOL_VERSION,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            num_blocks=self.num_blocks,
            block_size=self.config.cache.block_size,
            eos_token_ids=list(self.spec.eos_token_ids),
            tiers=("pool", *self.config.offload.tier_names),
            hidden_size=self.spec.hidden_size,
            largest_embedding=self._largest_embedding,
            identity=self._identity,
            takes_priority=self.scheduler.takes_priority,
            tells_experts=self.config.model.enable_return_routed_experts,
            pins_turns=self.scheduler.pins_turns,
            tiers_down=[] if estimates is None else estimates.tiers_down(),
            session_idle_seconds=self.config.session_idle_seconds,
            adapters=self.adapters.loaded,
            max_adapters=self.config.lora.num_slots,
        )

    def add(self, request: AddRequest) -> list[TokenOutput]:
        """Queue a request. If it cannot run, return an error as its only output."""
        return self._adder.add(request)

    def extend_prompt(self, message: ExtendPrompt) -> list[TokenOutput]:
        """Add the next part of a session's prompt. Return the last outputs of sessions that end."""
        return self._adder.extend_prompt(message)

    def abort_requests(self, request_ids: Iterable[str], reason: str = ABORTED) -> None:
        """End requests whose client has left, or needs no more tokens (STOPPED). Unknown ids are
        ignored."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._held.drop_answer(request_id)
        self._grammars.cancel_waiting(request_ids)
        self._continuations.abort(request_ids)
        stopped = reason == STOPPED
        status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(request_ids, status)

    def call(self, name: str, argument: str) -> Any:
        """Answer a client's call. `CoreCalls.answer` lists the names, arguments and errors."""
        return self._calls.answer(name, argument)

    def has_work(self) -> bool:
        """Whether a step could do anything now."""
        if self.steps.in_flight or self.scheduler.has_runnable_work() or self._held.is_due:
            return True
        if self._grammars.is_due or self._continuations.sessions.is_due:
            return True
        if self.adapters.find_unused(self._continuations.sessions.all_requests):
            return True
        return not self.executor.is_alive  # with a dead executor the next step raises the reason

    def idle_seconds(self) -> float:
        """Return the seconds that the loop may wait for an event before it checks `has_work`
        again."""
        scheduler = self.scheduler
        may_retry = scheduler.num_waiting and scheduler.paused is not Pause.ALL
        return min(
            RETRY_SECONDS if may_retry else _IDLE_SECONDS,
            scheduler.pin_seconds,
            self._held.idle_seconds,
            self._grammars.idle_seconds,
            self._continuations.sessions.idle_seconds,
        )

    def step(self) -> list[TokenOutput]:
        """Begin steps until `max_steps_in_flight` are in flight, and process the result of the
        oldest. An error of the worker ends the requests of the failed step and of all later steps
        in flight. Raises RuntimeError if the worker cannot recover (MAX_FAILED_STEPS errors in a
        row, or a lost device)."""
        outputs = self._adder.add_compiled() + self._adder.add_whole()
        stepped = self.steps.run_step()
        self.adapters.release_unused(self._continuations.sessions.all_requests)
        return outputs + self._held.filter_outputs(stepped) + self._held.release_answers()

    def enter_thread(self) -> None:
        """Make the calling thread the step thread. Another thread may have built the core."""
        self.executor.enter_thread()

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the function that is called, from any thread, when `has_work` may have become
        True."""
        self._connector.set_wakeup(wakeup)
        self._grammars.set_wakeup(wakeup)

    def shutdown(self, timeout_seconds: float | None = None) -> None:
        """Abort all requests, store the pool's blocks in the tiers and close the tiers, within
        `timeout_seconds` (default: `offload.shutdown_seconds`). A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if timeout_seconds is None:
            timeout_seconds = self.config.offload.shutdown_seconds
        now = time.monotonic()
        deadline = now + timeout_seconds
        # If the worker hangs, half of the time is left for the tiers.
        self.executor.end_by(now + max(MIN_COPY_SECONDS, timeout_seconds / 2))
        self.scheduler.finish_requests(list(self.scheduler.requests))
        self.steps.give_up_steps()
        self._grammars.close()
        self.adapters.close(timeout_seconds / 2)
        if self._connector.has_tiers and self.executor.is_alive:
            resident = self.scheduler.manager.pool.resident()
            self._progress(f"shutting down, {len(resident)} blocks of the pool go to the tiers")
            try:
                self.executor.start_copies(self._connector.build_meta(resident))
            except Exception as error:  # the tiers must still save their blocks
                logger.error("the blocks of the pool did not go to the tiers", exc_info=error)
        self._drain_and_close(deadline - time.monotonic())

    def _build_engine(self, num_blocks: int | None) -> None:
        """Build scheduler and worker. `num_blocks` counts blocks over all layers; None means as
        many as fit into the GPU memory after the weights."""
        config = self.config
        if num_blocks is None:
            self._executor = executor = self._load_model(None)
            self.num_blocks = executor.num_blocks
            self.max_model_len = executor.max_model_len
        else:
            self.num_blocks = self._groups.num_pages(num_blocks)
        self._stats = CoreStats(
            config, self._groups.layout, self.num_blocks, self._prefill, len(self._groups)
        )
        if config.step_trace is not None:
            self._trace = StepTrace(
                config.step_trace,
                config.scheduler,
                self._connector,
                model=config.model.served_name,
                block_size=config.cache.block_size,
                num_blocks=self.num_blocks - 1,
                connector_name=",".join(config.offload.tier_names) or NO_CONNECTOR,
            )
            self._observers.append(self._trace)
        state = self._groups.state
        # The scheduler may refuse the settings, so it is made before the weights are loaded.
        self.scheduler = Scheduler(
            replace(
                config.scheduler,
                max_adapters=config.lora.num_slots,
                pictures=self.spec.vision is not None,
            ),
            KVCacheManager(
                self.num_blocks,
                config.cache.block_size,
                self.max_model_len,
                enable_caching=config.cache.enable_prefix_caching,
                watermark=config.cache.watermark,
                attention=self._groups.attention,
                most_step_tokens=config.scheduler.most_step_tokens,
                num_state_pages=0 if state is None else state.num_pages,
                state_interval=config.cache.state_checkpoint_interval,
            ),
            eos_token_ids=frozenset(self.spec.eos_token_ids),
            connector=self._connector,
            fails_with_load=config.offload.load_failure == "fail",
            pipelining=Pipelining(self._max_steps_in_flight, config.async_scheduling),
            speculation=self._make_speculation(),
            observers=self._observers,
        )
        self._held = HeldAnswers(
            self.scheduler.manager, self._connector.handover if self._connector.wants_all else None
        )
        if self._executor is None:
            self._executor = self._load_model(num_blocks)

    def _read_model_files(self) -> list[ModelFiles]:
        """Hash the files of the model and of its draft model."""
        random_for = f"{self._placement.device.type}, torch {torch.__version__}"
        drafts = [] if self._draft is None else [self._draft]
        models = [(self.config.model.path, self.spec), *drafts]
        return [
            ModelFiles.read(
                path,
                spec,
                random_for=random_for if self._placement.random_weights else None,
                progress=self._progress,
            )
            for path, spec in models
        ]

    def _page_order(self) -> str:
        """Return a name for the byte order within a block, as part of the identity; "" for the
        usual order."""
        cache = self.config.cache
        if cache.kernel_block_size in (None, cache.block_size):
            return ""
        return f"\nkernel blocks of {cache.kernel_block_size}"

    def _load_model(self, num_blocks: int | None) -> Executor:
        config = self.config
        self._progress(f"loading {config.model.path}")
        self._tell_states()
        if config.executor == "mp":
            return ProcessExecutor(config, num_blocks, self.max_model_len, self._tiers)
        runner = load_runner(
            config,
            num_blocks,
            self.max_model_len,
            spec=self.spec,
            draft=self._draft,
            dtype=self._dtype,
            placement=self._placement,
            connector=None if self._tiers is None else self._tiers.worker,
            progress=self._progress,
        )
        return InProcessExecutor(runner)

    def _try_offload(self) -> None:
        """Measure and report first estimates of the costs of loading and computing."""
        estimates = self._connector.estimates
        if estimates is None:
            return
        budget = CalibrationBudget(
            self.config.cache.block_size,
            self.num_blocks,
            self.max_model_len,
            self.config.scheduler.max_num_batched_tokens,
            len(self._groups),
        )
        savings = self._stats.savings
        told = calibrate(self.executor, budget, self._connector, estimates, savings)
        self._progress(told)

    def _tell_states(self) -> None:
        """Report the memory that states take, or warn that settings for states have no effect."""
        state, interval = self._groups.state, self.config.cache.state_checkpoint_interval
        if state is not None:
            size = show_size(self._groups.checkpoint_bytes)
            self._progress(
                f"layers carry states: {size} of each running request, and for a checkpoint "
                f"{state.num_pages} blocks of the pool"
            )
            asked = self.config.speculative.num_tokens
            most = self.config.speculative.most_drafts(has_states=True)
            if 0 < most < asked:
                self._progress(f"a step checks {most} drafts at most, since each has states")
            if interval and not self.config.cache.enable_prefix_caching:
                logger.warning(
                    "--state-checkpoint-interval %d means nothing here: without prefix caching no "
                    "checkpoints are made",
                    interval,
                )
        elif interval:
            logger.warning(
                "--state-checkpoint-interval %d means nothing here: no layer of this model carries "
                "a state",
                interval,
            )
        if self.config.model.enable_return_routed_experts and self.config.offload.enabled:
            logger.warning(
                "requests that are told their experts compute their prompts, and ask no tier; see "
                "routed_experts_prompt_start"
            )

    def _make_speculation(self) -> Speculation | None:
        config = self.config.speculative
        if not config.is_on:
            return None
        most_drafts = config.most_drafts(has_states=self.spec.state is not None)
        return Speculation(most_drafts, config.adaptive, self._draft is not None)

    def _make_hasher(self, root: bytes) -> BlockHasher | None:
        cache = self.config.cache
        if not cache.enable_prefix_caching:
            return None
        return make_block_hasher(root, cache.block_size, cache.block_hash)

    def _drain_and_close(self, timeout_seconds: float) -> None:
        """Wait for copies and process their results, then close the tiers, within
        `timeout_seconds`."""
        deadline = time.monotonic() + max(0.0, timeout_seconds)
        # Copies take milliseconds. If a copy hangs, half of the time is left for the tiers.
        copy_seconds = max(MIN_COPY_SECONDS, timeout_seconds / 2)
        output = None
        if self._executor is not None:
            output = self._executor.shutdown(copy_seconds)
        elif self._tiers is not None and self._tiers.worker is not None:
            self._tiers.worker.shutdown(copy_seconds)
            output = self._tiers.worker.poll()
        self._connector.update_from_worker(output or NOTHING_FINISHED)
        if self._trace is not None:
            self._trace.close()
        self._connector.shutdown(max(0.0, deadline - time.monotonic()))
