# SPDX-License-Identifier: Apache-2.0
"""Makes the objects that compute on the device of a `Placement`: the runtime, the memory meter, the
forward pass.

CUDA is imported and used only if the placement's device is a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ....kernels.kernel_choice import AUTO as AUTO_KERNEL
from ....kernels.kernel_choice import TRITON, KernelRefused, probe_hardware, triton_failure
from ....kernels.layer.elementwise import choose_elementwise
from ....tiers.settings.values import ConfigError
from ...cache.group_spec import num_state_slots
from ...models.decoder import Decoder
from ...models.dtypes import FP8_KV, dtype_name
from ...models.layers import Elementwise
from ...models.model_spec import ModelSpec
from ...models.vision.encoder import VisionEncoder
from ...models.vision.vision_shapes import largest_side, weight_shapes
from ...plan.memory_plan import weight_bytes
from ...sampling.logprob_tensors import raw_logprobs
from ..forward.forward import GatherForward, StepForward
from ..forward.in_place_forward import InPlaceForward, reason_against_in_place
from ..forward.kernel_attention import KernelAttention, choose_kernels
from ..forward.kernel_forward import KernelForward
from ..forward.prefill_backend import PrefillChoice, library_bytes
from ..kv_pool import ModelPages
from ..pool_demand import PoolDemand
from ..state_slots import lone_step
from .device_runtime import DeviceRuntime, HostRuntime
from .placement import AUTO, Placement
from .pool_sizing import MemoryUse, check_free, check_weights, pool_blocks

logger = logging.getLogger(__name__)


class MemoryMeter(Protocol):
    """Reports the memory of a device, in bytes."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...

    def held_bytes(self) -> int:
        """Bytes that torch's allocator in this process has reserved."""

    def peak_bytes(self) -> int:
        """The most bytes that torch's allocator had reserved since `reset_peak`."""

    def reset_peak(self) -> None: ...


