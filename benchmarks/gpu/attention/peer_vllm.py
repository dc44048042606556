# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention as a peer: one kernel for prefill and decode."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .cases import Batch
from .peer import PeerLaunch, PeerRefused, import_first, known_arguments, planes, refuse_float8

MODULES = (
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.attention.ops.triton_unified_attention",
)
NEEDED = {"cu_seqlens_q", "seqused_k", "block_table", "softmax_scale"}
# What its engine allocates for decode: contexts in 16 parts where fewer than 128 programs would
# run. A version that takes no such buffers has them inside.
SEGMENTS = 16
FEWEST_PROGRAMS = 128


class VllmTriton:
    """Reads our pool in place, through views of K and V."""

    name = "peer_triton"
    remark = "vLLM's Triton unified_attention on views of our pool, split as its engine does"

    def __init__(self) -> None:
        self._attend = import_first(MODULES, "unified_attention")

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
        if missing := NEEDED - set(passed):
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
