# SPDX-License-Identifier: Apache-2.0
"""From a placement to what computes there: runtime, measure of the memory, forward pass.

CUDA is imported and asked only where a placement names it. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...models.checkpoint.weights import expected_tensors
from ...models.decoder import Decoder
from ...models.dtypes import FP8_KV, dtype_name
from ...models.spec import ModelSpec
from ...plan import weight_bytes
from ..forward.forward import GatherForward, StepForward
from ..forward.kernel_attention import KernelAttention
from ..forward.kernel_forward import KernelForward
from ..kv_pool import KvPool
from .device_config import Placement
from .device_runtime import DeviceRuntime, HostRuntime
from .memory_profile import PoolSizer
from .pool_sizing import check_weights


def open_runtime(placement: Placement) -> DeviceRuntime:
    """The runtime of the placement's device."""
    if placement.device.type == "cpu":
        return HostRuntime()
    from .cuda_runtime import CudaRuntime

    return CudaRuntime(placement.device)


def check_room(spec: ModelSpec, placement: Placement, compute: torch.dtype) -> None:
    """Raise ConfigError where the weights would not even fit into a GPU's memory. The CPU's is
    shared with the file they are mapped from, and is not asked."""
    if placement.device.type == "cpu":
        return
    from .cuda_runtime import CudaMeter

    needed = weight_bytes(expected_tensors(spec), dtype_name(compute))
    check_weights(needed, CudaMeter(placement.device).free_bytes())


def open_sizer(placement: Placement) -> PoolSizer:
    """What sizes the pool of a GPU, to be made before the weights are loaded."""
    from .cuda_runtime import CudaMeter

    return PoolSizer(placement, CudaMeter(placement.device))


def make_forward(
    runtime: DeviceRuntime,
    model: Decoder,
    pool: KvPool,
    placement: Placement,
    compute: torch.dtype,
    *,
    max_model_len: int,
    max_tokens: int,
    max_requests: int,
    progress: Callable[[str], None],
) -> StepForward:
    """The model over the pool, with its decode steps recorded where that can be."""
    layout = pool.layout
    if not placement.uses_kernels:
        return GatherForward(model, pool.tensor, layout, compute, max_model_len)
    scales = None
    if layout.kv_dtype == FP8_KV:
        # Of heads, all 1: K and V are kept as they are, rounded to e4m3. Scales of tokens would
        # have to travel with every block.
        scales = torch.ones((2, layout.num_kv_heads), device=runtime.device)
    attention = KernelAttention(
        pool.tensor, layout, kv_scales=scales, strict=placement.strict_kernels
    )
    forward = KernelForward(
        runtime,
        model,
        attention,
        max_tokens=max_tokens,
        max_requests=max_requests,
        max_blocks=-(-max_model_len // layout.block_size),
    )
    if placement.record_decodes and runtime.can_record:
        forward.record(progress)
    return forward