class _NoAttention:
    """An attention that allocates its result and computes nothing."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: None) -> Tensor:
        return torch.zeros((len(q), q[0].numel()), dtype=q.dtype, device=q.device)


class PoolSizer:
    """Measures how much of a device's memory remains for the KV pool. The sizer must be made before
    the weights are loaded, and used after they are loaded.

    The sizer runs the largest step of the model without a pool and without computing attention.
    Attention kernels allocate only their result, which this run allocates too."""

    def __init__(self, placement: Placement, meter: MemoryMeter) -> None:
        """Raises ConfigError if the share of the device's memory that the placement gives is not
        free."""
        self._placement, self._meter = placement, meter
        self._free_before_bytes = meter.free_bytes()
        check_free(meter.total_bytes(), self._free_before_bytes, placement.memory_share)

    def blocks(
        self,
        model: Decoder,
        demand: PoolDemand,
        *,
        max_model_len: int,
        max_tokens: int,
        max_requests: int,
        most_drafts: int = 0,
        encoder: VisionEncoder | None = None,
    ) -> int:
        """Return the number of blocks of the pool. `encoder` is the model's, in memory. Raise
        ConfigError if one request does not fit into the pool, or if the kernels of a step cannot be
        compiled."""
        with naming_triton():
            use = self.measure(model, max_tokens, max_requests, encoder)
        beside = library_bytes(self._placement, model.spec, demand.groups.layout, max_tokens)
        if demand.groups.state is not None:
            slots = num_state_slots(max_requests, most_drafts)
            beside += slots * demand.groups.checkpoint_bytes
        use = replace(use, peak_bytes=use.peak_bytes + beside)
        blocks = pool_blocks(use, demand, max_model_len, self._placement.memory_share)
        logger.info(
            "GPU memory: %.2f GiB of weights, %.2f GiB for steps, %d blocks of K and V (%.2f GiB)",
            use.weight_bytes / 2**30,
            (use.peak_bytes - use.weight_bytes) / 2**30,
            blocks,
            blocks * demand.block_bytes / 2**30,
        )
        return blocks

    @torch.inference_mode()
    def measure(
        self,
        model: Decoder,
        max_tokens: int,
        max_requests: int,
        encoder: VisionEncoder | None = None,
    ) -> MemoryUse:
        """Run a prompt step of `max_tokens` tokens twice, with logits and log-probabilities for
        `max_requests` rows. The results of the first run are still in memory during the second
        run. `encoder` encodes the largest picture before, beside the embeddings of as many tokens
        of pictures as the worker keeps."""
        meter, device = self._meter, self._placement.device
        meter.reset_peak()
        weight_bytes = meter.held_bytes()
        ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        states = None
        if model.spec.state is not None:
            states = lone_step(model.spec.state, model.dtype, device, max_tokens)
        slots = None if model.slots is None else ids.to(torch.int32)
        rows = ids[: min(max_requests, max_tokens)]
        waiting: list[Tensor] = []
        if encoder is not None and model.spec.vision is not None:
            side = largest_side(model.spec.vision)
            [one] = encoder.encode_pictures([np.zeros((side, side, 3), np.uint8)])
            waiting += [one, one.new_zeros((max_tokens, one.shape[1]))]
        for _ in range(2):
            hidden = model.forward(ids, ids, _NoAttention(), None, rows, states=states, slots=slots)
            logits = model.logits(hidden)
            waiting.append(raw_logprobs(logits.float()))
        return MemoryUse(
            total_bytes=meter.total_bytes(),
            free_before_bytes=self._free_before_bytes,
            free_after_bytes=meter.free_bytes(),
            held_after_bytes=meter.held_bytes(),
            weight_bytes=weight_bytes,
            peak_bytes=meter.peak_bytes(),
        )


@contextmanager
def naming_triton() -> Iterator[None]:
    """Convert errors that Triton raises in the `with` body to ConfigError, with a remedy for the
    user."""
    try:
        yield
    except Exception as error:
        reason = triton_failure(error)
        if reason is None:
            raise
        raise ConfigError(
            f"Triton cannot compile or load the GPU's kernels ({probe_hardware()}): {reason}; it "
            "needs a C compiler, Python's headers, libcuda where ldconfig finds it and a folder to "
            "write to (TRITON_CACHE_DIR), and is tested as triton 3.6.0 and 3.7.1; or compute with "
            "--device cpu"
        ) from error


def open_runtime(placement: Placement) -> DeviceRuntime:
    """Open the runtime of the placement's device."""
    if placement.device.type == "cpu":
        return HostRuntime()
    from .cuda_runtime import CudaRuntime

    return CudaRuntime(placement.device)


def check_room(specs: Iterable[ModelSpec], placement: Placement, compute: torch.dtype) -> None:
    """Raise ConfigError if the weights do not fit into a GPU's memory. The CPU is not checked,
    because weights may be views of the mapped file there."""
    if placement.device.type == "cpu":
        return
    from .cuda_runtime import CudaMeter

    name = dtype_name(compute)
    needed = sum(weight_bytes(weight_shapes(spec), name) for spec in specs)
    check_weights(needed, CudaMeter(placement.device).free_bytes())


def check_kernels(spec: ModelSpec, placement: Placement, compute: torch.dtype) -> None:
    """Raise ConfigError if no Triton kernel can compute the model's heads and a plain kernel is not
    allowed. Plain kernels are not allowed under `strict_kernels`, or if `attention_backend` is
    `triton`. The check comes before the weights are read."""
    wanted = _wanted_kernel(placement)
    flag = "--strict-kernels" if wanted == AUTO_KERNEL else "--attention-backend triton"
    if not placement.uses_kernels or (wanted == AUTO_KERNEL and not placement.strict_kernels):
        return
    dtype = torch.float8_e4m3fn if placement.kv_cache_dtype == FP8_KV else compute
    q = torch.empty((0, spec.num_heads, spec.head_dim), dtype=compute, device=placement.device)
    shape = (0, 2, 1, spec.num_kv_heads, spec.head_dim)
    kv = torch.empty(shape, dtype=dtype, device=placement.device)
    scales = None
    if dtype != compute:
        scales = torch.ones((2, spec.num_kv_heads), device=placement.device)
    try:
        scale, strict = spec.attention_scale, placement.strict_kernels
        choose_kernels(q, kv, scale, kv_scales=scales, kernel=wanted, strict=strict)
        choose_layer_parts(spec, placement, compute)
    except KernelRefused as error:
        reason = str(error).removesuffix("; use the plain one")
        raise ConfigError(
            f"{flag} refuses this model: {reason}; without the flag plain kernels stand in, which "
            "take many times longer"
        ) from error


