# SPDX-License-Identifier: Apache-2.0
"""What the tiers hold of a request's prompt, remembered until something in the tiers changes.

The scheduler asks for waiting requests again in every step, and an answer walks over thousands of
keys. Also reads ahead: what only a store has is brought to the slab while its request waits for its
turn.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from .base import RequestView
from .connector_context import ConnectorContext
from .costs.economics import NONE_READ, Plan
from .loads import Loads
from .request_offload import Lookup, RequestOffload

# One look-up of a long context holds the keys of thousands of blocks, and a step asks for few
# requests again: the first that waits, and those that were told to.
REMEMBERED_LOOKUPS = 256
# Reading ahead pins at most this share of the slab, so that loads and stores find slots.
AHEAD_SHARE = 0.25


class Lookups:
    """The look-ups of one connector, and what is read ahead for its requests."""

    def __init__(self, connector: ConnectorContext, loads: Loads) -> None:
        self._hierarchy = connector.hierarchy
        self._parts = parts = connector.parts
        self._block_size = parts.block_size
        self._width = parts.width
        self._counters = connector.counters
        self._economics = connector.economics
        self._read_times = connector.read_times
        self._loads = loads
        # Those that have a look-up, the newest last. A long one is of many megabytes.
        self._latest: OrderedDict[RequestOffload, None] = OrderedDict()
        self._unanswered: list[RequestOffload] = []
        self._blocks_ahead = 0

    def __len__(self) -> int:
        return len(self._latest)

    @property
    def num_asked(self) -> int:
        """Requests that wait for what stores were asked."""
        return len(self._unanswered)

    def queued(self, offload: RequestOffload, request: RequestView) -> None:
        """A request has come: the tiers learn of its prompt, stores that are far away are asked
        about it, and what only a store has of it is read while the request waits, if it is worth
        loading."""
        if self._hierarchy.learns and not offload.is_observed:
            offload.is_observed = True
            self._hierarchy.announce_prompt(self._parts.keys_of(request.block_hashes))
        if not self._hierarchy.has_stores or offload.read_ahead is not None:
            return
        lookup = self.look_up_range(offload, request, 0, self.end_of(request))
        if lookup is None:
            return
        # In front of where the hit ends, blocks of windows may be unknown too.
        known = 0 if self._parts.is_windowed else len(lookup.prefix.tiers) * self._width
        unknown = lookup.keys[known:]
        is_asked = bool(unknown) and self._hierarchy.prefetch_lookup(unknown, offload.context)
        if is_asked or lookup.prefix.asked:
            if offload.unanswered is None:
                self._unanswered.append(offload)
            offload.unanswered = request
            self._drop_read_ahead(offload)  # it was found before any store was asked
            return
        self._begin_ahead(offload, lookup)

    def answered(self) -> None:
        """Something in the tiers changed: what was waited for may be known by now."""
        for offload in list(self._unanswered):
            request = offload.unanswered
            assert request is not None
            lookup = self.look_up_range(offload, request, 0, self.end_of(request))
            if lookup is None or not lookup.prefix.asked:
                self._mark_answered(offload)
                if lookup is not None:
                    self._begin_ahead(offload, lookup)

    def _begin_ahead(self, offload: RequestOffload, lookup: Lookup) -> None:
        room = int(AHEAD_SHARE * self._hierarchy.num_slots) - self._blocks_ahead
        if room <= 0:
            return
        tiers = lookup.prefix.tiers
        if not self._parts.whole_only:
            tiers = tiers[: room // self._width]
        if not tiers or self._parts.num_needed(len(tiers)) > room:
            return
        plan = self._economics.plan_loads(0, tiers, num_sharing=self._loads.num_sharing(offload))
        if plan.compute_blocks:
            return  # it will be read from the back
        tiers = tiers[: self._longest(lookup, plan.num_blocks)]
        if tiers.count(self._hierarchy.tiers[0]) == len(tiers):
            return  # all of it is in the slab, or not worth loading
        self.record_lookup(lookup)
        keys = self.needed_keys(lookup, len(tiers))
        ticket = self._hierarchy.begin_load(keys, offload.context)
        self._read_times.track_load(ticket)
        offload.read_ahead = ticket
        self._blocks_ahead += len(ticket.keys)

    def drop_lookup(self, offload: RequestOffload) -> None:
        """The request loads by itself now, or is gone: what was read ahead is let go."""
        self._drop_read_ahead(offload)
        self._mark_answered(offload)
        self.let_go(offload)

    def let_go(self, offload: RequestOffload) -> None:
        """Release blocks that were read ahead for the request."""
        ticket, offload.read_ahead = offload.read_ahead, None
        if ticket is not None:
            self._blocks_ahead -= len(ticket.keys)
            self._read_times.let_go(ticket)

    def _mark_answered(self, offload: RequestOffload) -> None:
        if offload.unanswered is not None:
            offload.unanswered = None
            self._unanswered.remove(offload)

    def _keep(self, offload: RequestOffload, lookup: Lookup) -> None:
        """Remember a look-up as the newest."""
        offload.lookup = lookup
        self._latest[offload] = None
        self._latest.move_to_end(offload)
        if len(self._latest) > REMEMBERED_LOOKUPS:
            oldest, _ = self._latest.popitem(last=False)
            oldest.lookup = None

    def _drop_read_ahead(self, offload: RequestOffload) -> None:
        if offload.lookup is not None:
            offload.lookup = None
            del self._latest[offload]

    def end_of(self, request: RequestView) -> int:
        """How many leading blocks may be loaded: one token is always left to compute, so that
        there are logits to sample from. Behind another engine's prefill the block that this token
        lies in is among them, where more of it is known."""
        num_tokens = request.num_tokens - 1
        end = num_tokens // self._block_size
        if request.tail_hash is not None and num_tokens % self._block_size:
            end += 1
        return min(end, len(self._digests_of(request)))

    def _digests_of(self, request: RequestView) -> Sequence[bytes]:
        """With the tail, behind which stands one token at most, in place of what goes on there."""
        tail = request.tail_hash
        if not tail:
            return request.block_hashes
        return [*request.block_hashes[: (request.num_tokens - 1) // self._block_size], tail]

    def look_up_range(
        self, offload: RequestOffload, request: RequestView, first: int, end: int
    ) -> Lookup | None:
        """`Parts.find_longest_hit` for these blocks of the request, or what it said if nothing
        changed since; None where there are none."""
        if end <= first:
            return None
        version = self._hierarchy.version
        digests = self._digests_of(request)
        known = offload.lookup
        most_tokens = request.num_tokens - 1 if self._parts.is_windowed else None
        # The last digest stands for the whole chain, also where an id is used again.
        if (
            known is None
            or (known.first, known.most_tokens) != (first, most_tokens)
            or known.keys[-1] != digests[end - 1] + self._parts.suffixes[-1]
        ):
            keys = self._parts.keys_of(digests[first:end])
        elif known.version == version:
            return known
        else:
            keys = known.keys
        prefix = self._parts.find_longest_hit(self._hierarchy, first, keys, most_tokens)
        # Blocks read ahead were counted when and where they were found.
        is_counted = offload.read_ahead is not None or (
            known is not None and known.keys is keys and known.is_counted
        )
        lookup = Lookup(first, keys, prefix, version, is_counted, most_tokens=most_tokens)
        lookup.is_decided = known is not None and known.keys is keys and known.is_decided
        self._keep(offload, lookup)
        return lookup

    def plan_of(self, offload: RequestOffload, lookup: Lookup, num_queued_tokens: int) -> Plan:
        """The plan for what a look-up found; the same until something changes."""
        if lookup.plan is None:
            economics = self._economics
            # Decided anew, it is still one request.
            make = economics.plan_loads if lookup.is_decided else economics.decide
            plan = make(
                lookup.first * self._block_size,
                lookup.prefix.tiers,
                num_sharing=self._loads.num_sharing(offload),
                num_queued_tokens=num_queued_tokens,
                num_read_ahead=_num_read_ahead(offload),
            )
            lookup.plan = plan._replace(num_blocks=self._longest(lookup, plan.num_blocks))
            lookup.num_queued_tokens = num_queued_tokens
            lookup.is_decided = True
        return lookup.plan

    def record_lookup(self, lookup: Lookup) -> None:
        """The request goes by this answer; it is counted once for each prompt."""
        if not lookup.is_counted:
            lookup.is_counted = True
            found = lookup.prefix.tiers
            num_blocks = len(lookup.keys) // self._width
            self._counters.count_lookup(self._hierarchy.tiers, found, num_blocks)

    def needed_keys(
        self, lookup: Lookup, num_positions: int, most_tokens: int | None = None
    ) -> list[bytes]:
        """The keys of the blocks that a hit of so many positions needs, head first; `most_tokens`
        where it is not that of the look-up."""
        if not self._parts.is_windowed:
            return lookup.keys[: num_positions * self._width]
        if most_tokens is None:
            most_tokens = lookup.most_tokens
        needed = self._parts.needed(lookup.first, num_positions, most_tokens)
        return [lookup.keys[i] for i in needed]

    def _longest(self, lookup: Lookup, num_positions: int) -> int:
        """The longest hit of at most so many of the positions that were found."""
        if num_positions == len(lookup.prefix.tiers):
            return num_positions
        return self._parts.longest(
            self._hierarchy, lookup.first, lookup.keys, num_positions, lookup.most_tokens
        )

    def taken(self, offload: RequestOffload) -> Lookup:
        """The last look-up of a request that is about to load what it found. KeyError if it was
        not told to."""
        lookup = offload.lookup
        if lookup is None:
            raise KeyError(offload.request_id)
        self._drop_read_ahead(offload)
        return lookup


def _num_read_ahead(offload: RequestOffload) -> Mapping[str, int]:
    """Blocks of the request that are on their way, by tier."""
    ticket = offload.read_ahead
    if ticket is None:
        return NONE_READ
    slots_of = zip(ticket.slots, ticket.tiers, strict=True)
    return Counter([tier for slot, tier in slots_of if slot is None])
