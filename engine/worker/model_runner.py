# SPDX-License-Identifier: Apache-2.0
"""ModelRunner: runs a step on the device: batch changes, copies, forward pass, sampling.

One thread runs all steps. The runner has no queues or tiers: `SchedulerOutput` names tokens and
blocks, and the connector copies blocks into and out of the pool around a forward pass. The host
waits once in a step, for the sampled tokens. The next step can begin before:

    begin 1 · sample 1 · begin 2 · collect 1 · sample 2 · begin 3 · collect 2 · ...

Step 2 reads the tokens of step 1 on the device. The host collects these tokens before step 2
samples, because sampling depends on them (penalties, seeds, masks)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from ...connector.base import CLOSE_SECONDS, KVConnectorWorker, NullConnectorWorker
from ...connector.messages import NOTHING_TO_MOVE, ConnectorMetadata, ConnectorWorkerOutput
from ...kernels.kernel_choice import AUTO, PLAIN
from ..batch.batch_update import IntArray
from ..cache.group_spec import plan_groups, state_bytes
from ..models.decoder import Embeds
from ..models.dtypes import compute_dtype, dtype_name, kv_dtype_name
from ..models.model_source import ModelSource
from ..models.model_spec import ModelSpec
from ..sampling.copies import to_device
from ..sampling.processor_loading import LoadedProcessor
from ..sampling.sampler import Sampler
from ..sampling.token_mask import TokenMask
from ..scheduler.output import ModelRunnerOutput, SchedulerOutput
from .adapter_slots import AdapterSlots
from .begun_step import BegunStep
from .block_copier import BlockCopier
from .block_table import BlockTable, MultiGroupBlockTable
from .forward.attention_metadata import ranges
from .forward.forward import HostEmbeds, StepInputs, step_order
from .input_batch import InputBatch, PromptEmbeds
from .kv_pool import KvPool
from .pictures.picture_inputs import PictureInputs
from .pool_demand import PoolDemand, check_pool_size
from .pooling_collector import PoolingCollector
from .prompt_logprobs import PromptLogprobsCollector
from .routed_experts import RoutedExpertsCollector
from .runtime.device_runtime import DeviceRuntime
from .runtime.model_loading import ModelLoader
from .runtime.placement import Placement
from .runtime.pool_sizing import MIN_CONTEXT, context_that_fits
from .runtime.runtimes import make_forward, open_runtime, open_sizer
from .sampled_tokens import SampledTokens
from .speculation.drafted_rows import DraftedRows
from .speculation.proposer import ComputedStep, Proposer
from .speculation.proposers import make_drafter
from .speculation.step_drafts import StepDrafts
from .state_slots import StateSlots
from .step_batch import StepBatch

logger = logging.getLogger(__name__)

DEFAULT_PLACEMENT = Placement()


class StepRefused(RuntimeError):
    """The error of a step that was scheduled before an earlier step failed, and was not
    computed."""


P = ParamSpec("P")
T = TypeVar("T")


def _in_queue(
    method: Callable[Concatenate[ModelRunner, P], T],
) -> Callable[Concatenate[ModelRunner, P], T]:
    """Decorate a method so that its work is queued on the runner's stream from any thread."""

    def call(self: ModelRunner, /, *args: P.args, **given: P.kwargs) -> T:
        with self._runtime.entered():
            return method(self, *args, **given)

    return update_wrapper(call, method)


