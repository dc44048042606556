# SPDX-License-Identifier: Apache-2.0
"""The keys of the pool's pages, in the form that the pool and the connector exchange.

The key of a page is a digest (32 bytes) and its cache group (u16, little-endian); the key of a
block in the tiers is the key of a page followed by a rank (`tiers/block.py`). A block of the pool
has a page in each of `width` consecutive groups; the first group's number is a multiple of `width`.
A block has the id and the key of its first page:

    width 2     block 7, key D|2     pages 7, key D|2, and 8, key D|3"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from ..tiers.block import DIGEST_BYTES
from .messages import EvictedBlock

GROUP_BYTES = 2
PAGE_KEY_BYTES = DIGEST_BYTES + GROUP_BYTES


@cache
def group_suffix(group_id: int) -> bytes:
    """Return the bytes that follow a digest in the key of a page."""
    return group_id.to_bytes(GROUP_BYTES, "little")


def group_of(key: bytes) -> int:
    return int.from_bytes(key[DIGEST_BYTES:], "little")


def page_keys(keys: Iterable[bytes], width: int) -> list[bytes]:
    """Return the keys of all pages of the blocks with `keys`."""
    if width == 1:
        return list(keys)
    return [
        key[:DIGEST_BYTES] + group_suffix(group_of(key) + place)
        for key in keys
        for place in range(width)
    ]


def block_keys(keys: Iterable[bytes], width: int) -> list[bytes]:
    """Return the keys of the blocks to which the pages with `keys` belong, each block once."""
    if width == 1:
        return list(keys)
    firsts = [key[:DIGEST_BYTES] + group_suffix(group_of(key) // width * width) for key in keys]
    return list(dict.fromkeys(firsts))


def pages_of(blocks: Iterable[EvictedBlock]) -> list[EvictedBlock]:
    """Return the pages of `blocks`, one entry for each page."""
    pages = []
    for block in blocks:
        block_id, key, num_pages = block
        if num_pages == 1:
            pages.append(block)
        else:
            keys = page_keys((key,), num_pages)
            pages += [EvictedBlock(block_id + place, key) for place, key in enumerate(keys)]
    return pages
