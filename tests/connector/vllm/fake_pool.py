# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool and cache groups, as small as a connector lets them be, with the recorded
parameters of what is listened to and vLLM's rules of which blocks a group keeps: of a window, of a
state, and at the ends of prompts only (`prefix_cache_retention_interval`)."""

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

    is_sparse = False  # some of its blocks need not be kept

    def __init__(self, page_size_bytes: int, block_size: int = BLOCK) -> None:
        self.page_size_bytes = page_size_bytes
        self.block_size = block_size

    def num_skipped(self, num_tokens: int) -> int:
        """Tokens that nothing attends to when so many have been computed."""
        return 0

    def keeps(self, index: int, end: int) -> bool:
        """Whether a hit that ends behind so many tokens needs the block at that index."""
        size = self.block_size
        return self.num_skipped(end) // size <= index < end // size


class SinkFullAttentionSpec(FullAttentionSpec):
    """Sinks have blocks of their own, which no request sees."""


class SlidingWindowSpec(FullAttentionSpec):
    """Another one."""

    is_sparse = True

    def __init__(self, page_size_bytes: int, window: int, block_size: int = BLOCK) -> None:
        super().__init__(page_size_bytes, block_size)
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


class MambaSpec(FullAttentionSpec):
    """States: a block has the state behind its last token. `shapes` and `dtypes` are those of its
    tensors, which end before their page does."""

    is_sparse = True
    mamba_cache_mode = "align"

    def __init__(
        self,
        page_size_bytes: int,
        block_size: int = BLOCK,
        *,
        shapes: tuple[tuple[int, ...], ...] = ((3, 64), (4, 16, 16)),
        dtypes: tuple[str, ...] = ("bfloat16", "float32"),
        mamba_type: str = "GDN_ATTN",
        **fields: Any,
    ) -> None:
        super().__init__(page_size_bytes, block_size)
        self.shapes, self.dtypes, self.mamba_type = shapes, dtypes, mamba_type
        self.num_speculative_blocks = 0
        self.num_prefill_checkpoint_blocks = 0
        vars(self).update(fields)

    def num_skipped(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1)


class Block:
    """One of the pool's."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.next_free_block: Block | None = None


class Pool:
    """Block 0 is the null block. A hash is of `hash_block_size` tokens, and hits end every
    `position` tokens. `retention`: what is kept of windows and states; None is everything."""

    def __init__(
        self,
        num_blocks: int,
        record: dict[str, Any],
        *,
        hash_block_size: int = BLOCK,
        position: int = BLOCK,
        retention: int | None = None,
    ) -> None:
        self.hash_block_size = hash_block_size
        self.position = position
        self.retention = retention
        self.cached_in_step: set[bytes] = set()
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
            is_masked = block_mask is not None and not block_mask[index - num_cached_blocks]
            if blocks[index].is_null or is_masked:
                continue
            assert blocks[index].block_hash is None
            group = kv_cache_group_id.to_bytes(4, "big")
            key = self._hash_of(request.block_hashes, index, block_size) + group
            blocks[index].block_hash = key
            self.cached_in_step.add(key)

    def kept(
        self, spec: FullAttentionSpec, first: int, end: int, num_prompt_tokens: int
    ) -> list[bool] | None:
        """Return which of these blocks of a request are cached: of a sparse group those that a hit
        needs which ends at the end of the prompt, or at a multiple of the interval."""
        if self.retention is None or not spec.is_sparse:
            return None
        ends = [(num_prompt_tokens - 1) // self.position * self.position]
        if self.retention:
            behind = end * spec.block_size + self.retention
            ends += range(self.retention, behind + 1, self.retention)
        return [any(spec.keeps(index, each) for each in ends) for index in range(first, end)]

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
        """The longest hit of at most so many positions: of each group its blocks, null where
        nothing needs them."""
        by_key = {block.block_hash: block for block in self.blocks if block.block_hash}
        for end in range(most * self.position, 0, -self.position):
            tables = []
            for group, spec in enumerate(specs):
                size = spec.block_size
                skipped = spec.num_skipped(end) // size
                keys = [
                    self._hash_of(block_hashes, index, size) + group.to_bytes(4, "big")
                    for index in range(skipped, end // size)
                ]
                found = [by_key[key] for key in keys if key in by_key]
                tables.append([self.null_block] * skipped + found)
            lengths = [end // spec.block_size for spec in specs]
            if [len(table) for table in tables] == lengths:
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
        cached, uncached = [], []
        for block in blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if not block.ref_cnt:
                (uncached if block.block_hash is None else cached).append(block)
        self._free = [*uncached, *self._free, *cached]
        self._link()

    def _hash_of(self, hashes: Sequence[bytes], index: int, block_size: int) -> bytes:
        """The hash of a block is the one that ends where it does."""
        return hashes[(index + 1) * block_size // self.hash_block_size - 1]

    def _link(self) -> None:
        chain = [self.free_block_queue.fake_free_list_head, *self._free, self._tail]
        for block, following in itertools.pairwise(chain):
            block.next_free_block = following
