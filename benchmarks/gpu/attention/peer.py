# SPDX-License-Identifier: Apache-2.0
"""The peers of the attention kernels, and how foreign functions are called.

Versions of a peer differ in the names of their arguments, so a call passes those that a function
has.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .cases import Batch

PeerLaunch = Callable[[int], Tensor]  # the attention over that layer of the batch


class PeerRefused(Exception):
    """This peer is not here, or cannot do this case; says why."""


class Peer(Protocol):
    """One other implementation. Making one imports it, and raises what the import raises."""

    name: str
    remark: str  # what a reader of its figures must know

    def __init__(self) -> None: ...

    def prepare(self, batch: Batch) -> PeerLaunch:
        """Everything that is done once for a batch; what is returned is timed. Raises PeerRefused
        for a batch that this peer has no kernel for, and whatever the peer raises."""
        ...


def import_first(modules: Sequence[str], name: str) -> Any:
    """`name` from the first module that has it, for modules move between versions. Raises
    PeerRefused with what happened to each, or whatever else an import raises."""
    reasons = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{module}: {error}")
    raise PeerRefused("; ".join(reasons))


def known_arguments(function: Callable[..., Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of `wanted` that `function` has; all, if it takes any name."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return wanted
    return {name: value for name, value in wanted.items() if name in parameters}


def planes(batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer as `[num_blocks, block_size, kv heads, head_dim]`: views, no copies."""
    key, value = batch.layers[layer].unbind(1)
    return key, value


def refuse_float8(batch: Batch) -> None:
    """Peers take one scale for a whole tensor where our pools have one for each head or token."""
    if batch.case.scales:
        raise PeerRefused("a float8 pool with other scales than this peer's")


def only_tensor(answer: Any) -> Tensor:
    """The result of a function that may give the softmax sums with it."""
    first = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(first, torch.Tensor):
        raise PeerRefused(f"expected a tensor, got {type(first).__name__}")
    return first


VLLM_MODULES = (
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.attention.ops.triton_unified_attention",
)
VLLM_NEEDED = {"cu_seqlens_q", "seqused_k", "block_table", "softmax_scale"}
# What its engine allocates for decode: contexts in 16 parts where fewer than 128 programs would
# run. A version that takes no such buffers has them inside.
SEGMENTS = 16
FEWEST_PROGRAMS = 128


class VllmTriton:
    """Reads our pool in place, through views of K and V."""

    name = "peer_triton"
    remark = "vLLM's Triton unified_attention on views of our pool, split as its engine does"

    def __init__(self) -> None:
        self._attend = import_first(VLLM_MODULES, "unified_attention")

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        out = torch.empty_like(batch.q)
        arguments = {
            "q": batch.q,
            "out": out,
            "cu_seqlens_q": batch.query_starts,
            "max_seqlen_q": max(new for new, _ in case.chunks),
            "seqused_k": batch.seq_lens,
            "max_seqlen_k": max(case.lengths),
            "softmax_scale": case.scale,
            "causal": True,
            "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
            "block_table": batch.block_tables,
            "softcap": case.softcap or 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            **_segment_buffers(batch),
        }
        passed = known_arguments(self._attend, arguments)
        if missing := VLLM_NEEDED - set(passed):
            raise PeerRefused(f"this version takes no {', '.join(sorted(missing))}")
        return partial(self._launch, batch, out, passed)

    def _launch(self, batch: Batch, out: Tensor, passed: dict[str, object], layer: int) -> Tensor:
        key, value = planes(batch, layer)
        self._attend(k=key, v=value, **passed)
        return out


