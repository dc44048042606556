# SPDX-License-Identifier: Apache-2.0
"""Hand-overs: blocks are written to a store, and leased there for other engines to load them.

    hand_over ──► moving ──(the shared store probably has the blocks)──► leasing ──► ended

This engine's record of the store's blocks may be out of date, so the lease decides: the store
answers which of the blocks it has, and evicts none of these blocks during the lease. A hand-over
that takes longer than MOST_SECONDS ends with its missing blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...tiers.base import Answer
from ..base import HandOver
from ..connector_context import ConnectorContext
from ..messages import HandedOver

# A lease lasts longer than a busy router and the decode engine need until the load.
LEASE_SECONDS = 30.0
# The longest hand-over: many times what a slow link needs for a prompt's blocks.
MOST_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class _HandOver:
    """The hand-over of one request's blocks."""

    request_id: str
    keys: list[bytes]
    give_up_at: float  # monotonic
    num_there: int = 0  # leading blocks that the store is known to have
    version: tuple[int, int] | None = None  # `shared_version` at the last check
    is_leasing: bool = False


class HandOvers(HandOver):
    """The hand-overs of one connector. An alarm wakes the engine at a hand-over's time limit. A
    hand-over begins after the connector has dropped the record of its ended request."""

    def __init__(self, context: ConnectorContext) -> None:
        self._hierarchy = context.hierarchy
        self._shards = context.parts.shards  # key suffixes of the ranks
        self._alarm = context.alarm
        self.moving: list[_HandOver] = []  # hand-overs not ended, including waits for a lease
        self.ended: list[HandedOver] = []  # for `take_handed_over`

    def hand_over(self, request_id: str, keys: Sequence[bytes]) -> None:
        give_up_at = time.monotonic() + MOST_SECONDS
        tier_keys = [key + shard for key in keys for shard in self._shards]
        hand_over = _HandOver(request_id, tier_keys, give_up_at)
        self.forget_hand_over(request_id)  # of an earlier request with this id
        self.moving.append(hand_over)
        self._hierarchy.shared(tier_keys, write=True)
        self._alarm.at(give_up_at)
        self._look_at(hand_over)

    def forget_hand_over(self, request_id: str) -> None:
        self.moving = [each for each in self.moving if each.request_id != request_id]
        # The hand-over may have ended already.
        self.ended = [ended for ended in self.ended if ended.request_id != request_id]

    def poll_hand_overs(self) -> None:
        """Check the progress of the hand-overs, and end those that exceed their time limit."""
        now = time.monotonic()
        for hand_over in list(self.moving):
            self._look_at(hand_over)
            if now >= hand_over.give_up_at and hand_over in self.moving:
                self._finish_hand_over(hand_over, hand_over.keys[hand_over.num_there :])

    def take_handed_over(self) -> list[HandedOver]:
        ended, self.ended = self.ended, []
        return ended

    def _look_at(self, hand_over: _HandOver) -> None:
        version = self._hierarchy.shared_version
        if hand_over.is_leasing or hand_over.version == version:
            return
        hand_over.version = version
        # A single block is checked first, because blocks written together arrive together.
        size = 1
        while hand_over.num_there < len(hand_over.keys):
            there = hand_over.num_there
            answers = self._hierarchy.shared(hand_over.keys[there : there + size])
            moved = next((i for i, a in enumerate(answers) if a is not Answer.HIT), None)
            hand_over.num_there = there + (len(answers) if moved is None else moved)
            if moved is not None and answers[moved] is Answer.PENDING:
                return
            if moved is not None:
                # The store will not get this block; later blocks may still be on their way.
                if Answer.PENDING in self._hierarchy.shared(hand_over.keys[there:]):
                    return
                break
            size = 4 * size
        hand_over.is_leasing = True

        def leased(kept: list[bool]) -> None:
            pairs = zip(hand_over.keys, kept, strict=True)
            self._finish_hand_over(hand_over, [key for key, is_kept in pairs if not is_kept])

        self._hierarchy.lease(hand_over.keys, LEASE_SECONDS, leased)

    def _finish_hand_over(self, hand_over: _HandOver, missing: list[bytes]) -> None:
        if hand_over not in self.moving:
            return  # the hand-over was given up, or forgotten
        self.moving.remove(hand_over)
        end = -len(self._shards[0])
        lost = dict.fromkeys(key[:end] for key in missing)  # lost with the part of any rank
        self.ended.append(HandedOver(hand_over.request_id, list(lost)))
