# SPDX-License-Identifier: Apache-2.0
"""Two layouts, and the keys, payloads and buffers of the tier contract. No torch, no numpy."""

from __future__ import annotations

from stratakv.tiers.block import BlockLayout
from stratakv.tiers.contract import filled_buffers, make_buffers, make_keys, payload_of

__all__ = ["ODD", "SMALL", "filled_buffers", "make_buffers", "make_keys", "payload_of"]

# 4 KiB, a whole page; and 6 KiB, whose last page is half full.
SMALL = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=32, kv_dtype="float32")
ODD = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=48, kv_dtype="float32")
