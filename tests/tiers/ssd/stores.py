# SPDX-License-Identifier: Apache-2.0
"""What the tests of the SSD store share: sizes and ways to look inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stratakv.tiers.base import Stored
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk.space import plan_space
from stratakv.tiers.ssd.index.index_file import Row, RowBatch
from stratakv.tiers.tag import Tagger

from ..blocks import SMALL, filled_buffers
from ..store_contract import SECONDS

BIG = BlockLayout(num_layers=4, block_size=16, num_kv_heads=2, head_dim=64, kv_dtype="float32")
Open = Callable[..., SsdStore]


def capacity_for(slots: int, layout: BlockLayout = SMALL) -> int:
    """The smallest capacity that gives so many slots."""
    low, high = 1, 2**40
    while low < high:
        middle = (low + high) // 2
        try:
            enough = plan_space(layout, middle).num_slots >= slots
        except TierConfigError:
            enough = False
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def batch_of(rows: Sequence[Row]) -> RowBatch:
    """A batch of rows that are in the order of their slots."""
    return RowBatch.from_rows(rows)


def store_keys(store: SsdStore) -> list[bytes]:
    return store._state.index.keys()


def put_proven(store: SsdStore, keys: Sequence[bytes]) -> list[bool]:
    """`put` as engines do, which have proofs: where the library can, it makes the records."""
    layout, buffers = store.layout, filled_buffers(keys, store.layout)
    tagger = Tagger(layout.layout_id(), layout.page_bytes)
    pairs = zip(keys, buffers, strict=True)
    proofs = [tagger.prove(key, buffer[: layout.page_bytes]) for key, buffer in pairs]
    outcomes = store.store(keys, buffers, proofs).result(SECONDS)
    return [outcome is Stored.KEPT for outcome in outcomes]


def damage_records(folder: Path) -> None:
    """Change bytes all over every slot file below a folder."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 16 and "mdb" not in path.name:
            data = bytearray(path.read_bytes())
            for at in range(0, len(data), 997):
                data[at] ^= 0x55
            path.write_bytes(data)
