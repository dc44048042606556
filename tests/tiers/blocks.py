# SPDX-License-Identifier: Apache-2.0
"""Makes keys, payloads and aligned buffers for the tests of the tiers. No torch, no numpy."""

from __future__ import annotations

import hashlib
import mmap
import random

from stratakv.tiers.block import BlockLayout, pack_key

# 4 KiB, a whole page; and 6 KiB, whose last page is half full.
SMALL = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=32, kv_dtype="float32")
ODD = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=48, kv_dtype="float32")


def make_keys(count: int, salt: str = "") -> list[bytes]:
    """Keys that are the same in every run."""
    return [pack_key(hashlib.sha256(f"{salt}/{i}".encode()).digest()) for i in range(count)]


def payload_of(key: bytes, layout: BlockLayout) -> bytes:
    """The bytes that belong to a key."""
    return random.Random(key).randbytes(layout.page_bytes)


def make_buffers(count: int, layout: BlockLayout) -> list[memoryview]:
    """Zeroed buffers of `slot_bytes`, aligned to pages."""
    size = layout.slot_bytes
    memory = memoryview(mmap.mmap(-1, max(1, count) * size))
    return [memory[i * size : (i + 1) * size] for i in range(count)]


def filled_buffers(keys: list[bytes], layout: BlockLayout) -> list[memoryview]:
    """Buffers that hold what belongs to the keys."""
    buffers = make_buffers(len(keys), layout)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[: layout.page_bytes] = payload_of(key, layout)
    return buffers
