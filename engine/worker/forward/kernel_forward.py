# SPDX-License-Identifier: Apache-2.0
"""Forward passes by the kernels of `kernels/`, over permanent buffers on the device.

    only decodes       replay the CUDA graph of the next larger batch size, if there is one
    one small chunk    as the only request: replay the CUDA graph of the next larger chunk size
    other steps        launch kernel by kernel

This code copies no results to the host."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from ...cache.group_spec import LayerPlace
from ...models.decoder import AuxStates, Decoder, Embeds, PictureRows
from ...models.states.state_plan import StateStep
from ...sampling.copies import to_device
from ..runtime.device_runtime import DeviceRuntime, Work
from ..state_slots import lone_step
from .forward import Launch, StepInputs
from .grouped_attention import LayerViews
from .input_buffers import InputBuffers
from .kernel_attention import KernelAttention, KernelPlan

# Padding costs part of a step: at most half in small batches, where reading the weights dominates,
# and a sixteenth in large batches.
_FIRST_SIZES = (1, 2, 4)
_FINE, _FINE_UP_TO = 8, 128
_COARSE, _COARSE_UP_TO = 16, 512
# The largest captured batch: graphs take memory and start time; larger batches gain little.
MAX_RECORDED = _COARSE_UP_TO
# Sizes of recorded chunks. For a short rest of a prompt after a cached prefix, launching takes
# longer than computing.
CHUNK_SIZES = (16, 32, 64, 128, 256)
# The tokens of the chunks that run at the start: of the shortest chunk, and of a long chunk.
WARM_CHUNKS = (2, 128)


def batch_buckets(max_requests: int) -> tuple[int, ...]:
    """Return the batch sizes for which CUDA graphs are captured, ascending, for batches of up to
    `max_requests`."""
    sizes = [
        *_FIRST_SIZES,
        *range(_FINE, _FINE_UP_TO, _FINE),
        *range(_FINE_UP_TO, _COARSE_UP_TO + 1, _COARSE),
    ]
    largest = min(max_requests, MAX_RECORDED)
    return (*[size for size in sizes if size < largest], largest)


def bucket_for(num_requests: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `buckets` that is at least `num_requests`; None if all
    are smaller."""
    index = bisect_left(buckets, num_requests)
    return buckets[index] if index < len(buckets) else None


class StepGraphs:
    """The CUDA graphs of one kind of step, for one model over one set of buffers: one graph for
    each size.

    A small step is hundreds of small kernel launches, whose Python code takes longer than the
    device's work. A graph over permanent buffers needs only one launch. A step uses the graph of
    the smallest size that is not less than the step's, padded with unused rows."""

    def __init__(
        self, runtime: DeviceRuntime, work_of: Callable[[int], Work], buckets: Sequence[int]
    ) -> None:
        """`work_of(bucket)` returns a function that computes a step of `bucket` rows over the
        buffers. The returned function must read no other data that changes, because a graph would
        read the old values."""
        self._runtime = runtime
        self._work_of = work_of
        self._buckets = tuple(buckets)
        self._recorded: dict[int, Work] = {}

    def record_all(self, prepare: Callable[[int], None]) -> int:
        """Capture the graphs of all sizes, and return their number. `prepare(bucket)` fills the
        buffers with padding, on which the step can run safely. The largest size is captured first;
        smaller graphs then fit into its memory."""
        for bucket in reversed(self._buckets):
            prepare(bucket)
            self._recorded[bucket] = self._runtime.record_work(self._work_of(bucket))
        return len(self._buckets)

    def find_recorded(self, num_rows: int) -> tuple[int, Work] | None:
        """Return the size to which the buffers must be padded, and the function that replays the
        graph; None if there is no graph."""
        bucket = bucket_for(num_rows, self._buckets)
        if bucket is None or bucket not in self._recorded:
            return None
        return bucket, self._recorded[bucket]


