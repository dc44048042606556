# SPDX-License-Identifier: Apache-2.0
"""Paged attention by the compiled CPU library. A step is prepared once and run for every layer.

A request may have any number of new tokens. Every `run` checks types and shapes. The constructor of
a step checks block ids, slots and lengths, because wrong values would cause reads of other
memory."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernel_choice import KernelRefused
from .library import ELEMENTS, CpuLibrary, Missing, Step, cpu_library
from .thresholds import worth_a_thread
from .workspace import Workspace

MAX_HEAD_DIM = 512  # with larger heads, a thread's part of a tile exceeds the cache
_EVERY_LANES = 8  # the head size must be a multiple of it: the lanes of the narrowest vector
_OUT_OF_BOUNDS = {
    1: "slots from -1 to the last one of the pool",
    2: "block ids of the pool",
    3: "lengths that the block tables hold",
    4: "query_starts that ascend within the tokens, of which those of no request stay as they are",
}


def reason_against(
    dtype: torch.dtype, head_dim: int, *, pool_dtype: torch.dtype | None = None
) -> str | None:
    """Return the reason why the library cannot compute attention with heads of `head_dim` elements
    of `dtype`, or None. `pool_dtype` is the type of the pool, if it is not `dtype`."""
    library = cpu_library()
    if isinstance(library, Missing):
        return library.reason
    if pool_dtype not in (None, dtype) or dtype not in ELEMENTS:
        return f"they read pools of 16, 32 and 64 bits in their own type, not {pool_dtype or dtype}"
    if head_dim % library.lanes or head_dim > MAX_HEAD_DIM:
        return (
            f"their heads are multiples of {library.lanes} elements up to {MAX_HEAD_DIM}, and "
            f"these are {head_dim}"
        )
    return None


class CpuAttentionStep:
    """The requests of one step, for all layers of a KV pool. The step keeps references to the
    constructor's tensors, which must not change while the step is used."""

    def __init__(
        self,
        pool: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor | None,
        *,
        num_tokens: int,
        num_heads: int,
        scale: float,
        workspace: Workspace | None,
        window: int | None = None,
        softcap: float | None = None,
        slots: Tensor | None = None,
    ) -> None:
        """`pool` is K and V of one layer, `[num_blocks, 2, block_size, kv heads, head_dim]`. All
        layers must have the same strides. `block_tables`, `seq_lens` and `query_starts` are as in
        `paged_decode` and `paged_prefill`. Without `query_starts`, row i belongs to request i.
        `slots`, int64 `[num_tokens]`, is needed to write K and V; tokens with a slot of -1 are not
        written. Without a `workspace`, the step can be used by a `CpuNetwork`, but `run` cannot be
        called.

        Raises KernelRefused for values out of bounds, for a wrong shape or type, and if the library
        cannot be used."""
        why = reason_against(pool.dtype, pool.shape[-1])
        library = cpu_library()
        if why is not None or not isinstance(library, CpuLibrary):
            raise KernelRefused(f"kernels of the CPU cannot run: {why}; use the plain ones")
        if not scale > 0:
            raise KernelRefused(f"expected a scale above 0, got {scale}")
        if window is not None and window < 1:
            raise KernelRefused(f"expected a window of 1 token or more, got {window}")
        _check_shapes(num_tokens, num_heads, pool, block_tables, seq_lens, query_starts, slots)
        self._library = library
        self._kept = (pool, block_tables, seq_lens, query_starts, slots)
        self._of_rows = (num_tokens, num_heads, pool.shape[4])
        self._of_written = (num_tokens, *pool.shape[3:])
        self.pool = (pool.dtype, pool.shape, pool.stride())
        num_blocks, _, block_size, kv_heads, head_dim = pool.shape
        block_stride, self._plane_stride, token_stride, head_stride, _ = pool.stride()
        step = self.laid_down = Step(  # must live as long as the library reads it
            tables=block_tables.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            query_starts=None if query_starts is None else query_starts.data_ptr(),
            slots=None if slots is None else slots.data_ptr(),
            # The check only tests whether `k` is null; `run` sets the address of a layer.
            k=None if slots is None else slots.data_ptr(),
            num_tokens=num_tokens,
            num_requests=len(seq_lens),
            table_stride=block_tables.shape[1],
            block_stride=block_stride,
            token_stride=token_stride,
            head_stride=head_stride,
            num_blocks=num_blocks,
            block_size=block_size,
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=scale,
            softcap=softcap or 0.0,
            element=ELEMENTS[pool.dtype],
            worth_a_thread=worth_a_thread().attention,
        )
        self._address = ctypes.addressof(step)
        wrong = library.check(ctypes.byref(step))
        if wrong:
            raise KernelRefused(f"expected {_OUT_OF_BOUNDS[wrong]}, got others")
        # The step has no window yet, and without a window the workspace is largest.
        self._threads = torch.get_num_threads()
        if workspace is not None:
            needed = library.workspace_bytes(self._address, self._threads)
            self._memory = workspace.at_least(needed)
            step.workspace, step.workspace_bytes = self._memory.data_ptr(), self._memory.numel()
        step.window = window or 0

    @property
    def query_starts(self) -> npt.NDArray[np.int32]:
        """The first row of each request, and the row after the last request: `[requests + 1]`."""
        starts = self._kept[3]
        count = self.laid_down.num_requests
        return np.arange(count + 1, dtype=np.int32) if starts is None else starts.numpy()

    def run(
        self,
        q: Tensor,
        pool: Tensor,
        out: Tensor,
        written: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write K and V in `written`, each `[tokens, kv heads, head_dim]`, to their slots of
        `pool`. Then compute the attention of `q` `[tokens, heads, head_dim]`, and write it to
        `out`. `pool` is one layer of the pool, with the shape and strides of the constructor's
        `pool`. The last axis of every tensor must be contiguous. Raises KernelRefused for other
        tensors."""
        step = self.laid_down
        self._check_tensor("pool", pool, self.pool[1])
        if pool.stride() != self.pool[2]:
            raise KernelRefused(f"expected a pool of strides {self.pool[2]}, got {pool.stride()}")
        self._check_tensor("q", q, self._of_rows)
        self._check_tensor("out", out, self._of_rows)
        step.q, step.out = q.data_ptr(), out.data_ptr()
        step.q_row, step.q_head, _ = q.stride()
        step.out_row, step.out_head, _ = out.stride()
        step.keys = pool.data_ptr()
        step.values = step.keys + self._plane_stride * pool.element_size()
        if written is None:
            step.k = None
        else:
            k, v = written
            self._check_tensor("k", k, self._of_written)
            self._check_tensor("v", v, self._of_written)
            step.k, step.v = k.data_ptr(), v.data_ptr()
            step.k_row, step.k_head, _ = k.stride()
            step.v_row, step.v_head, _ = v.stride()
        if self._library.attend(self._address, self._threads):
            raise RuntimeError("the workspace of a step was measured too small")

    def _check_tensor(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Raise KernelRefused for a wrong shape or type, or if the last axis is not contiguous."""
        dtype = self.pool[0]
        if tensor.shape != shape or tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise KernelRefused(
                f"expected {name} of {dtype} {list(shape)}, its last axis contiguous, got "
                f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
            )


def _check_shapes(
    num_tokens: int,
    num_heads: int,
    pool: Tensor,
    tables: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Raise KernelRefused for arguments with which the library would read wrong memory."""
    if pool.dim() != 5 or pool.shape[1] != 2 or 0 in pool.shape or pool.stride(4) != 1:
        raise KernelRefused(
            "expected a pool of [num_blocks, 2, block_size, kv heads, head_dim], not empty, its "
            f"last axis contiguous, got {list(pool.shape)} with strides {pool.stride()}"
        )
    if num_heads < 1 or num_heads % pool.shape[3]:
        raise KernelRefused(
            f"expected heads as a multiple of the {pool.shape[3]} kv heads, got {num_heads}"
        )
    count = len(lengths)
    for name, tensor, dtype, shape in (
        ("block_tables", tables, torch.int32, (count, tables.shape[-1])),
        ("seq_lens", lengths, torch.int32, (count,)),
        ("query_starts", starts, torch.int32, (count + 1,)),
        ("slots", slots, torch.int64, (num_tokens,)),
    ):
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise KernelRefused(
                f"expected {name} of {dtype} {list(shape)}, contiguous, got {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )


def paged_attention_cpu(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    out: Tensor,
) -> Tensor:
    """Compute paged attention for one layer, write it to `out`, and return `out`. The arguments
    must have been checked, by `paged_decode` or, with `query_starts`, by `paged_prefill`."""
    step = CpuAttentionStep(
        kv,
        block_tables.contiguous(),
        seq_lens.contiguous(),
        None if query_starts is None else query_starts.contiguous(),
        num_tokens=len(q),
        num_heads=q.shape[1],
        scale=scale,
        workspace=Workspace(),
        window=window,
        softcap=softcap,
    )
    step.run(q, kv, out)
    return out