def _wanted_kernel(placement: Placement) -> str:
    """Return the name of a placement's attention kernel; see `kernels/kernel_choice.py`."""
    return TRITON if placement.attention_backend == TRITON else AUTO_KERNEL


def open_sizer(placement: Placement) -> PoolSizer:
    """Return the `PoolSizer` of a GPU. The sizer must be made before the weights are loaded."""
    from .cuda_runtime import CudaMeter

    return PoolSizer(placement, CudaMeter(placement.device))


def choose_layer_parts(spec: ModelSpec, placement: Placement, compute: torch.dtype) -> Elementwise:
    """Choose the elementwise functions of a layer: kernels if they can run, or functions compiled
    by torch.compile if the placement says so. Under `strict_kernels`, raise KernelRefused if
    kernels should run but cannot."""
    if placement.compile_elementwise:
        return Elementwise.compiled()
    chosen = choose_elementwise(
        placement.device, compute, spec.hidden_size, strict=placement.strict_kernels
    )
    return Elementwise.of_kernels() if chosen == TRITON else Elementwise()


def make_forward(
    runtime: DeviceRuntime,
    model: Decoder,
    pages: ModelPages,
    placement: Placement,
    compute: torch.dtype,
    *,
    max_model_len: int,
    max_tokens: int,
    max_requests: int,
    progress: Callable[[str], None],
) -> StepForward:
    """Make the forward pass of a model over its pages of the KV pool. Compile the kernels and
    capture the CUDA graphs, if the device and the model allow it."""
    layout = pages.layout
    if not placement.uses_kernels:
        if placement.attention_backend == AUTO and not reason_against_in_place(layout, compute):
            return InPlaceForward(model, pages)
        return GatherForward(model, pages, compute, max_model_len)
    scales = None
    if layout.kv_dtype == FP8_KV:
        # One scale of 1 for each head: K and V are only rounded to e4m3. Scales for each token
        # would have to be stored with every block.
        scales = torch.ones((2, layout.num_kv_heads), device=runtime.device)
    attention = KernelAttention(
        pages.tensor,
        layout,
        num_heads=model.spec.num_heads,
        dtype=compute,
        scale=model.spec.attention_scale,
        softcap=model.spec.score_softcap,
        kv_scales=scales,
        strict=placement.strict_kernels,
        kernel=_wanted_kernel(placement),
    )
    choice = PrefillChoice(
        attention,
        runtime,
        model.spec.layer_attention,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
    )
    with naming_triton():
        attention.gathered = choice.choose(placement.attention_backend)
    each = pages.entries_per_block
    forward = KernelForward(
        runtime,
        model,
        attention,
        pages.places,
        max_tokens=max_tokens,
        max_requests=max_requests,
        # Whole blocks of the pool, like the host's tables.
        max_blocks=-(-max_model_len // (layout.block_size * each)) * each,
    )
    if runtime.can_record:
        began = time.monotonic()
        with naming_triton():
            forward.warm_up()
        progress(f"kernels are compiled, which took {time.monotonic() - began:.1f} s")
        if model.spec.is_eagle:
            # A record reads token ids, but the head's inputs are embeddings.
            progress("the EAGLE head's steps are launched kernel by kernel")
        elif model.chosen_experts is not None:
            progress("steps are launched kernel by kernel, since all rows of the last layer count")
        elif model.spec.state is not None:
            progress("steps are launched kernel by kernel, since layers carry states")
        elif not model.can_record:
            progress("steps are launched kernel by kernel: experts are grouped in bfloat16 alone")
        elif placement.record_decodes and attention.kernels.can_record_decodes:
            forward.record_steps(progress)
        elif placement.record_decodes:
            logger.warning(
                "every step is launched kernel by kernel, which takes small batches longer: plain "
                "kernels stand in for Triton's, and what they read back cannot be recorded"
            )
    return forward
