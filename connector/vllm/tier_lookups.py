# SPDX-License-Identifier: Apache-2.0
"""Looks up prompts in the tiers. vLLM looks up a waiting request chunk by chunk, in each step.

The look-up of the first chunk looks up all later chunks of the prompt too. The answers are kept
until the tiers change or a load fails. The answer is also MISS for
- chunks that are quicker to compute than to load,
- chunks whose load has just failed, so that no request waits for them again,
- chunks for which a request has waited too long: otherwise a server with damaged answers would be
  read without end,
- chunks for which vLLM's region has no room, because it has chunks for other waiting requests:
  otherwise chunks in the region would evict each other before they are loaded."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...tiers.hierarchy.hierarchy import Hierarchy
from ..chunks.failed import FailedChunks
from ..costs.economics import Economics
from . import versions
from .identity import GROUP_BYTES, ChunkKeys

# The longest total wait of a request for answers of remote stores.
MOST_RETRY_SECONDS = 5.0
# The most loads of the same chunk for the same request.
MAX_LOADS = 2
# The share of vLLM's region for chunks whose requests still wait.
REGION_SHARE = 0.75


class Found(Enum):
    """The result of a look-up of one chunk."""

    HIT = "hit"
    MISS = "miss"
    RETRY = "retry"  # a store has yet to answer


@dataclass(slots=True, eq=False)
class Asked:
    """The look-ups and decisions for one request. vLLM stores this object with the request."""

    version: tuple[int, int] | None = None  # versions of the tiers and of FailedChunks
    answers: dict[bytes, Found] = field(default_factory=dict)  # by vLLM's keys
    keys: dict[bytes, bytes] = field(default_factory=dict)  # vLLM's → ours
    accepted: set[bytes] = field(default_factory=set)  # StrataKV's keys to load
    declined: set[bytes] = field(default_factory=set)  # StrataKV's keys to compute
    loads: dict[bytes, int] = field(default_factory=dict)  # key → number of loads begun
    is_announced: bool = False
    retry_until: float | None = None  # monotonic; None before the first wait


class TierLookups:
    """Looks up chunks in `hierarchy`. Callers hold the lock of the hierarchy (`ChunkMover.lock`).
    `region_chunks` is the number of chunks that fit into vLLM's region."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        keys: ChunkKeys,
        economics: Economics,
        failed: FailedChunks,
        *,
        chunk_tokens: int,
        region_chunks: int,
    ) -> None:
        self._hierarchy = hierarchy
        self._keys = keys
        self._economics = economics
        self._chunk_tokens = chunk_tokens
        self._room = max(1, int(region_chunks * REGION_SHARE))  # chunks still to be accepted
        self._waiting: dict[str, Asked] = {}
        self._failed = failed

    def find_chunk(self, host_key: bytes, context: Any) -> Found:
        """Return the answer for the chunk with vLLM's key `host_key`."""
        asked = self._asked(context)
        # The version of failures counts too, because a load that fails changes no tier.
        version = self._hierarchy.version, self._failed.version
        if asked.version != version:
            asked.version = version
            asked.answers.clear()
        found = asked.answers.get(host_key)
        if found is None:
            self._lookup_chunks(asked, host_key, context)
            found = asked.answers[host_key]
        if found is Found.HIT and not self._accept(asked, host_key, context):
            return Found.MISS
        if found is Found.RETRY and not _may_wait(asked):
            return Found.MISS
        return found

    def key_of(self, host_key: bytes, context: Any) -> bytes:
        return self._key(self._asked(context), host_key)

    def loading(self, keys: Sequence[bytes], context: Any) -> None:
        """Count a load of these chunks (StrataKV's keys) for the request."""
        asked = self._asked(context)
        for key in keys:
            asked.loads[key] = asked.loads.get(key, 0) + 1

    def clear_failures(self, keys: Sequence[bytes]) -> None:
        """Forget failed loads of these chunks, because vLLM has computed them again."""
        self._failed.discard_stored(keys)

    def let_go(self, request_ids: Collection[str]) -> None:
        """Release the room in vLLM's region of requests that run now or have ended."""
        for request_id in request_ids:
            asked = self._waiting.pop(request_id, None)
            if asked is not None:
                self._room += len(asked.accepted)
                asked.accepted.clear()

    def _asked(self, context: Any) -> Asked:
        asked: Asked | None = context.get_state(Asked)
        if asked is None:
            asked = Asked()
            context.set_state(asked)
        return asked

    def _key(self, asked: Asked, host_key: bytes) -> bytes:
        key = asked.keys.get(host_key)
        if key is None:
            key = asked.keys[host_key] = self._keys.derive_chunk_key(host_key)
        return key

    def _lookup_chunks(self, asked: Asked, host_key: bytes, context: Any) -> None:
        """Look up the chunk and all later chunks of the prompt, and keep the answers."""
        positions = versions.key_positions(context)
        run = [host_key]
        if host_key in positions and not asked.answers:
            group, first = host_key[-GROUP_BYTES:], positions[host_key]
            behind = [k for k, end in positions.items() if end > first and k.endswith(group)]
            run += sorted(behind, key=positions.__getitem__)
        keys = [self._key(asked, each) for each in run]
        if not asked.is_announced:
            asked.is_announced = True
            self._hierarchy.prefetch_lookup(keys)
            if self._hierarchy.learns:
                self._hierarchy.announce_prompt(keys)
        prefix = self._hierarchy.find_prefix(keys)
        tiers = prefix.tiers
        leading = enumerate(keys[: len(tiers)])
        usable = next((i for i, key in leading if self._is_bad(asked, key)), len(tiers))
        answers = asked.answers
        if usable:
            first_token = max(0, positions.get(host_key, 0) - self._chunk_tokens)
            wanted = self._wanted(asked, keys, first_token, tiers[:usable])
            answers.update(dict.fromkeys(run[:wanted], Found.HIT))
            answers.update(dict.fromkeys(run[wanted : usable + 1], Found.MISS))
        else:
            answers[host_key] = Found.MISS
        if usable == len(tiers) < len(run) and (prefix.pending or prefix.asked):
            answers.update(dict.fromkeys(run[usable:], Found.RETRY))

    def _wanted(
        self, asked: Asked, keys: Sequence[bytes], first_token: int, tiers: Sequence[str]
    ) -> int:
        """Return how many leading chunks to load from `tiers`. An earlier decision stays valid."""
        if keys[0] in asked.declined:
            return 0
        decided = next((i for i in range(len(tiers)) if keys[i] not in asked.accepted), len(tiers))
        if decided:
            return decided
        wanted = self._economics.plan_loads(first_token, tiers, decides=True).num_blocks
        asked.declined.update(keys[wanted : len(tiers)])
        return wanted

    def _is_bad(self, asked: Asked, key: bytes) -> bool:
        return asked.loads.get(key, 0) >= MAX_LOADS or key in self._failed

    def _accept(self, asked: Asked, host_key: bytes, context: Any) -> bool:
        """Reserve room in vLLM's region for a chunk; return False if there is no room."""
        key = self._key(asked, host_key)
        if key in asked.accepted:
            return True
        if self._room <= 0:
            return False
        self._room -= 1
        asked.accepted.add(key)
        self._waiting[context.req_id] = asked
        return True


def _may_wait(asked: Asked) -> bool:
    """Whether the request may still wait. The time limit counts from the first call."""
    now = time.monotonic()
    if asked.retry_until is None:
        asked.retry_until = now + MOST_RETRY_SECONDS
    return now < asked.retry_until