class KernelForward:
    """The forward pass of a model over one KV pool and one set of input buffers."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        model: Decoder,
        attention: KernelAttention,
        places: Sequence[LayerPlace],
        *,
        max_tokens: int,
        max_requests: int,
        max_blocks: int,
    ) -> None:
        views = LayerViews(places, model.spec.layer_attention)
        self._plan_of = views.plan_of
        self._model, self._attention = model, views.attention_over(attention)
        self._max_tokens, self._kernels = max_tokens, attention.kernels
        self._buffers = InputBuffers(
            runtime,
            max_tokens=max_tokens,
            max_requests=max_requests,
            max_blocks=max_blocks,
            views=views.views,
            split_planner=attention.split_planner,
        )
        self._graphs = StepGraphs(runtime, self._decode_work, batch_buckets(max_requests))
        chunks = [size for size in CHUNK_SIZES if size <= max_tokens]
        self._chunk_graphs = StepGraphs(runtime, self._chunk_work, chunks)

    def warm_up(self) -> None:
        """Compile the kernels of decodes and chunks before the first request, so that no request
        waits for the compiler. Short and long chunks use different launches, so both are run."""
        buffers = self._buffers
        buffers.fill(None, 1)
        plans = self._plan_of(buffers.decode_plans(1))
        self._forward(1, plans, None, states=self._lone_states(1))
        for num_tokens in sorted({min(size, self._max_tokens) for size in WARM_CHUNKS}):
            buffers.fill(None, num_tokens, 1)
            plans, states = buffers.chunk_plans(num_tokens), self._lone_states(num_tokens)
            self._forward(num_tokens, self._plan_of(plans), None, states=states)

    def _lone_states(self, num_tokens: int) -> StateStep | None:
        model = self._model
        if model.spec.state is None:
            return None
        device = self._buffers.token_ids.device
        return lone_step(model.spec.state, model.dtype, device, num_tokens)

    def record_steps(self, progress: Callable[[str], None]) -> None:
        """Capture the CUDA graphs of decode steps, and those of small chunks if their kernels allow
        it. If this method is not called, every step is launched kernel by kernel."""
        fill = self._buffers.fill
        sizes = self._graphs.record_all(partial(fill, None))
        progress(f"recorded decode steps of {sizes} batch sizes")
        if self._kernels.can_record_chunks:
            sizes = self._chunk_graphs.record_all(lambda bucket: fill(None, bucket, 1))
            progress(f"recorded chunks of {sizes} sizes")

    def prepare_step(self, step: StepInputs) -> Launch:
        # A CUDA graph reads token ids, and no input outside the buffers.
        is_plain = step.embeds is None and step.aux is None and step.states is None
        is_plain = is_plain and step.adapters is None
        if is_plain and (step.num_decodes == len(step.rows) or len(step.rows) == 1):
            graphs = self._graphs if step.num_decodes else self._chunk_graphs
            found = graphs.find_recorded(step.num_tokens)
            if found is not None:
                return self._prepare_recorded(step, *found)
        self._buffers.fill(step, step.num_tokens)
        plan, num_tokens = self._plan_of(self._buffers.plans(step)), step.num_tokens
        wanted = None if step.wanted is None else self._buffers.wanted[: len(step.wanted)]
        if is_plain:
            return partial(self._forward, num_tokens, plan, wanted)
        device = self._buffers.token_ids.device
        embeds = None if step.embeds is None else step.embeds.to(device)
        slots = None if step.adapters is None else to_device(step.adapters, device)
        inputs = (embeds, step.aux, step.states, slots, step.pictures)
        return partial(self._forward, num_tokens, plan, wanted, *inputs)

    def _prepare_recorded(self, step: StepInputs, bucket: int, work: Work) -> Launch:
        self._buffers.fill(step, bucket, None if step.num_decodes else 1)
        if step.wanted is None:
            return lambda: work()[: step.num_tokens]
        count = len(step.wanted)
        if count == step.num_tokens and np.array_equal(step.wanted, np.arange(count)):
            return lambda: work()[:count]
        wanted = self._buffers.wanted[:count]
        return lambda: work()[wanted]

    def _decode_work(self, bucket: int) -> Work:
        return partial(
            self._forward, bucket, self._plan_of(self._buffers.decode_plans(bucket)), None
        )

    def _chunk_work(self, bucket: int) -> Work:
        return partial(
            self._forward, bucket, self._plan_of(self._buffers.chunk_plans(bucket)), None
        )

    def _forward(
        self,
        num_tokens: int,
        plan: KernelPlan | Sequence[KernelPlan],
        wanted: Tensor | None,
        embeds: Embeds | None = None,
        aux: AuxStates | None = None,
        states: StateStep | None = None,
        slots: Tensor | None = None,
        pictures: PictureRows | None = None,
    ) -> Tensor:
        buffers = self._buffers
        return self._model.forward(
            buffers.token_ids[:num_tokens],
            buffers.positions[:num_tokens],
            self._attention,
            plan,
            wanted,
            embeds=embeds,
            aux=aux,
            states=states,
            slots=slots,
            pictures=pictures,
        )
