# SPDX-License-Identifier: Apache-2.0
"""The keys of vLLM's blocks in the tiers: the hash at a position's end, and the column
(`groups.py`).

vLLM's key of a block has the hash at the block's own end. If every block is a position and has one
hash, both keys are the same. If groups have blocks of different sizes, or vLLM hashes in smaller
steps than blocks, this module makes the keys of a position's blocks once vLLM has cached all of
them. This module also makes the keys of requests with adapters, from other hashes (`adapters.py`).
A block keeps the key of the adapter content with which it was computed, even if vLLM finds the
block for a request with another content. Later blocks of that request get no key."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ....tiers.settings.values import ConfigError
from ..identity import GROUP_BYTES
from .adapters import Adapters, RequestAdapter
from .groups import Columns


class CachedBlock(NamedTuple):
    """A block with its key, which is a hash and a column, in the form of vLLM's key."""

    block_id: int
    host_key: bytes


class _Keys(NamedTuple):
    """The key of a block that this module made, and vLLM's key of the block at that time."""

    of_host: bytes
    ours: bytes | None
    adapter_id: int | None = None


class HostKeys:
    """The keys of the blocks of one pool whose groups have these `columns`."""

    def __init__(self, columns: Columns, adapters: Adapters) -> None:
        self._columns = columns
        self._adapters = adapters
        self._hashes_per_position = 1
        # The keys made by this class, by block id; other blocks have vLLM's key or no key.
        self._made: dict[int, _Keys] = {}
        self._is_made_here = len(columns.all) > columns.num_groups

    def bind_hash_tokens(self, hash_tokens: int) -> None:
        """Set the tokens of a vLLM hash. Raises ConfigError if positions end between hashes."""
        tokens = self._columns.position_tokens
        if tokens % hash_tokens:
            raise ConfigError(
                f"vLLM hashes every {hash_tokens} tokens, and its blocks end every {tokens}; "
                "StrataConnector needs a hash there: leave --prefix-match-unit out"
            )
        self._hashes_per_position = tokens // hash_tokens
        self._is_made_here |= self._hashes_per_position > 1

    def hashes_of(self, request: Any) -> Sequence[bytes]:
        """Return the hash at the end of each whole position of a vLLM request. The hash covers the
        content of the request's adapter; without a fingerprint there are none."""
        adapted = self._adapters.adapter_of(request)
        hashes = request.block_hashes if adapted is None else adapted.hashes_of(request)
        return self._at_positions(hashes)

    def host_hashes_of(self, request: Any) -> Sequence[bytes]:
        """Return vLLM's own hash at the end of each whole position."""
        return self._at_positions(request.block_hashes)

    def key_of(self, block: Any) -> bytes | None:
        """Return the key of a vLLM block; None if the block has no key."""
        of_host: bytes | None = block.block_hash
        made = self._made.get(block.block_id)
        if made is not None and made.of_host == of_host:
            return made.ours
        return None if self._is_made_here else of_host

    def drop_adapters(self, adapter_ids: Collection[int]) -> None:
        """Remove the keys of the blocks that were computed with these adapters."""
        for block_id, made in self._made.items():
            if made.adapter_id in adapter_ids:
                self._made[block_id] = made._replace(ours=None)

    def record_cached(
        self, request: Any, blocks: Sequence[Any], num_cached: int, num_full: int, group: int
    ) -> tuple[int, list[CachedBlock]]:
        """Record `blocks[num_cached:num_full]` of a group, which vLLM has just cached. Return the
        first position with cached blocks, and all blocks with keys from that position on."""
        step = self._columns.blocks_per_position(group)
        start = num_cached // step * step
        end = num_full // step * step
        adapted = self._adapters.adapter_of(request)
        if adapted is not None:
            self._check_prefix(adapted, request, blocks, num_cached, group)
            adapted.cached_ends[group] = num_full
        if self._is_made_here or adapted is not None:
            self._make_keys(request, blocks[:end], start, group, adapted)
        pairs = ((each.block_id, self.key_of(each)) for each in blocks[start:end])
        return start // step, [CachedBlock(i, key) for i, key in pairs if key is not None]

    def _check_prefix(
        self,
        adapted: RequestAdapter,
        request: Any,
        blocks: Sequence[Any],
        num_cached: int,
        group: int,
    ) -> None:
        """Record if blocks before the new blocks have another adapter content than the request.
        Blocks that this request cached itself were checked then."""
        if adapted.is_mixed or adapted.cached_ends.get(group, 0) == num_cached:
            return
        hashes = self.hashes_of(request)
        step = self._columns.blocks_per_position(group)
        for index in range(min(num_cached // step * step, len(blocks))):
            block = blocks[index]
            if block.block_hash is not None:
                own = self._key_at(hashes, index, group) if index < len(hashes) * step else None
                adapted.is_mixed |= own is None or self.key_of(block) != own

    def _make_keys(
        self,
        request: Any,
        blocks: Sequence[Any],
        start: int,
        group: int,
        adapted: RequestAdapter | None,
    ) -> None:
        hashes = self.hashes_of(request)
        step = self._columns.blocks_per_position(group)
        num_known = 0 if adapted is not None and adapted.is_mixed else len(hashes) * step
        adapter_id = None if adapted is None else adapted.adapter_id
        for index in range(start, len(blocks)):
            block = blocks[index]
            if block.block_hash is not None:
                key = self._key_at(hashes, index, group) if index < num_known else None
                self._made[block.block_id] = _Keys(block.block_hash, key, adapter_id)

    def _key_at(self, hashes: Sequence[bytes], index: int, group: int) -> bytes:
        """Return the key of the block at `index` of a request's table."""
        column = self._columns.number_of(group, index)
        position = index // self._columns.blocks_per_position(group)
        return hashes[position] + column.to_bytes(GROUP_BYTES, "big")

    def _at_positions(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        step = self._hashes_per_position
        return hashes if step == 1 else hashes[step - 1 :: step]