class ModelRunner:
    """A model, its KV pool and its batch on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        path: Path,
        *,
        dtype: str,
        num_blocks: int | None,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        is_length_asked: bool = True,
        num_groups: int = 1,
        kernel_block_size: int | None = None,
        most_step_tokens: int | None = None,
        connector: KVConnectorWorker | None = None,
        placement: Placement = DEFAULT_PLACEMENT,
        runtime: DeviceRuntime | None = None,
        processors: Sequence[LoadedProcessor] = (),
        proposer: Proposer | None = None,
        draft: ModelSource | None = None,
        most_drafts: int = 0,
        tells_experts: bool = False,
        num_adapter_slots: int = 0,
        max_lora_rank: int = 0,
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        """Load the model under `path` and allocate everything that a step needs.

        Without `num_blocks`, the pool takes the rest of a GPU's memory. If the pool then has less
        than `max_model_len` tokens, and `is_length_asked` is false (the user gave no length),
        `max_model_len` is lowered. Blocks are counted over all layers; with several cache groups
        each block is divided into pages. Attention may read smaller blocks, of `kernel_block_size`
        tokens. A step computes at most `most_step_tokens` tokens of one request and
        `max_num_batched_tokens` in all. `runtime` is the runtime of the placement's device;
        `processors` are logits processors of other packages. `proposer`, or the model or EAGLE head
        `draft`, proposes at most `most_drafts` tokens for a request in a step. With
        `tells_experts`, clients may request the experts of tokens. A step has at most
        `num_adapter_slots` different adapters, each of rank `max_lora_rank` or less. Raises
        ConfigError if the weights do not fit `spec`, the pool cannot hold one request of the
        requested length, the layers cannot be divided into `num_groups` groups, or a processor
        cannot be made."""
        device = placement.device
        self._sampler = Sampler(max_num_seqs, spec.vocab_size, spec.eos_token_ids, processors)
        self._runtime = runtime = runtime or open_runtime(placement)
        with runtime.entered():
            compute = compute_dtype(dtype, device.type, spec.stored_dtype)
            layout = spec.layout(block_size, kv_dtype_name(placement.kv_cache_dtype, compute))
            of_draft = (
                None
                if draft is None
                else draft.spec.draft_layout(block_size, layout.kv_dtype, dtype_name(compute))
            )
            states = state_bytes(spec.state, dtype_name(compute))
            groups = plan_groups(layout, num_groups, spec.layer_attention, of_draft, states)
            demand = PoolDemand(groups, most_step_tokens or max_num_batched_tokens)
            models = ModelLoader(path, spec, draft, placement, compute)
            models.allow_adapters(num_adapter_slots, max_lora_rank)
            if num_blocks is None:
                sizer = open_sizer(placement)
                loaded = models.load_models(max_model_len)
                num_blocks = sizer.blocks(
                    loaded.model,
                    demand,
                    max_model_len=max_model_len if is_length_asked else MIN_CONTEXT,
                    max_tokens=max_num_batched_tokens,
                    max_requests=max_num_seqs,
                    most_drafts=most_drafts,
                    encoder=loaded.encoder,
                )
                if not is_length_asked:
                    max_model_len = context_that_fits(demand, num_blocks, max_model_len)
            else:
                check_pool_size(demand, num_blocks, max_model_len, on_host=device.type == "cpu")
                loaded = models.load_models(max_model_len)
            self.model = loaded.model
            self.groups = groups
            self.pool = KvPool(
                groups.layout, groups.num_pages(num_blocks), device, kernel_block_size
            )
            kernel = PLAIN if models.is_plain else AUTO
            self._copier = BlockCopier(self.pool.tensor, kernel)
            self.max_model_len = max_model_len
            self.max_num_batched_tokens = max_num_batched_tokens
            blocks_per_row = -(-max_model_len // block_size)
            tables = [
                BlockTable(max_num_seqs, blocks_per_row, block_size, kernel_block_size)
                for _ in groups.groups
            ]
            self.batch = InputBatch(max_num_seqs, max_model_len, MultiGroupBlockTable(tables))
            self._steps = StepBatch(self.batch)
            make = partial(
                make_forward, runtime, placement=placement, compute=compute,
                max_model_len=max_model_len, max_requests=max_num_seqs, progress=progress,
            )  # fmt: skip
            pages = self.pool.pages_of(groups)
            if tells_experts:
                self.model.record_experts(max_num_batched_tokens)
            self._adapters: AdapterSlots | None = None
            if self.model.slots is not None:
                self._adapters = AdapterSlots(self.model.slots, spec, compute, max_lora_rank)
            self._forward = make(self.model, pages, max_tokens=max_num_batched_tokens)
            if loaded.draft is not None:
                proposer = make_drafter(
                    loaded.draft,
                    make,
                    self.batch,
                    self.pool.pages_of_draft(groups),
                    vocab_size=spec.vocab_size,
                    max_tokens=max_num_batched_tokens,
                    dtype=dtype_name(compute),
                )
            self._states = self._make_states(compute, max_num_seqs, most_drafts)
            self._drafts = StepDrafts(self.batch, self._sampler, proposer)
            self._tokens = SampledTokens(self.model, self._sampler, self.batch, self._drafts)
            self._prompt_logprobs = PromptLogprobsCollector(self.model.logits)
            self._experts: RoutedExpertsCollector | None = None
            if (chosen := self.model.chosen_experts) is not None and spec.experts is not None:
                number = spec.experts.num_experts
                self._experts = RoutedExpertsCollector(chosen, number, max_model_len)
            self._pooling = PoolingCollector()
            self._prompt_embeds = PromptEmbeds(spec.hidden_size)
            self._pictures = None
            if loaded.encoder is not None:
                self._pictures = PictureInputs(loaded.encoder, spec, device)
            self._last_failed_id = 0
            self._due: BegunStep | None = None  # a sampled step with uncollected tokens
            self._connector = NullConnectorWorker() if connector is None else connector
            self._connector.register_pool(self.pool.tensor)

    def _make_states(
        self, compute: torch.dtype, max_num_seqs: int, most_drafts: int
    ) -> StateSlots | None:
        spec, groups = self.model.spec, self.groups
        if spec.state is None or groups.state is None:
            return None
        return StateSlots.allocate(
            spec.state,
            compute,
            self.pool.tensor,
            self.batch,
            num_requests=max_num_seqs,
            num_pages=groups.state.num_pages,
            most_drafts=most_drafts,
        )

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        step = self.launch_step(output)
        self.sample(step)
        return self.collect_output(step)

    def enter_thread(self) -> None:
        """Make the device's queue the current one of the calling thread."""
        self._runtime.enter_thread()

    @torch.inference_mode()
    @_in_queue
    def launch_step(self, output: SchedulerOutput) -> BegunStep:
        """Start a step's copies, apply its changes of the batch, and launch its forward pass. The
        previous step must have been sampled. Raises an error that fails the whole step; later steps
        raise StepRefused, unless they name this step in `last_failed_id`. See `StepBatch`."""
        # The states are read first, because loads may write to the pages with initial states.
        fault = None if self._states is None else self._begin_states(self._states, output)
        # The step's copies begin and are reported even if a later part of the step fails.
        self._connector.start_step(output.connector_meta or NOTHING_TO_MOVE)
        due = self._due
        if due is not None and due.sampled is not None and not due.sampled.choice.is_final:
            self._take_tokens()
        if self._pictures is not None:
            self._pictures.drop_pictures(output)
        self._check_follows(output)
        try:
            if fault is not None:
                raise fault
            self._update_batch(output)
            if self._pictures is not None:
                self._pictures.encode_pictures(output)
            step = BegunStep(output, ModelRunnerOutput({}))
            if output.num_scheduled_tokens:
                self._compute(step)
            return step
        except Exception:
            self._last_failed_id = output.step_id
            raise

    @torch.inference_mode()
    @_in_queue
    def sample(self, step: BegunStep, mask: TokenMask | None = None) -> None:
        """Start to sample the tokens that `mask` allows; every request in it must get a token.
        Waits for the tokens of the previous step. Raises like `launch_step`."""
        self._take_tokens()
        self._check_follows(step.output)
        try:
            if step.hidden is not None:
                step.sampled = self._tokens.begin_sampling(step, step.hidden, mask)
                step.hidden = None
            self._due = step
        except Exception:
            self._last_failed_id = step.output.step_id
            raise

    def is_done(self, step: BegunStep) -> bool:
        """Whether `collect_output` returns without waiting for the device."""
        return step.sampled is None or step.sampled.choice.is_done

    @torch.inference_mode()
    @_in_queue
    def collect_output(self, step: BegunStep) -> ModelRunnerOutput:
        """Wait for a sampled step's tokens, and return its output, which names requests without a
        token (logits not finite, failed processor, all banned). Raises like `launch_step`."""
        if step is self._due:
            self._take_tokens()
        if step.error is not None:
            raise step.error
        step.result.connector_output = self.poll_copies()
        return step.result

    @_in_queue
    def start_copies(self, meta: ConnectorMetadata) -> None:
        self._connector.start_step(meta)

    @_in_queue
    def poll_copies(self) -> ConnectorWorkerOutput | None:
        """Return the copies that the connector has finished since the last call; None if there is
        no connector."""
        return self._connector.poll()

    @_in_queue
    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait for the connector's copies, for `timeout_seconds` at most. Idempotent."""
        self._connector.shutdown(timeout_seconds)

    @property
    def adapters(self) -> AdapterSlots:
        """The adapters of the model. Raises ValueError for a model without adapter slots."""
        if self._adapters is None:
            raise ValueError("the model was loaded without slots for adapters")
        return self._adapters

    @torch.inference_mode()
    @_in_queue
    def drop_adapter(self, fingerprint: bytes) -> None:
        """Forget an adapter that no request has any more."""
        self.adapters.drop_adapter(fingerprint)

    def _begin_states(self, states: StateSlots, output: SchedulerOutput) -> Exception | None:
        """Load the saved states of requests that start in this step. Return an error that must fail
        the step, or None."""
        try:
            states.begin_step(output)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return error
        return None

    def _update_batch(self, output: SchedulerOutput) -> None:
        for request_id in output.finished_request_ids:
            self._prompt_logprobs.remove_logprobs(request_id)
            self._pooling.remove_pooling(request_id)
            self._prompt_embeds.remove_embeds(request_id)
            self._drafts.remove_request(request_id)
            if self._pictures is not None:
                self._pictures.remove_request(request_id)
            if self._experts is not None:
                self._experts.remove_request(request_id)
        self._steps.apply_step(output, self._sampler.apply_batch_update)
        for new in output.new_requests:
            self._prompt_logprobs.add(self._steps.requests[new.request_id])
            self._pooling.add(self._steps.requests[new.request_id])
            self._prompt_embeds.add(new)
            if self._pictures is not None:
                self._pictures.add_request(new)
            if self._experts is not None:
                self._experts.add_request(self._steps.requests[new.request_id])

    def _compute(self, step: BegunStep) -> None:
        scheduled = step.output.num_scheduled_tokens
        rows, counts = self._scheduled_rows(scheduled)
        batch = self.batch
        computed = batch.num_computed[rows]
        positions = ranges(computed, counts)
        token_rows = np.repeat(rows, counts)
        num_drafts = self._drafts.put_drafts(step.output.draft_token_ids, rows)
        due = self._due
        chosen = None if due is None or due.sampled is None else due.sampled.choice.tokens
        late = batch.late_tokens(chosen, rows, computed, counts)
        tables = batch.tables
        slots = tables.slot_mapping(token_rows, positions)
        token_ids = batch.token_ids[token_rows, positions].astype(np.int64)
        # Tokens are sampled only for requests that reach their last known token.
        ready = computed + counts - num_drafts == batch.num_tokens[rows]
        step.rows, last = self._steps.with_forks(
            step.output.new_requests, rows[ready], (np.cumsum(counts) - 1)[ready]
        )
        wanted = last
        if step.output.draft_token_ids:
            step.drafted = DraftedRows.of(batch, step.rows, step.output.draft_token_ids)
            last = wanted = step.drafted.places_of(last)
        prompts = self._prompt_logprobs
        pieces = (
            prompts.plan_prompt_pieces(batch, rows, computed, counts) if prompts.is_active else []
        )
        pooled = self._pooling.plan_pooled_pieces(batch, rows, computed, counts)
        if pieces or pooled:
            asked = [
                *[piece.hidden_rows for piece in pieces],
                *[piece.hidden_rows for piece in pooled],
            ]
            wanted = np.concatenate([last, *asked])
        embeds: HostEmbeds | Embeds | None = None
        if self._prompt_embeds:
            embeds = self._prompt_embeds.rows_of(batch, rows, computed, counts)
        pictures = None
        if self._pictures is not None:
            planned = self._pictures.plan_step(batch, rows, counts, positions, embeds)
            positions, embeds, pictures = planned
        # Experts are recorded for all rows, so the last layer computes all rows too.
        reads_all = self._drafts.reads_hidden or self._experts is not None
        states = self._states
        state_step = None
        if states is not None:
            state_step = states.plan_step(step.output, rows, computed, counts)
        slots_of_adapters = None
        if self._adapters is not None:
            slots_of_adapters = self._adapters.plan_step(batch, rows, counts)
        launch = self._forward.prepare_step(
            StepInputs(
                tables.tables,
                rows,
                computed,
                counts,
                token_ids,
                positions,
                slots,
                None if reads_all else wanted,
                embeds,
                late=late,
                states=state_step,
                adapters=slots_of_adapters,
                pictures=pictures,
            )
        )
        self._connector.wait_before_forward()
        self._copier.copy_blocks(step.output.block_copies)
        hidden = launch()
        if states is not None:
            states.end_step(step.output.new_requests)
        seen = hidden if self._drafts.reads_hidden else None
        if reads_all:
            hidden = hidden[to_device(wanted, hidden.device)]
        if self._experts is not None:
            self._experts.record_step(batch, rows, computed, counts)
        self._drafts.follow_step(ComputedStep(rows, computed, counts, num_drafts, chosen, seen))
        batch.num_computed[rows] += counts
        if not ready.all():
            step.result.sampled_token_ids = {request_id: [] for request_id in scheduled}
            # Failures are reported early, so that the rest of the prompt is not computed.
            self._tokens.write_failures(self._sampler.failures(rows), rows, step.result)
        if len(last):
            step.hidden = hidden[: len(last)]
        behind = hidden[len(last) :]
        if prompts.is_active:
            behind = behind[prompts.add_hidden_states(pieces, behind) :]
        self._pooling.add_hidden_states(pooled, behind)

    def _scheduled_rows(self, scheduled: dict[str, int]) -> tuple[IntArray, IntArray]:
        """Return the rows of the batch in the order of the step, and their token counts."""
        rows = np.fromiter((self.batch.row_of[i] for i in scheduled), np.int64, len(scheduled))
        counts = np.fromiter(scheduled.values(), np.int64, len(scheduled))
        total = int(counts.sum())
        if total > self.max_num_batched_tokens:
            raise ValueError(
                f"a step of {total} tokens is over the limit of {self.max_num_batched_tokens}"
            )
        order = step_order(rows, counts)
        return rows[order], counts[order]

    def _take_tokens(self) -> None:
        """Wait for the tokens of the last sampled step, and write them to the batch and the result.
        An exception is stored, and `collect_output` raises it."""
        due, self._due = self._due, None
        if due is None:
            return
        try:
            if due.sampled is not None:
                self._tokens.write_step(due.sampled, due.result)
                requests = due.sampled.expected.requests
                if self._prompt_logprobs.is_active:
                    self._prompt_logprobs.deliver(requests, due.result)
                self._pooling.deliver(requests, due.result)
                if self._experts is not None:
                    self._experts.deliver_rows(requests, due.result)
                self._drafts.propose(due.output, requests, due.result)
        except Exception as error:  # noqa: BLE001 - `collect_output` raises it
            due.error = error
            self.batch.forget_expected()
            self._last_failed_id = due.output.step_id

    def _check_follows(self, output: SchedulerOutput) -> None:
        if output.last_failed_id < self._last_failed_id:
            raise StepRefused(
                f"step {output.step_id} was made before it was known that step "
                f"{self._last_failed_id} had failed"
            )
