# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as a peer: `flash_attn_with_kvcache` with a page table, decode and prefill."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .cases import Batch
from .peer import (
    PeerLaunch,
    PeerRefused,
    import_first,
    known_arguments,
    only_tensor,
    planes,
    refuse_float8,
)

MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
NEEDED = {"cache_seqlens", "page_table", "cu_seqlens_q"}


class FlashAttention3:
    """Reads our pool in place, through views of K and V."""

    name = "fa3"
    remark = "FlashAttention-3, flash_attn_with_kvcache on views of our pool"

    def __init__(self) -> None:
        self._attend = import_first(MODULES, "flash_attn_with_kvcache")

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
        if missing := NEEDED & (set(arguments) - set(passed)):
            raise PeerRefused(f"this version takes no {', '.join(sorted(missing))}")
        return partial(self._launch, batch, q, passed)

    def _launch(self, batch: Batch, q: Tensor, passed: dict[str, object], layer: int) -> Tensor:
        key, value = planes(batch, layer)
        return only_tensor(self._attend(q, key, value, **passed))
