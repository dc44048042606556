# SPDX-License-Identifier: Apache-2.0
"""The sizes of a run of `stratakv bench tiers`, in its full and its quick form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...tiers.block import BlockLayout, pack_key

MIB = 1024**2
GIB = 1024**3
# The sections of a run; the section `codecs` has no gate.
SECTIONS = SLAB, SSD, INDEX, CODECS = ("slab", "ssd", "index", "codecs")
SIZES: Mapping[str, int] = {"256KiB": 256 * 1024, "2MiB": 2 * MIB, "5MiB": 5 * MIB}
# The size of a layer of a block; the number of layers determines the size of a block.
_LAYER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in bytes and numbers of rounds."""

    slab_bytes: int  # least size of the slab, and of the memory to copy from
    slab_rounds: int
    store_bytes: int  # the capacity of the store, and the size of the limit's file
    round_bytes: int  # bytes of one round, which takes about 0.2 to 0.5 s
    rounds: int  # even, so that each side runs first equally often
    index_entries: int
    index_rounds: int
    seconds: float  # after which a comparison begins no round

    @property
    def needed_bytes(self) -> int:
        """The largest number of bytes of the run on the disk, with a margin."""
        return 2 * self.store_bytes + 300 * self.index_entries + 256 * MIB


FULL = Scale(
    slab_bytes=256 * MIB,
    slab_rounds=9,
    store_bytes=GIB,
    round_bytes=768 * MIB,
    rounds=16,
    index_entries=1_000_000,
    index_rounds=5,
    seconds=18.0,
)
QUICK = Scale(
    slab_bytes=64 * MIB,
    slab_rounds=2,
    store_bytes=128 * MIB,
    round_bytes=48 * MIB,
    rounds=2,
    index_entries=20_000,
    index_rounds=2,
    seconds=60.0,
)


def layout_of(block_bytes: int) -> BlockLayout:
    """Return a layout whose blocks have `block_bytes` bytes."""
    return BlockLayout(
        num_layers=block_bytes // _LAYER_BYTES,
        block_size=16,
        num_kv_heads=1,
        head_dim=64,
        kv_dtype="bfloat16",
    )


def key_of(number: int) -> bytes:
    """Return the key of block `number`. Like digests, keys of consecutive numbers differ in all
    bytes."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15_F39CC0605CEDC835_1082276BF3A27251_FBE5EA6DA6EA9C5B
    return pack_key((mixed % 2**256).to_bytes(32, "little"))
