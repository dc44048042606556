# SPDX-License-Identifier: Apache-2.0
"""Steps computed by the kernels of `kernels/` over buffers that stay on the device.

    decodes only    from the record of the next larger batch size, where there is one
    anything else   launched one by one

Nothing is read back here. Knows nothing of schedulers, copies or sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from ...models.decoder import Decoder
from ..runtime.device_runtime import DeviceRuntime, Work
from .forward import Launch
from .graphs import DecodeGraphs, batch_buckets
from .input_buffers import InputBuffers
from .kernel_attention import KernelAttention, KernelPlan
from .step_inputs import StepInputs


class KernelForward:
    """A model over one pool and one set of buffers."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        model: Decoder,
        attention: KernelAttention,
        *,
        max_tokens: int,
        max_requests: int,
        max_blocks: int,
    ) -> None:
        self._model, self._attention = model, attention
        self._buffers = InputBuffers(
            runtime, max_tokens=max_tokens, max_requests=max_requests, max_blocks=max_blocks
        )
        self._graphs = DecodeGraphs(runtime, self._decode_work, batch_buckets(max_requests))

    def record(self, progress: Callable[[str], None]) -> None:
        """Record the decode steps. Without it every step is launched one by one."""
        self._graphs.record_all(partial(self._buffers.fill, None), progress)

    def prepare(self, step: StepInputs) -> Launch:
        if step.num_decodes == len(step.rows):
            found = self._graphs.find(len(step.rows))
            if found is not None:
                return self._prepare_recorded(step, *found)
        self._buffers.fill(step, step.num_tokens)
        plan, num_tokens = self._buffers.plan(step), step.num_tokens
        wanted = self._buffers.wanted[: len(step.wanted)]
        return partial(self._forward, num_tokens, plan, wanted)

    def _prepare_recorded(self, step: StepInputs, bucket: int, work: Work) -> Launch:
        self._buffers.fill(step, bucket)
        count = len(step.wanted)
        if count == step.num_tokens and np.array_equal(step.wanted, np.arange(count)):
            return lambda: work()[:count]
        wanted = self._buffers.wanted[:count]
        return lambda: work()[wanted]

    def _decode_work(self, bucket: int) -> Work:
        return partial(self._forward, bucket, self._buffers.decode_plan(bucket), None)

    def _forward(self, num_tokens: int, plan: KernelPlan, wanted: Tensor | None) -> Tensor:
        buffers = self._buffers
        return self._model.forward(
            buffers.token_ids[:num_tokens],
            buffers.positions[:num_tokens],
            self._attention,
            plan,
            wanted,
        )
