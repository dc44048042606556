# SPDX-License-Identifier: Apache-2.0
"""Makes KV cache events, in vLLM's form, for blocks that came into the slab or left it.

vLLM publishes these events together with the events of its own cache. An event has the block's
tokens and parent, so that a router can recognise the prefix, or only the block's hash if tokens and
parent are unknown. Blocks that only a disk or a cache server has cause no events.

The event of a block computed with an adapter has the hash of vLLM's own events, and the adapter's
name; `extra_keys` has the name and, in hexadecimal, the fingerprint of its content."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .groups import Columns
from .host_keys import HostKeys

# The time between two searches for blocks that have left the slab.
LOOK_SECONDS = 1.0
HASH_END = -4  # a key is a hash and a column


@dataclass(frozen=True, slots=True)
class _Content:
    """The tokens and parent of a block, for events."""

    host_hash: bytes
    parent: bytes | None
    tokens: list[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[str, ...] | None


class _Announced(NamedTuple):
    """A block of the slab whose event was made."""

    host_hash: bytes
    group: int


class TierEvents:
    """Collects events. `most_blocks` is the number of the slab's slots plus vLLM's blocks."""

    def __init__(self, columns: Columns, most_blocks: int) -> None:
        self._columns = columns
        self._block_tokens = columns.position_tokens
        self._most = 2 * most_blocks
        self._contents: OrderedDict[bytes, _Content] = OrderedDict()  # by the hash in `HostKeys`
        self._announced: dict[bytes, _Announced] = {}  # by StrataKV's key
        self._events: list[Any] = []
        self._look_at = 0.0

    def add_cached(
        self, request: Any, host_keys: HostKeys, first: int, end: int, fingerprint: bytes | None
    ) -> None:
        """Record the content of a request's blocks at positions `first` to `end`, which vLLM has
        just cached. `fingerprint` identifies the content of the request's adapter."""
        hashes, host_hashes = host_keys.hashes_of(request), host_keys.host_hashes_of(request)
        size, lora = self._block_tokens, request.lora_request
        extra_keys = None
        if lora is not None and fingerprint is not None:
            extra_keys = (lora.name, fingerprint.hex())
        for index in range(first, min(end, len(hashes))):
            self._contents[hashes[index]] = _Content(
                host_hashes[index],
                host_hashes[index - 1] if index else None,
                list(request.all_token_ids[index * size : (index + 1) * size]),
                None if lora is None else lora.adapter_id,
                None if lora is None else lora.name,
                extra_keys,
            )
            self._contents.move_to_end(hashes[index])
        while len(self._contents) > self._most:
            self._contents.popitem(last=False)

    def add_stored(self, host_keys: Sequence[bytes], keys: Sequence[bytes]) -> None:
        """Announce new blocks of the slab, given by vLLM's keys and by StrataKV's keys."""
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        for host_key, key in zip(host_keys, keys, strict=True):
            if key in self._announced:
                continue
            content = self._contents.get(host_key[:HASH_END])
            host_hash = host_key[:HASH_END] if content is None else content.host_hash
            told = self._announced[key] = _Announced(host_hash, self._group_of(host_key))
            parent = None if content is None else content.parent
            extra_keys = None if content is None else content.extra_keys
            self._events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(host_hash)],
                    parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=[] if content is None else content.tokens,
                    block_size=0 if content is None else self._block_tokens,
                    lora_id=None if content is None else content.lora_id,
                    medium=MEDIUM_CPU,
                    lora_name=None if content is None else content.lora_name,
                    extra_keys=None if extra_keys is None else [extra_keys],
                    group_idx=told.group,
                )
            )

    def drain_events(self, slab_keys: Callable[[], Sequence[bytes]]) -> list[Any]:
        """Return the events since the last call. `slab_keys` returns the slab's keys."""
        now = time.monotonic()
        if now >= self._look_at and self._announced:
            self._look_at = now + LOOK_SECONDS
            self._find_lost(slab_keys)
        events, self._events = self._events, []
        return events

    def _group_of(self, host_key: bytes) -> int:
        return self._columns.all[int.from_bytes(host_key[HASH_END:], "big")].group

    def _find_lost(self, slab_keys: Callable[[], Sequence[bytes]]) -> None:
        lost = self._announced.keys() - set(slab_keys())
        if not lost:
            return
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        by_group: dict[int, list[Any]] = {}
        for key in lost:
            told = self._announced.pop(key)
            block_hash = maybe_convert_block_hash(told.host_hash)
            by_group.setdefault(told.group, []).append(block_hash)
        for group, hashes in by_group.items():
            self._events.append(
                BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=group)
            )
