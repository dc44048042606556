# SPDX-License-Identifier: Apache-2.0
"""Reads of the paged KV pool in torch, for the plain attention kernels.

The functions read whole blocks: the caller drops the tokens beyond a request's length."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_tokens(
    kv: Tensor, plane: int, blocks: Tensor, kv_scales: Tensor | None, wide: torch.dtype
) -> Tensor:
    """Return K (`plane` 0) or V (1) of `blocks`, scaled, as `[tokens, kv heads, head_dim]`."""
    pool = kv[:, plane]
    if kv_scales is None:
        return pool[blocks].to(wide).flatten(0, 1)
    # torch cannot index float8 tensors, but can index the same bytes as uint8.
    stored = pool.view(torch.uint8)[blocks].view(kv.dtype).to(wide)
    of_tokens = kv_scales.dim() == 4
    scales = kv_scales[:, plane][blocks] if of_tokens else kv_scales[plane]
    return (stored * scales.to(wide)[..., None]).flatten(0, 1)
