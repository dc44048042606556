# SPDX-License-Identifier: Apache-2.0
"""Writes one of the stores beside it, with whatever version of the package it is run with:

git worktree add --detach /tmp/old/stratakv 373ac4a
cd /tmp/old && PYTHONPATH=/tmp/old python .../record.py /tmp/store
tar --sort=name --owner=0 --group=0 --mtime=@0 -C /tmp/store -cJf format-2.tar.xz .
"""

import hashlib
import mmap
import sys

from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.ssd import SsdStore

LAYOUT = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=32, kv_dtype="float32")
NAMESPACE = b"recorded"
BLOCKS = 12
CAPACITY = 768 * 1024
SECONDS = 10.0


def recorded_keys() -> list[bytes]:
    """The keys of the blocks in each store."""
    return [pack_key(hashlib.sha256(f"/{i}".encode()).digest()) for i in range(BLOCKS)]


def payload_of(key: bytes) -> bytes:
    """The bytes of a block, which take little room when packed."""
    return (key * LAYOUT.page_bytes)[: LAYOUT.page_bytes]


if __name__ == "__main__":
    keys = recorded_keys()
    memory = memoryview(mmap.mmap(-1, BLOCKS * LAYOUT.slot_bytes))
    buffers = [memory[i * LAYOUT.slot_bytes :][: LAYOUT.slot_bytes] for i in range(BLOCKS)]
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[: LAYOUT.page_bytes] = payload_of(key)
    store = SsdStore(sys.argv[1], LAYOUT, CAPACITY, namespace=NAMESPACE)
    store.store(keys, buffers).result(SECONDS)
    store.close(SECONDS)
