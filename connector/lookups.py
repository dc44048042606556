# SPDX-License-Identifier: Apache-2.0
"""What the tiers hold of a request's prompt, remembered until something in the tiers changes.

The scheduler asks for waiting requests again in every step, and an answer walks over thousands of
keys. Also reads ahead: what only a store has is brought to the slab while its request waits for its
turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..tiers.base import NO_CONTEXT, RequestContext
from ..tiers.hierarchy.hierarchy import Hierarchy
from ..tiers.hierarchy.look_up import Prefix
from ..tiers.hierarchy.promotions import LoadTicket
from .base import RequestView
from .costs.economics import NONE_READ, Economics, Plan
from .costs.rates import ReadTimes
from .counters import OffloadCounters
from .parts import Parts
from .remembered import REMEMBERED_REQUESTS, Remembered

# One look-up of a long context holds the keys of thousands of blocks, and a step asks for few
# requests again: the first that waits, and those that were told to.
REMEMBERED_LOOKUPS = 256
# Reading ahead pins at most this share of the slab, so that loads and stores find slots.
AHEAD_SHARE = 0.25


@dataclass(slots=True)
class Lookup:
    """The answer of `Parts.find_longest_hit` for the positions `first` to `end` of a request, the
    keys of whose parts lie side by side in `keys`; `prefix.tiers` has an entry for each position
    of the hit."""

    first: int
    keys: list[bytes]
    prefix: Prefix
    version: int
    is_counted: bool
    plan: Plan | None = None  # what is done about it
    is_decided: bool = False  # such a plan was made before, perhaps on an older answer
    num_queued_tokens: int = 0  # to be computed before this request, when the plan was made
    most_tokens: int | None = None  # after which the next token is computed; see `Parts.needed`


class Lookups:
    """The look-ups of one hierarchy, for requests whose positions have these parts."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        parts: Parts,
        counters: OffloadCounters,
        economics: Economics,
        read_times: ReadTimes,
        num_sharing: Callable[[str], int],
    ) -> None:
        """`num_sharing`: see `Economics.plan_loads`, of a request that would load."""
        self._num_sharing = num_sharing
        self._hierarchy = hierarchy
        self._block_size = parts.block_size
        self._parts = parts
        self._width = parts.width
        self._counters = counters
        self._economics = economics
        self._read_times = read_times
        self._lookups: Remembered[Lookup] = Remembered(REMEMBERED_LOOKUPS)
        self._observed: Remembered[None] = Remembered(REMEMBERED_REQUESTS)
        self._asked: dict[str, RequestView] = {}  # requests of whose blocks stores were asked
        self._contexts: dict[str, RequestContext] = {}  # of requests that have one
        self._read_ahead: dict[str, LoadTicket] = {}
        self._blocks_ahead = 0

    def __len__(self) -> int:
        return len(self._lookups)

    @property
    def num_asked(self) -> int:
        """Requests that wait for what stores were asked."""
        return len(self._asked)

    def queued(self, request: RequestView, context: RequestContext = NO_CONTEXT) -> None:
        """A request has come: the tiers learn of its prompt, stores that are far away are asked
        about it, and what only a store has of it is read while the request waits, if it is worth
        loading."""
        request_id = request.request_id
        if context is not NO_CONTEXT:
            self._contexts[request_id] = context
        if self._hierarchy.learns and request_id not in self._observed:
            self._observed.put(request_id, None)
            self._hierarchy.announce_prompt(self.keys_of(request.block_hashes))
        if not self._hierarchy.has_stores or request_id in self._read_ahead:
            return
        lookup = self.look_up_range(request, 0, self.end_of(request))
        if lookup is None:
            return
        # In front of where the hit ends, blocks of windows may be unknown too.
        known = 0 if self._parts.is_windowed else len(lookup.prefix.tiers) * self._width
        unknown = lookup.keys[known:]
        is_asked = bool(unknown) and self._hierarchy.prefetch_lookup(unknown, context)
        if is_asked or lookup.prefix.asked:
            self._asked[request_id] = request
            self._lookups.pop(request_id, None)  # it was found before anybody was asked
            return
        self._begin_ahead(request_id, lookup)

    def answered(self) -> None:
        """Something in the tiers changed: what was waited for may be known by now."""
        for request_id, request in list(self._asked.items()):
            lookup = self.look_up_range(request, 0, self.end_of(request))
            if lookup is None or not lookup.prefix.asked:
                del self._asked[request_id]
                if lookup is not None:
                    self._begin_ahead(request_id, lookup)

    def _begin_ahead(self, request_id: str, lookup: Lookup) -> None:
        room = int(AHEAD_SHARE * self._hierarchy.num_slots) - self._blocks_ahead
        if room <= 0:
            return
        tiers = lookup.prefix.tiers
        if not self._parts.whole_only:
            tiers = tiers[: room // self._width]
        if not tiers or self._parts.num_needed(len(tiers)) > room:
            return
        plan = self._economics.plan_loads(0, tiers, num_sharing=self._num_sharing(request_id))
        if plan.compute_blocks:
            return  # it will be read from the back
        tiers = tiers[: self._longest(lookup, plan.num_blocks)]
        if tiers.count(self._hierarchy.tiers[0]) == len(tiers):
            return  # all of it is in the slab, or not worth loading
        self.record_lookup(lookup)
        keys = self.needed_keys(lookup, len(tiers))
        ticket = self._hierarchy.begin_load(keys, self.context_of(request_id))
        self._read_times.track_load(ticket)
        self._read_ahead[request_id] = ticket
        self._blocks_ahead += len(ticket.keys)

    def drop_lookup(self, request_id: str) -> None:
        """The request loads by itself now: what was read ahead is let go."""
        self._lookups.pop(request_id, None)
        self._asked.pop(request_id, None)
        self.let_go(request_id)

    def remove_request(self, request_id: str) -> None:
        """The request is gone."""
        self._contexts.pop(request_id, None)
        self.drop_lookup(request_id)

    def context_of(self, request_id: str) -> RequestContext:
        """What came with the request."""
        return self._contexts.get(request_id, NO_CONTEXT)

    def let_go(self, request_id: str) -> None:
        """Release blocks that were read ahead for the request."""
        ticket = self._read_ahead.pop(request_id, None)
        if ticket is not None:
            self._blocks_ahead -= len(ticket.keys)
            self._read_times.let_go(ticket)

    def clear(self) -> None:
        """Forget every answer, and let go of what was read ahead."""
        self._lookups.clear()
        self._asked.clear()
        for request_id in list(self._read_ahead):
            self.drop_lookup(request_id)

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

    def look_up_range(self, request: RequestView, first: int, end: int) -> Lookup | None:
        """`Parts.find_longest_hit` for these blocks of the request, or what it said if nothing
        changed since; None where there are none."""
        if end <= first:
            return None
        version = self._hierarchy.version
        digests = self._digests_of(request)
        known = self._lookups.get(request.request_id)
        most_tokens = request.num_tokens - 1 if self._parts.is_windowed else None
        # The last digest stands for the whole chain, also where an id is used again.
        if (
            known is None
            or (known.first, known.most_tokens) != (first, most_tokens)
            or known.keys[-1] != digests[end - 1] + self._parts.suffixes[-1]
        ):
            keys = self.keys_of(digests[first:end])
        elif known.version == version:
            return known
        else:
            keys = known.keys
        prefix = self._parts.find_longest_hit(self._hierarchy, first, keys, most_tokens)
        # Blocks read ahead were counted when and where they were found.
        is_counted = request.request_id in self._read_ahead or (
            known is not None and known.keys is keys and known.is_counted
        )
        lookup = Lookup(first, keys, prefix, version, is_counted, most_tokens=most_tokens)
        lookup.is_decided = known is not None and known.keys is keys and known.is_decided
        self._lookups.put(request.request_id, lookup)
        return lookup

    def plan_of(self, request_id: str, lookup: Lookup, num_queued_tokens: int) -> Plan:
        """The plan for what a look-up found; the same until something changes."""
        if lookup.plan is None:
            economics = self._economics
            # Decided anew, it is still one request.
            make = economics.plan_loads if lookup.is_decided else economics.decide
            plan = make(
                lookup.first * self._block_size,
                lookup.prefix.tiers,
                num_sharing=self._num_sharing(request_id),
                num_queued_tokens=num_queued_tokens,
                num_read_ahead=self._num_read_ahead(request_id),
            )
            lookup.plan = plan._replace(num_blocks=self._longest(lookup, plan.num_blocks))
            lookup.num_queued_tokens = num_queued_tokens
            lookup.is_decided = True
        return lookup.plan

    def _num_read_ahead(self, request_id: str) -> Mapping[str, int]:
        """Blocks of the request that are on their way, by tier."""
        ticket = self._read_ahead.get(request_id)
        if ticket is None:
            return NONE_READ
        slots_of = zip(ticket.slots, ticket.tiers, strict=True)
        return Counter([tier for slot, tier in slots_of if slot is None])

    def record_lookup(self, lookup: Lookup) -> None:
        """The request goes by this answer; it is counted once for each prompt."""
        if not lookup.is_counted:
            lookup.is_counted = True
            found = lookup.prefix.tiers
            num_blocks = len(lookup.keys) // self._width
            self._counters.count_lookup(self._hierarchy.tiers, found, num_blocks)

    def keys_of(self, digests: Sequence[bytes]) -> list[bytes]:
        """The keys of all blocks at these positions."""
        return self._parts.keys_of(digests)

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

    def origins(self, request_id: str) -> dict[bytes, str]:
        """The tier that each block read ahead for this request came from."""
        ticket = self._read_ahead.get(request_id)
        return {} if ticket is None else dict(zip(ticket.keys, ticket.tiers, strict=True))

    def taken(self, request_id: str) -> Lookup:
        """The last look-up of a request that is about to load what it found. KeyError if it was
        not told to."""
        return self._lookups.pop(request_id)
