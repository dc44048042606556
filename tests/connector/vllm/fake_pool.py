# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool and cache groups, as small as a connector lets them be, with the recorded
parameters of what is listened to and vLLM's rule of which blocks a windowed group keeps."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Iterable, Sequence
from typing import Any

from .fake_host import signature_of

BLOCK = 4
LISTENED = ("get_new_blocks", "cache_full_blocks", "evict_blocks", "reset_prefix_cache")


class FullAttentionSpec:
    """One of vLLM's kinds of cache group, by its name."""

    block_size = BLOCK
    window: int | None = None

    def __init__(self, page_size_bytes: int) -> None:
        self.page_size_bytes = page_size_bytes

    def num_skipped(self, num_tokens: int) -> int:
        """Tokens that nothing attends to when so many have been computed."""
        return 0


class SlidingWindowSpec(FullAttentionSpec):
    """Another one."""

    def __init__(self, page_size_bytes: int, window: int) -> None:
        super().__init__(page_size_bytes)
        self.sliding_window = window

    def num_skipped(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.sliding_window + 1)


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """And another one."""

    def __init__(self, page_size_bytes: int, chunk: int) -> None:
        super().__init__(page_size_bytes)
        self.attention_chunk_size = chunk

    def num_skipped(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.attention_chunk_size


class Block:
    """One of the pool's."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.next_free_block: Block | None = None


class Pool:
    """Block 0 is the null block."""

    def __init__(self, num_blocks: int, record: dict[str, Any]) -> None:
        self.hash_block_size = BLOCK
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = types.SimpleNamespace(fake_free_list_head=Block(-1))
        self._free = self.blocks[1:]
        self._tail = Block(-1)
        self._link()
        for name in LISTENED:
            recorded = signature_of(record["classes"]["BlockPool"]["methods"][name]["parameters"])
            mine = list(inspect.signature(getattr(Pool, name)).parameters)[1:]
            assert mine == list(recorded.parameters), name

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get_new_blocks(self, num_blocks: int) -> list[Block]:
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        assert len(taken) == num_blocks
        self._link()
        for block in taken:
            assert block.ref_cnt == 0
            block.block_hash = None
            block.ref_cnt = 1
        return taken

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        for index in range(num_cached_blocks, num_full_blocks):
            if blocks[index].is_null:
                continue
            assert blocks[index].block_hash is None
            group = kv_cache_group_id.to_bytes(4, "big")
            blocks[index].block_hash = request.block_hashes[index] + group

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id].block_hash = None

    def reset_prefix_cache(self) -> bool:
        if self.num_free != len(self.blocks) - 1:
            return False
        for block in self.blocks:
            block.block_hash = None
        return True

    def find(
        self, block_hashes: Sequence[bytes], most: int, specs: Sequence[FullAttentionSpec]
    ) -> list[list[Block]]:
        """The longest hit of at most so many blocks: of each group its blocks, null where nothing
        attends to them."""
        by_key = {block.block_hash: block for block in self.blocks if block.block_hash}
        for length in range(most, 0, -1):
            tables = []
            for group, spec in enumerate(specs):
                skipped = spec.num_skipped(length * BLOCK) // BLOCK
                keys = [name + group.to_bytes(4, "big") for name in block_hashes[skipped:length]]
                found = [by_key[key] for key in keys if key in by_key]
                tables.append([self.null_block] * skipped + found)
            if all(len(table) == length for table in tables):
                return tables
        return [[] for _ in specs]

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.is_null:
                continue
            if not block.ref_cnt:
                self._free.remove(block)
            block.ref_cnt += 1
        self._link()

    def free(self, blocks: Iterable[Block]) -> None:
        """The tail of a sequence first."""
        named, unnamed = [], []
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if not block.ref_cnt:
                (unnamed if block.block_hash is None else named).append(block)
        self._free = [*unnamed, *self._free, *named]
        self._link()

    def _link(self) -> None:
        chain = [self.free_block_queue.fake_free_list_head, *self._free, self._tail]
        for block, following in itertools.pairwise(chain):
            block.next_free_block = following
