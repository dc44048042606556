# SPDX-License-Identifier: Apache-2.0
"""torch's own attention as a peer. It knows no pages: K and V are gathered before it is timed, so
it does less than the others, and less than any engine could let it do.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .cases import Batch
from .peer import PeerLaunch, PeerRefused, planes, refuse_float8


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
        return partial(_launch, q, gathered, mask, case.scale)


def _launch(
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
