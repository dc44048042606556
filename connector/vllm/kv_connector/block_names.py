# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM's blocks in the tiers: the hash at a position's end, and the column
(`groups.py`).

vLLM names a block by the hash at the block's own end. If every block is a position and has one
hash, both names are the same. If groups have blocks of unlike sizes, or vLLM hashes in smaller
steps than blocks, this module names a position's blocks once vLLM has named all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ....tiers.settings.values import ConfigError
from ..identity import GROUP_BYTES
from .groups import Columns


class NamedBlock(NamedTuple):
    """A block with its name: the hash and the column, in the form of vLLM's key."""

    block_id: int
    host_key: bytes


class _Names(NamedTuple):
    """The name of a block that this module made, and vLLM's name of the block at that time."""

    of_host: bytes
    ours: bytes


class BlockNames:
    """Names the blocks of one pool whose groups have these `columns`."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._hashes_per_position = 1
        # Names made here, by block id; empty if they are the same as vLLM's.
        self._made: dict[int, _Names] = {}
        self._is_made_here = len(columns.all) > columns.num_groups

    def bind_hash_tokens(self, hash_tokens: int) -> None:
        """Set the tokens of one vLLM hash. Raises ConfigError if positions end between hashes."""
        tokens = self._columns.position_tokens
        if tokens % hash_tokens:
            raise ConfigError(
                f"vLLM names every {hash_tokens} tokens, and its blocks end every {tokens}; "
                "StrataConnector needs a name there: leave --prefix-match-unit out"
            )
        self._hashes_per_position = tokens // hash_tokens
        self._is_made_here |= self._hashes_per_position > 1

    def hashes_of(self, request: Any) -> Sequence[bytes]:
        """The hash at the end of each whole position of one of vLLM's requests."""
        hashes: Sequence[bytes] = request.block_hashes
        step = self._hashes_per_position
        return hashes if step == 1 else hashes[step - 1 :: step]

    def name_of(self, block: Any) -> bytes | None:
        """The name of one of vLLM's blocks; None if it has none."""
        host_name: bytes | None = block.block_hash
        if not self._is_made_here or host_name is None:
            return host_name
        made = self._made.get(block.block_id)
        return made.ours if made is not None and made.of_host == host_name else None

    def name_blocks(
        self, request: Any, blocks: Sequence[Any], num_named: int, num_full: int, group: int
    ) -> tuple[int, list[NamedBlock]]:
        """Name `blocks[num_named:num_full]` of a group, which vLLM has just named. Return the first
        position with such blocks, and all named blocks from its start on."""
        step = self._columns.blocks_per_position(group)
        start = num_named // step * step
        end = num_full // step * step
        if self._is_made_here:
            self._make_names(request, blocks[:end], start, group)
        pairs = ((each.block_id, self.name_of(each)) for each in blocks[start:end])
        return start // step, [NamedBlock(i, name) for i, name in pairs if name is not None]

    def _make_names(self, request: Any, blocks: Sequence[Any], start: int, group: int) -> None:
        hashes = self.hashes_of(request)
        step = self._columns.blocks_per_position(group)
        for index in range(start, min(len(blocks), len(hashes) * step)):
            block = blocks[index]
            if block.block_hash is not None:
                column = self._columns.number_of(group, index)
                name = hashes[index // step] + column.to_bytes(GROUP_BYTES, "big")
                self._made[block.block_id] = _Names(block.block_hash, name)
