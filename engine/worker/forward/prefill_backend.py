# SPDX-License-Identifier: Apache-2.0
"""PrefillChoice: chooses what computes the attention of long chunks, the prefill kernel or a
library over gathered K and V.

    auto        the kernel, unless a library was MIN_GAIN times as fast on this device at the start
    sdpa, fa3   this library; ConfigError if it can compute no chunk of the engine
    the others  the kernel

The kernel still computes the chunks that a library cannot compute: short chunks, chunks whose
context does not fit into the buffers, and chunks of layers with a window."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels.attention.gathered_prefill import (
    LIBRARIES,
    MAX_BYTES,
    MIN_ROWS,
    GatheredPrefill,
    buffer_bytes,
    reason_against_library,
)
from ....kernels.attention.paged_prefill import run_prefill
from ....kernels.kernel_choice import KernelRefused
from ....tiers.block import BlockLayout
from ....tiers.settings.values import ConfigError
from ...models.layer_attention import LayerAttention
from ...models.model_spec import ModelSpec
from ..runtime.device_runtime import DeviceRuntime, is_device_lost
from ..runtime.placement import AUTO, Placement
from .kernel_attention import KernelAttention

logger = logging.getLogger(__name__)

MIN_GAIN = 1.25  # least speed of a library, relative to the kernel
# The chunk for the measurement: its rows, and the tokens before them.
SAMPLE_ROWS, SAMPLE_CONTEXT = 8192, 8192
SAMPLE_LAYERS = 4  # layers used in turn, so that K and V are no longer in the cache
RUNS = 3
# Largest difference between the results of library and kernel: both round to 16 bits.
MOST_DIFFERENCE = 0.02


class SampleChunk:
    """A long chunk with random K and V in blocks of the pool, to be computed by the kernel and by a
    library. `close` sets these blocks to zero."""

    def __init__(self, attention: KernelAttention, rows: int, length: int) -> None:
        """The chunk has the last `rows` tokens of a context of `length` tokens."""
        self.rows, self.length = rows, length
        self._attention = attention
        self._layers = attention.layers[:SAMPLE_LAYERS]
        q, kv = attention.q, self._layers[0]
        draw = torch.Generator(q.device).manual_seed(0)
        self._q = q.new_empty(rows, *q.shape[1:]).normal_(generator=draw)
        self._out = torch.empty_like(self._q)
        # The null block stays unwritten.
        order = torch.randperm(len(kv) - 1, generator=torch.Generator().manual_seed(0)) + 1
        self._blocks = order[: -(-length // kv.shape[2])].to(q.device)
        self._table = self._blocks.to(torch.int32)
        for layer in self._layers:
            drawn = layer.new_empty(len(self._blocks), *layer.shape[1:]).normal_(generator=draw)
            layer.index_copy_(0, self._blocks, drawn)
        integers: Any = {"dtype": torch.int32, "device": q.device}
        self._lengths = torch.tensor([length], **integers)
        self._starts = torch.tensor([0, rows], **integers)

    def close(self) -> None:
        for layer in self._layers:
            layer.index_fill_(0, self._blocks, 0)

    def by_kernel(self, run: int) -> Tensor:
        """Compute attention by the prefill kernel. `run` selects the layer of the pool."""
        return run_prefill(
            self._attention.kernels.prefill, self._q, self._layer(run), self._table[None],
            self._lengths, self._starts, max_query_len=self.rows, scale=self._attention.scale,
            window=None, softcap=None, kv_scales=None, out=self._out,
        )  # fmt: skip

    def by_library(self, gathered: GatheredPrefill, run: int) -> Tensor:
        """Compute attention by a library, over the same layer as `by_kernel` with this `run`."""
        layer, scale = self._layer(run), self._attention.scale
        return gathered.run(self._q, layer, self._table, self.length, scale, self._out)

    def _layer(self, run: int) -> Tensor:
        return self._layers[run % len(self._layers)]


class Measured(NamedTuple):
    """A library that can compute long chunks, and the times that the library and the kernel took
    for one chunk."""

    gathered: GatheredPrefill
    rows: int
    length: int
    kernel_seconds: float
    library_seconds: float

    def __str__(self) -> str:
        return (
            f"took {self.library_seconds * 1e3:.2f} ms for {self.rows} tokens, the last of "
            f"{self.length}, and the prefill kernel {self.kernel_seconds * 1e3:.2f} ms"
        )


class PrefillChoice:
    """Chooses the library or the kernel that computes the attention of long chunks in an engine."""

    def __init__(
        self,
        attention: KernelAttention,
        runtime: DeviceRuntime,
        kinds: Sequence[LayerAttention],
        *,
        max_model_len: int,
        max_tokens: int,
    ) -> None:
        """`kinds` has the attention of each layer; `max_tokens` is the largest number of tokens in
        a step."""
        self.attention, self._runtime, self._kinds = attention, runtime, kinds
        pool = attention.layers[0]
        self._longest = min(max_model_len, (len(pool) - 1) * pool.shape[2])
        self._most_rows = min(max_tokens, self._longest)

    def choose(self, backend: str) -> GatheredPrefill | None:
        """Return the library for long chunks, or None for the prefill kernel. Raise ConfigError if
        `backend` names a library that can compute no chunk."""
        if backend in LIBRARIES:
            return self._named(backend)
        # Only a device that captures graphs measures its own time.
        return self._faster() if backend == AUTO and self._runtime.can_record else None

    def _named(self, name: str) -> GatheredPrefill:
        try:
            gathered = self._try(name, is_measured=False).gathered
        except KernelRefused as refused:
            raise ConfigError(
                f"--attention-backend {name} can compute no chunk of this engine: {refused}; give "
                "--attention-backend kernels or auto"
            ) from refused
        logger.info("long chunks are computed by %s%s", name, self._rest(gathered))
        return gathered

    def _faster(self) -> GatheredPrefill | None:
        chosen, gain, told = None, MIN_GAIN, []
        for name in LIBRARIES:
            try:
                measured = self._try(name, is_measured=True)
            except KernelRefused as refused:
                told.append(f"{name}: {refused}")
                continue
            told.append(f"{name} {measured}")
            if measured.kernel_seconds >= gain * measured.library_seconds:
                chosen, gain = measured.gathered, measured.kernel_seconds / measured.library_seconds
        by = "the prefill kernel" if chosen is None else chosen.name + self._rest(chosen)
        logger.info("long chunks are computed by %s (%s)", by, "; ".join(told))
        return chosen

    def _try(self, name: str, *, is_measured: bool) -> Measured:
        """Run a library on a sample chunk, and return it with the measured times. Raise
        KernelRefused if the library cannot compute the chunk."""
        if reason := self._reason_against(name):
            raise KernelRefused(reason)
        chunk = None
        try:
            gathered = GatheredPrefill(name, self.attention.layers[0], self._longest)
            longest = min(self._longest, gathered.max_tokens)
            rows = min(self._most_rows, longest, SAMPLE_ROWS)
            chunk = SampleChunk(self.attention, rows, min(longest, rows + SAMPLE_CONTEXT))
            chunk.by_library(gathered, 0)
            seconds = self._measure(chunk, gathered) if is_measured else (0.0, 0.0)
            return Measured(gathered, chunk.rows, chunk.length, *seconds)
        except RuntimeError as error:
            if is_device_lost(error):
                raise
            raise KernelRefused(f"it failed: {' '.join(str(error).split())[:300]}") from error
        finally:
            if chunk is not None:
                chunk.close()

    def _reason_against(self, name: str) -> str | None:
        if self.attention.softcap is not None:
            return "it does not bound scores, and this model does"
        if all(kind.window is not None for kind in self._kinds):
            return "it knows no windows, and every layer has one"
        if self._most_rows < MIN_ROWS:
            return (
                f"it takes chunks of {MIN_ROWS} tokens and more, and a step has up to "
                f"{self._most_rows} (--max-num-batched-tokens, --max-model-len)"
            )
        return reason_against_library(name, self.attention.q, self.attention.layers[0])

    def _measure(self, chunk: SampleChunk, gathered: GatheredPrefill) -> tuple[float, float]:
        """Return the seconds of the kernel and of the library, each the shortest of RUNS runs.
        Raise KernelRefused if their results differ by more than MOST_DIFFERENCE."""
        right = chunk.by_kernel(0).float()
        off = (chunk.by_library(gathered, 0).float() - right).norm() / right.norm()
        if not off <= MOST_DIFFERENCE:
            raise KernelRefused(f"its results are off by {off:.2g} of the kernel's")
        seconds = [
            (
                self._runtime.seconds_of(partial(chunk.by_kernel, run)),
                self._runtime.seconds_of(partial(chunk.by_library, gathered, run)),
            )
            for run in range(RUNS)
        ]
        kernel, library = map(min, zip(*seconds, strict=True))
        return kernel, library

    def _rest(self, gathered: GatheredPrefill) -> str:
        """Return a text for the log about the chunks that the kernel still computes."""
        kept = [f"shorter than {gathered.min_rows} tokens"]
        if gathered.max_tokens < self._longest:
            kept.append(f"of contexts beyond {gathered.max_tokens} tokens")
        if any(kind.window is not None for kind in self._kinds):
            kept.append("of layers with a window")
        return f"; by the prefill kernel those {', those '.join(kept)}"


def library_bytes(
    placement: Placement, spec: ModelSpec, layout: BlockLayout, max_tokens: int
) -> int:
    """Return the largest number of bytes that a library takes on the device in addition to a step,
    for its buffers and its result."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(layout.kv_dtype)
    is_full = any(kind.is_full for kind in spec.layer_attention)
    if not placement.may_use_library or dtype is None or not is_full or max_tokens < MIN_ROWS:
        return 0
    tokens = -(-spec.max_context // layout.block_size) * layout.block_size
    buffers = buffer_bytes(tokens, layout.num_kv_heads, layout.head_dim, dtype)
    # The result, and one float32 sum for each of its rows.
    row_bytes = layout.head_dim * dtype.itemsize + torch.float32.itemsize
    return min(buffers, MAX_BYTES) + max_tokens * spec.num_heads * row_bytes
