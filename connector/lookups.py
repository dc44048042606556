# SPDX-License-Identifier: Apache-2.0
"""Looks up requests' prompts in the tiers, and decides whether to load the blocks found.

    queued         looks up stores, and begins to read blocks that only a store has into the slab
    match_prefix   returns the match: none, load, overlap or retry
    begin_load     begins the load that the match offered

The result of a look-up is kept until the tiers change, because the scheduler looks up waiting
requests in every step, and one look-up walks over thousands of keys."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial

from ..tiers.block import DIGEST_BYTES
from .base import RequestView
from .connector_context import ConnectorContext
from .costs.economics import NONE_READ, Plan
from .loads import Loads
from .messages import NO_MATCH, Elsewhere, GroupBlockIds, Match, MatchKind
from .prefill_decode.prefill_waits import PrefillWaits
from .request_offload import Lookup, RequestOffload

# The most look-ups whose results are kept, since each may hold thousands of keys. A step looks up
# only the first waiting request, and requests that got RETRY.
REMEMBERED_LOOKUPS = 256
# The largest share of the slab that blocks read ahead may pin, so that loads and stores find slots.
AHEAD_SHARE = 0.25
_RETRY = Match(0, MatchKind.RETRY)


class Lookups:
    """The look-ups of one connector, and the blocks read ahead for its requests."""

    def __init__(self, context: ConnectorContext, loads: Loads, waits: PrefillWaits) -> None:
        self._hierarchy = context.hierarchy
        self._parts = parts = context.parts
        self._block_size = parts.block_size
        self._width = parts.width
        self._counters = context.counters
        self._economics = context.economics
        self._read_times = context.read_times
        self._loads = loads
        self._waits = waits
        # The requests whose last look-up is kept, the newest look-up last.
        self._latest: OrderedDict[RequestOffload, None] = OrderedDict()
        # Requests that wait for answers of stores, in order; read only.
        self.unanswered: dict[RequestOffload, None] = {}  # as a set
        self.retry_version: int | None = None  # `_version` at the last RETRY
        self._blocks_ahead = 0

    def __len__(self) -> int:
        return len(self._latest)

    def queued(self, offload: RequestOffload, request: RequestView) -> None:
        """Report the prompt of a new request to the tiers, and look up its blocks in remote stores.
        If loading saves time, read blocks that only a store has while the request waits."""
        if self._hierarchy.learns and not offload.is_observed:
            offload.is_observed = True
            self._hierarchy.announce_prompt(self._parts.keys_of(request.block_hashes))
        if not self._hierarchy.has_stores or offload.read_ahead is not None:
            return
        lookup = self._look_up_range(offload, request, 0, self._end_of(request))
        if lookup is None:
            return
        # With windows, the look-up may have skipped blocks before the hit's end in remote stores.
        prefix = lookup.prefix
        num_found = max(len(prefix.tiers), prefix.num_found)
        known = 0 if self._parts.has_windows else num_found * self._width
        unknown = lookup.keys[known:]
        if self._parts.num_state_keys:
            unknown = [*unknown, *self._parts.first_state_keys(lookup.keys)]
        is_asked = bool(unknown) and self._hierarchy.prefetch_lookup(unknown, offload.context)
        if is_asked or lookup.prefix.asked:
            if offload.unanswered is None:
                self.unanswered[offload] = None
            offload.unanswered = request
            self._forget_answer(offload)  # the kept result is older than the stores' answers
            return
        self._begin_ahead(offload, lookup)

    def match_prefix(
        self,
        offload: RequestOffload,
        request: RequestView,
        num_computed_tokens: int,
        num_queued_tokens: int,
        num_pool_tokens: int | None = None,
    ) -> Match:
        """Return the match of a request; see `KVConnectorScheduler.get_matched_tokens`."""
        match = self._match_tiers(
            offload, request, num_computed_tokens, num_queued_tokens, num_pool_tokens
        )
        lookup = offload.lookup
        if lookup is None or not self._parts.num_state_keys:
            return match
        return match._replace(junction=self._junction(lookup))

    def _junction(self, lookup: Lookup) -> int:
        """Return the number of leading tokens whose blocks were found, but not the layer states
        after these tokens; 0 if there are no such tokens."""
        prefix = lookup.prefix
        if prefix.num_found <= len(prefix.tiers) or prefix.num_found <= lookup.num_kept:
            return 0
        num_positions = min(prefix.num_found, len(lookup.keys) // self._width)
        return (lookup.first + num_positions) * self._block_size

    def _match_tiers(
        self,
        offload: RequestOffload,
        request: RequestView,
        num_computed_tokens: int,
        num_queued_tokens: int,
        num_pool_tokens: int | None,
    ) -> Match:
        first = num_computed_tokens // self._block_size
        num_kept = 0 if num_pool_tokens is None else num_pool_tokens // self._block_size - first
        end = self._end_of(request)
        most = end if offload.most_blocks is None else offload.most_blocks
        lookup = self._look_up_range(offload, request, first, min(end, most), num_kept)
        if lookup is None:
            return NO_MATCH
        if most < end:  # the longer hit was counted and planned already
            lookup.is_counted = lookup.is_decided = True
        if lookup.prefix.asked:  # a remote store will answer soon
            return self._retry_later()
        is_elsewhere = offload.elsewhere is not Elsewhere.NO
        if is_elsewhere and self._waits.begin_wait(offload, request, lookup):
            return _RETRY
        tiers = lookup.prefix.tiers
        if not tiers:
            # Blocks that another request is loading will be in the pool for this request too.
            if lookup.prefix.pending:
                return self._retry_later()
            self._record_lookup(lookup)
            return NO_MATCH
        plan = self._plan_of(offload, lookup, num_queued_tokens)
        if not plan.num_blocks:
            self._record_lookup(lookup)
            self._clear_lookup(offload)
            return NO_MATCH
        if self._needed_keys(lookup, len(tiers))[0] in self._loads.coming:
            return self._retry_later()
        self._record_lookup(lookup)
        num_tokens = plan.num_blocks * self._block_size
        # The last token is always computed, even if its block is loaded.
        num_wanted = request.num_tokens - 1 - num_computed_tokens
        if not plan.compute_blocks or self._parts.is_windowed:
            return Match(min(num_tokens, num_wanted), MatchKind.LOAD)
        if num_tokens > num_wanted:  # computed and loaded blocks meet at the start of a block
            num_tokens -= self._block_size
        return Match(num_tokens, MatchKind.OVERLAP) if num_tokens else NO_MATCH

    def begin_load(
        self,
        offload: RequestOffload,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        """Load the blocks of a request's last look-up. Raises KeyError if there is no look-up."""
        lookup = offload.lookup
        if lookup is None:
            raise KeyError(offload.request_id)
        num_blocks = -(-num_tokens // self._block_size)
        first_token = lookup.first * self._block_size
        keys = self._needed_keys(lookup, num_blocks, first_token + num_tokens)
        if overlapped:
            compute_blocks = lookup.plan.compute_blocks if lookup.plan else 0
            self._loads.begin_overlapped(offload, first_token, keys, block_ids, compute_blocks)
        else:
            self._loads.begin_blocking(
                offload,
                first_token,
                keys,
                block_ids,
                lookup.num_queued_tokens,
                num_blocks * self._block_size - num_tokens,
                lookup.num_kept,
            )
        self.drop_lookup(offload)

    def poll_answers(self) -> bool:
        """Process answers of stores. Return whether to look up requests that got RETRY again."""
        for offload in list(self.unanswered):
            request = offload.unanswered
            assert request is not None
            lookup = self._look_up_range(offload, request, 0, self._end_of(request))
            if lookup is None or not lookup.prefix.asked:
                self._mark_answered(offload)
                if lookup is not None:
                    self._begin_ahead(offload, lookup)
        if self.retry_version is None or self.retry_version == self._version:
            return False
        self.retry_version = None
        return True

    def drop_lookup(self, offload: RequestOffload) -> None:
        """Drop the look-up and the blocks read ahead of a request that loads or has ended."""
        self._forget_answer(offload)
        self._mark_answered(offload)
        self._clear_lookup(offload)

    @property
    def _version(self) -> int:
        """Return a number that changes whenever the result of a look-up may change."""
        return self._hierarchy.version + self._loads.num_ended

    def _retry_later(self) -> Match:
        self.retry_version = self._version
        return _RETRY

    def _begin_ahead(self, offload: RequestOffload, lookup: Lookup) -> None:
        room = int(AHEAD_SHARE * self._hierarchy.num_slots) - self._blocks_ahead
        if room <= 0:
            return
        tiers = lookup.prefix.tiers
        if not self._parts.whole_only:
            tiers = tiers[: room // self._width]
        elif self._parts.num_needed(len(tiers)) > room:
            return
        if not tiers:
            return
        plan = self._make_plan(offload, 0, tiers)
        if plan.compute_blocks:
            return  # an overlapped load would read the blocks from the back
        tiers = tiers[: self._longest(lookup, plan.num_blocks)]
        if tiers.count(self._hierarchy.tiers[0]) == len(tiers):
            return  # the slab has all blocks worth loading
        self._record_lookup(lookup)
        keys = self._needed_keys(lookup, len(tiers))
        offload.read_ahead = self._read_times.begin_load(keys, offload.context)
        self._blocks_ahead += len(offload.read_ahead.keys)

    def _clear_lookup(self, offload: RequestOffload) -> None:
        """Release blocks that were read ahead for the request."""
        ticket, offload.read_ahead = offload.read_ahead, None
        if ticket is not None:
            self._blocks_ahead -= len(ticket.keys)
            self._read_times.let_go(ticket)

    def _mark_answered(self, offload: RequestOffload) -> None:
        if offload.unanswered is not None:
            offload.unanswered = None
            del self.unanswered[offload]

    def _keep(self, offload: RequestOffload, lookup: Lookup) -> None:
        """Keep a look-up as the newest. Drop the oldest look-up beyond REMEMBERED_LOOKUPS."""
        offload.lookup = lookup
        self._latest[offload] = None
        self._latest.move_to_end(offload)
        if len(self._latest) > REMEMBERED_LOOKUPS:
            oldest, _ = self._latest.popitem(last=False)
            oldest.lookup = None

    def _forget_answer(self, offload: RequestOffload) -> None:
        if offload.lookup is not None:
            offload.lookup = None
            del self._latest[offload]

    def _end_of(self, request: RequestView) -> int:
        """Return the number of leading blocks that may be loaded. The last token is always
        computed, to get logits. If another engine computed the prompt and the digest of the last
        token's block is known, this block counts too. With layer states this block counts only if
        the request has an output token, as the states after the prompt include its last token."""
        num_tokens = request.num_tokens - 1
        end = num_tokens // self._block_size
        if request.tail_hash is not None and num_tokens % self._block_size:
            has_states = self._parts.num_state_keys > 0
            end += not has_states or num_tokens >= request.num_prompt_tokens
        return min(end, len(self._digests_of(request)))

    def _digests_of(self, request: RequestView) -> Sequence[bytes]:
        """Return the digests of the request's blocks. A `tail_hash` replaces the digests from the
        last token's block on; at most one token follows the tokens that the `tail_hash` covers."""
        tail = request.tail_hash
        if not tail:
            return request.block_hashes
        return [*request.block_hashes[: (request.num_tokens - 1) // self._block_size], tail]

    def _look_up_range(
        self,
        offload: RequestOffload,
        request: RequestView,
        first: int,
        end: int,
        num_kept: int = 0,
    ) -> Lookup | None:
        """Return the result of `Parts.find_longest_hit` for blocks `first` to `end` of the request,
        which is kept until the tiers change. None if `end <= first`."""
        if end <= first:
            return None
        version = self._hierarchy.version
        digests = self._digests_of(request)
        known, num_kept = offload.lookup, min(num_kept, end - first)
        most_tokens = request.num_tokens - 1 if self._parts.is_windowed else None
        # The last digest identifies all blocks, even if another request has the same id.
        if (
            known is None
            or (known.first, known.most_tokens, known.num_kept) != (first, most_tokens, num_kept)
            or known.keys[-1] != digests[end - 1] + self._parts.suffixes[-1]
        ):
            keys = self._parts.keys_of(digests[first:end])
        elif known.version == version:
            return known
        else:
            keys = known.keys
        prefix = self._parts.find_longest_hit(
            self._hierarchy,
            first,
            keys,
            most_tokens,
            num_kept,
            partial(self._ask_for_states, offload),
        )
        # Blocks read ahead were counted as looked up when their reads began.
        is_counted = offload.read_ahead is not None or (
            known is not None and known.keys is keys and known.is_counted
        )
        lookup = Lookup(
            first, keys, prefix, version, is_counted, most_tokens=most_tokens, num_kept=num_kept
        )
        lookup.is_decided = known is not None and known.keys is keys and known.is_decided
        self._keep(offload, lookup)
        return lookup

    def _ask_for_states(self, offload: RequestOffload, keys: Sequence[bytes]) -> bool:
        """Look up states in remote stores, once per position. Return whether a store will
        answer."""
        digest = keys[0][:DIGEST_BYTES]
        if digest in offload.asked_states:
            return False
        offload.asked_states.add(digest)
        return self._hierarchy.prefetch_lookup(keys, offload.context)

    def _plan_of(self, offload: RequestOffload, lookup: Lookup, num_queued_tokens: int) -> Plan:
        """Return the plan for the hit of a look-up, which is made at the first call."""
        if lookup.plan is None:
            plan = self._make_plan(
                offload,
                lookup.first,
                lookup.prefix.tiers,
                num_queued_tokens,
                decides=not lookup.is_decided,  # a request counts once
            )
            lookup.plan = plan._replace(num_blocks=self._longest(lookup, plan.num_blocks))
            lookup.num_queued_tokens = num_queued_tokens
            lookup.is_decided = True
        return lookup.plan

    def _make_plan(
        self,
        offload: RequestOffload,
        first: int,
        tiers: Sequence[str],
        num_queued_tokens: int = 0,
        *,
        decides: bool = False,
    ) -> Plan:
        return self._economics.plan_loads(
            first * self._block_size,
            tiers,
            num_sharing=self._loads.num_sharing(offload),
            num_queued_tokens=num_queued_tokens,
            num_read_ahead=_num_read_ahead(offload),
            decides=decides,
        )

    def _record_lookup(self, lookup: Lookup) -> None:
        """Count a look-up whose result the request uses, once for each prompt."""
        if not lookup.is_counted:
            lookup.is_counted = True
            found = lookup.prefix.tiers
            num_blocks = len(lookup.keys) // self._width
            self._counters.count_lookup(self._hierarchy.tiers, found, num_blocks)

    def _needed_keys(
        self, lookup: Lookup, num_positions: int, most_tokens: int | None = None
    ) -> list[bytes]:
        """Return the keys of the blocks that a hit of `num_positions` needs, in the order of the
        sequence. `most_tokens` replaces `lookup.most_tokens`."""
        if not self._parts.is_windowed:
            return lookup.keys[: num_positions * self._width]
        if most_tokens is None:
            most_tokens = lookup.most_tokens
        needed = self._parts.needed(lookup.first, num_positions, most_tokens, lookup.num_kept)
        keys = [lookup.keys[i] for i in needed]
        if num_positions and self._parts.num_state_keys:
            last = lookup.keys[num_positions * self._width - 1]
            keys += self._parts.state_keys(last[:DIGEST_BYTES])
        return keys

    def _longest(self, lookup: Lookup, num_positions: int) -> int:
        """Return the length of the longest hit among the first `num_positions` positions found."""
        if num_positions == len(lookup.prefix.tiers) or not self._parts.is_windowed:
            return num_positions
        return self._parts.longest(
            self._hierarchy,
            lookup.first,
            lookup.keys,
            num_positions,
            lookup.most_tokens,
            lookup.num_kept,
        )


def _num_read_ahead(offload: RequestOffload) -> Mapping[str, int]:
    """Return the number of blocks that are still being read ahead for the request, by tier."""
    ticket = offload.read_ahead
    if ticket is None:
        return NONE_READ
    slots_of = zip(ticket.slots, ticket.tiers, strict=True)
    return Counter([tier for slot, tier in slots_of if slot is None])
