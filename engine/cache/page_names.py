# SPDX-License-Identifier: Apache-2.0
"""From blocks to their pages, and back.

A page is named by a digest (32 bytes) and its cache group (u16, little-endian). A block has a page
in `width` groups that follow each other, those that begin at a multiple of it; the pool knows it by
the id and the name of the first:

    width 2     block 7, named D|2     pages 7, named D|2, and 8, named D|3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from ...connector.base import GROUP_BYTES
from ...tiers.block import DIGEST_BYTES
from .kv_block import BlockIds, KVCacheBlock


@cache
def group_suffix(group_id: int) -> bytes:
    """The bytes that follow a digest in the name of a page."""
    return group_id.to_bytes(GROUP_BYTES, "little")


def page_ids(block_ids: Sequence[int], place: int) -> list[int]:
    """The pages of blocks in the group that comes `place` after their first one."""
    return [block_id and block_id + place for block_id in block_ids]  # 0 is the null block


def page_tables(blocks: Sequence[Sequence[KVCacheBlock]], width: int) -> BlockIds:
    """The ids of blocks, as of tables, in every group: `width` of them share the blocks of each."""
    ids = [[block.block_id for block in each] for each in blocks]
    if width == 1:
        return tuple(ids)
    return tuple([page_ids(each, place) for each in ids for place in range(width)])


def page_keys(keys: Iterable[bytes], width: int) -> list[bytes]:
    """The names of all pages of blocks, by the names of these."""
    if width == 1:
        return list(keys)
    return [
        key[:DIGEST_BYTES] + group_suffix(_group_of(key) + place)
        for key in keys
        for place in range(width)
    ]


def block_keys(keys: Iterable[bytes], width: int) -> list[bytes]:
    """The names of blocks, each once, by the names of some of their pages."""
    if width == 1:
        return list(keys)
    firsts = [key[:DIGEST_BYTES] + group_suffix(_group_of(key) // width * width) for key in keys]
    return list(dict.fromkeys(firsts))


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[DIGEST_BYTES:], "little")