def _segment_buffers(batch: Batch) -> dict[str, object]:
    case = batch.case
    most = max(1, FEWEST_PROGRAMS // case.kv_heads)
    rows = max(most, len(batch.seq_lens))
    padded = 1 << (case.head_dim - 1).bit_length()
    shape = (rows, case.heads, SEGMENTS)
    return {
        "seq_threshold_3D": most,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": batch.q.new_empty((*shape, padded), dtype=torch.float32),
        "softmax_segm_max": batch.q.new_empty(shape, dtype=torch.float32),
        "softmax_segm_expsum": batch.q.new_empty(shape, dtype=torch.float32),
    }


FLASH_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
FLASH_NEEDED = {"cache_seqlens", "page_table", "cu_seqlens_q"}


class FlashAttention3:
    """Reads our pool in place, through views of K and V."""

    name = "fa3"
    remark = "FlashAttention-3, flash_attn_with_kvcache on views of our pool"

    def __init__(self) -> None:
        self._attend = import_first(FLASH_MODULES, "flash_attn_with_kvcache")

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        arguments = {
            "cache_seqlens": batch.seq_lens,
            "page_table": batch.block_tables,
            "softmax_scale": case.scale,
            "causal": True,
            "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
            "softcap": case.softcap or 0.0,
        }
        q = batch.q
        if case.is_decode:
            q = q[:, None]
        else:
            arguments["cu_seqlens_q"] = batch.query_starts
            arguments["max_seqlen_q"] = max(new for new, _ in case.chunks)
        passed = known_arguments(self._attend, arguments)
        if missing := FLASH_NEEDED & (set(arguments) - set(passed)):
            raise PeerRefused(f"this version takes no {', '.join(sorted(missing))}")
        return partial(self._launch, batch, q, passed)

    def _launch(self, batch: Batch, q: Tensor, passed: dict[str, object], layer: int) -> Tensor:
        key, value = planes(batch, layer)
        return only_tensor(self._attend(q, key, value, **passed))


class TorchAttention:
    """Requests of one shape, without window and soft cap."""

    name = "torch"
    remark = (
        "scaled_dot_product_attention on K and V that lie contiguous already: it reads no block "
        "table and does less work than the others"
    )

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        if case.window is not None or case.softcap is not None:
            raise PeerRefused("it has neither a window nor a soft cap")
        if len(set(case.chunks)) != 1:
            raise PeerRefused("it takes requests of one length only")
        requests, (new, before) = len(case.chunks), case.chunks[0]
        # [requests, heads, tokens, head_dim]
        q = batch.q.view(requests, new, case.heads, case.head_dim).transpose(1, 2)
        gathered = [_gather(batch, layer) for layer in range(len(batch.layers))]
        mask = None if case.is_decode else causal_lower_right(new, new + before)
        return partial(_launch_gathered, q, gathered, mask, case.scale)


def _launch_gathered(
    q: Tensor, gathered: list[tuple[Tensor, Tensor]], mask: Tensor | None, scale: float, layer: int
) -> Tensor:
    key, value = gathered[layer]
    out = scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _gather(batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """K and V, each contiguous: `[requests, kv heads, tokens, head_dim]`."""
    length, blocks = batch.case.lengths[0], batch.block_tables.long()
    key, value = (
        plane[blocks].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
        for plane in planes(batch, layer)
    )
    return key, value


WORKSPACE_BYTES = 384 * 2**20
TENSOR_CORE_GROUP = 4  # from this many heads over one KV head on, as it recommends


class FlashInfer:
    """Reads our pool in place, through views of K and V."""

    name = "flashinfer"
    remark = "FlashInfer's paged wrappers on views of our pool; its plan is not timed"

    def __init__(self) -> None:
        self._decode = import_first(("flashinfer",), "BatchDecodeWithPagedKVCacheWrapper")
        self._prefill = import_first(("flashinfer",), "BatchPrefillWithPagedKVCacheWrapper")

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=batch.q.device)
        options = {
            "sm_scale": case.scale,
            "window_left": -1 if case.window is None else case.window - 1,
            "logits_soft_cap": case.softcap,
            "q_data_type": case.dtype,
            "kv_data_type": case.dtype,
        }
        shape = (case.heads, case.kv_heads, case.head_dim, case.block_size)
        if case.is_decode:
            cores = known_arguments(
                self._decode, {"use_tensor_cores": case.group >= TENSOR_CORE_GROUP}
            )
            wrapper = self._decode(space, "NHD", **cores)
            passed = known_arguments(wrapper.plan, options)
            wrapper.plan(*_pages(batch), *shape, **passed)
        else:
            wrapper = self._prefill(space, "NHD")
            passed = known_arguments(wrapper.plan, {**options, "causal": True})
            wrapper.plan(batch.query_starts, *_pages(batch), *shape, **passed)
        return partial(_launch_wrapper, wrapper, batch)


def _launch_wrapper(wrapper: Any, batch: Batch, layer: int) -> Tensor:
    return only_tensor(wrapper.run(batch.q, planes(batch, layer)))


def _pages(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Where each request's pages begin, all pages in a row, and how full each last page is."""
    size = batch.case.block_size
    widths = [-(-length // size) for length in batch.case.lengths]
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width)
    ids = [row[:width] for row, width in zip(batch.block_tables, widths, strict=True)]
    fill = [(length - 1) % size + 1 for length in batch.case.lengths]
    integers = partial(torch.tensor, dtype=torch.int32, device=batch.q.device)
    return integers(starts), torch.cat(ids), integers(fill)
