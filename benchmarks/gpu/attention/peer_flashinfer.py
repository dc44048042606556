# SPDX-License-Identifier: Apache-2.0
"""FlashInfer as a peer: its wrappers for decode and prefill over pages.

Its plan on the CPU is made once for a batch and not timed, as an engine makes one for all layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .cases import Batch
from .peer import PeerLaunch, import_first, known_arguments, only_tensor, planes, refuse_float8

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
        return partial(_launch, wrapper, batch)


def _launch(wrapper: Any, batch: Batch, layer: int) -> Tensor:
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
