# SPDX-License-Identifier: Apache-2.0
"""The section that compares StrataKV's prefill kernel with libraries over gathered K and V.

The time of a library includes the gather, which the engine would also need. With
`--attention-backend auto`, the engine itself chooses between kernel and library, by a measurement
at every start (`engine/worker/forward/prefill_backend.py`)."""

from __future__ import annotations

from statistics import geometric_mean

import torch

from ....kernels.attention import gathered_prefill
from .. import section
from ..plots import draw_peers
from . import peers, prefill
from .cases import Batch

NAME = "prefill-library"
# The cases, as new tokens and tokens before the new tokens.
GRID = [prefill.name_of(*case) for case in ((2048, 8192), (8192, 32768), (8192, 8192))]


class GatheredSdpa:
    """Torch's attention over K and V that the same launch gathers, as the engine may use it."""

    name = gathered_prefill.SDPA
    remark = "K and V gathered, then torch's scaled_dot_product_attention"

    def __init__(self) -> None:
        gathered_prefill.open_library(self.name)

    def prepare(self, batch: Batch) -> peers.PeerLaunch:
        q, kv, table = batch.q, batch.layers[0], batch.block_tables[0]
        if q.is_cuda and (reason := gathered_prefill.reason_against_library(self.name, q, kv)):
            raise peers.PeerRefused(reason)
        [length], scale = batch.case.lengths, batch.case.scale
        attend = gathered_prefill.GatheredPrefill(self.name, kv, length, min_rows=1).run
        return lambda layer: attend(
            q, batch.layers[layer], table, length, scale, torch.empty_like(q)
        )


class GatheredFa3(GatheredSdpa):
    """FlashAttention-3 over K and V that the same launch gathers."""

    name = gathered_prefill.FA3
    remark = "K and V gathered, then flash_attn_func of fa3-fwd"


LIBRARIES: tuple[type[peers.Peer], ...] = (GatheredFa3, GatheredSdpa)


def run(place: section.Place, results: section.Results) -> None:
    """Measure StrataKV's kernel, then the libraries. Raises SectionOver, WrongResult."""
    grid = {case.name: case for case in prefill.choose_cases(place)}
    cases = [grid[name] for name in GRID]
    for name in peers.measure(place, results, NAME, cases, LIBRARIES):
        rows = [row for row in results.rows(NAME) if name in row["peers"]]
        gain = geometric_mean([row["seconds"] / row["peers"][name] for row in rows])
        results.set_ratio(f"prefill_{name}_over_triton", gain)


SECTION = section.Section(NAME, "Prefill by a library", run, draw_peers)
