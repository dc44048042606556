# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager: blocks for requests, or a "no" that has changed nothing.

The tokens of one request, as `allocate_slots` sees them:

    | computed | newly computed | external | new  |
    |  held    |  hits, to be   | to be allocated |
    |          |  attached      |                 |

`computed` is `request.num_computed_tokens`; `external` tokens will come from a tier. Full blocks
are named; tokens beyond `request.num_tokens` get a place but no name.

Requests that were forked share all blocks, the last one too, which need not be full
(`shared_tails.py`).

Where layers carry states, a hit ends at a checkpoint of these (`state_checkpoints.py`).

The cache groups of a model are treated as one. Groups that share blocks
(`group_spec.pages_per_block`) have one group manager, and count as one but for the ids of their
pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice

from ..models.layer_attention import LayerAttention, full
from ..request.request import Request
from .block_pool import BlockPool
from .group_manager import FullAttentionManager, GroupManager, LocalAttentionManager, num_free
from .group_spec import pages_per_block
from .kv_block import BlockIds, GroupBlocks, KVCacheBlock, page_tables
from .named_blocks import NamedBlocks
from .prefix_finder import HybridPrefixFinder, UnitaryPrefixFinder
from .shared_tails import SharedTails
from .state_checkpoints import StateCheckpoints


class KVCacheManager:
    """Called by the engine's step thread only. Block counts are per pool, token counts per request.

    `watermark` is the fraction of all blocks that admission leaves free (`watermark_blocks`), so
    that running requests can grow for some steps before anyone is preempted.

    The order of the group managers is that of all `GroupBlocks`. Tables of one request are equally
    long, and as many of their first blocks have had names.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        enable_caching: bool = True,
        watermark: float = 0.01,
        num_groups: int = 1,
        attention: Sequence[LayerAttention] = (),
        most_step_tokens: int | None = None,
        hash_block_size: int | None = None,
        num_state_pages: int = 0,
        state_interval: int = 0,
    ) -> None:
        """`attention`: how the layers of each cache group attend; without it there are `num_groups`
        that attend to everything. `most_step_tokens`: the most that a step computes of a request,
        which bounds what groups with windows hold. `hash_block_size`: the tokens of a digest of
        `Request.block_hashes`, if not those of a block. No option sets it yet: row A7 of
        docs/rows.md asks for it, for hybrid models. `num_state_pages`: those of a checkpoint of
        states, which is made every `state_interval` tokens too; 0: no layer carries a state.

        Raises ValueError for digests of which no whole number make a block.
        """
        each, rest = divmod(block_size, hash_block_size or block_size)
        if rest or not each:
            raise ValueError(
                f"blocks of {block_size} tokens cannot be named by digests of {hash_block_size} "
                f"tokens; take a divisor of {block_size}"
            )
        attention = tuple(attention) or (full(),) * num_groups
        self.block_size = block_size
        self._last_offset = block_size - 1
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * num_blocks)
        # A piece of a checkpoint is a page by itself.
        width = 1 if num_state_pages else pages_per_block(attention)
        self.pool = BlockPool(num_blocks, enable_caching, width)
        self.num_groups = len(attention)  # as many pages has a block in all groups
        self.forgets = not all(kind.is_full for kind in attention)
        self._width = width
        sizes = (block_size, min(most_step_tokens or max_model_len, max_model_len))
        self._groups: tuple[GroupManager, ...] = tuple(
            FullAttentionManager(group_id, kind, *sizes)
            if kind.is_full
            else LocalAttentionManager(group_id, kind, *sizes, null=self.pool.null_block)
            for group_id, kind in list(enumerate(attention))[::width]
        )
        self._forgetful = tuple(
            (i, g) for i, g in enumerate(self._groups) if not g.attention.is_full
        )
        finder = UnitaryPrefixFinder if len(self._groups) == 1 else HybridPrefixFinder
        self._finder = finder(self.pool, self._groups, block_size)
        self.no_blocks: GroupBlocks = tuple([] for _ in self._groups)
        self._tables: dict[str, GroupBlocks] = {}
        self.names = NamedBlocks(self.pool, self._groups, block_size, each)
        self.shared_tails = SharedTails(self.pool, self._groups)
        self.states: StateCheckpoints | None = None
        if num_state_pages:
            self.states = StateCheckpoints(
                self.pool,
                num_state_pages,
                len(attention),
                block_size,
                interval=state_interval,
                hashes_per_block=each,
            )

    def tables(self, request_id: str) -> GroupBlocks:
        """The blocks of a request, which the caller must not change; empty tables without any."""
        return self._tables.get(request_id, self.no_blocks)

    def num_slots(self, request_id: str) -> int:
        """Tokens that the blocks of a request have room for, from its first token on."""
        return len(self.tables(request_id)[0]) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at once, at most, when nothing is shared and
        a load brings its states."""
        num_blocks = self._width * sum(group.most_blocks(num_tokens) for group in self._groups)
        return num_blocks if self.states is None else num_blocks + self.states.num_pages

    def num_missing_blocks(self, request: Request, hits: GroupBlocks | None = None) -> int:
        """Free blocks that a request takes, at most, until all tokens that it has now have been
        computed. The hits are not its own yet."""
        given = self.no_blocks if hits is None else hits
        tables = self.tables(request.request_id)
        return self._width * sum(
            group.num_missing(table, request.num_tokens, blocks)
            for group, table, blocks in zip(self._groups, tables, given, strict=True)
        )

    def num_reserved(self, wanted: Mapping[str, int]) -> int:
        """Free blocks that requests by these ids take, at most, until each has had so many tokens
        computed; also where they share blocks, and one of them gives its own back."""
        num_blocks = sum(
            [
                group.num_reserved(table, num_tokens)
                for request_id, num_tokens in wanted.items()
                for group, table in zip(self._groups, self.tables(request_id), strict=True)
            ]
        )
        if self.shared_tails.families:
            num_blocks += self.shared_tails.num_to_copy(wanted)
        return self._width * num_blocks

    def num_to_reserve(self, num_tokens: int, hits: GroupBlocks | None = None) -> int:
        """Pages by which held and reserved ones become more together when a request begins with
        these hits that will have `num_tokens` computed."""
        given = self.no_blocks if hits is None else hits
        both = zip(self._groups, given, strict=True)
        blocks = sum([group.num_to_reserve(num_tokens, found) for group, found in both])
        return self._width * blocks

    def get_computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """The longest known prefix of a request that holds no blocks, and its tokens.

        At most `num_tokens - 1` tokens, because the last one must be computed to get its logits.
        Changes nothing in the pool; the hits are the request's own once `allocate_slots` was given
        them.
        """
        if not self.pool.enable_caching or request.skip_reading_prefix_cache:
            return self.no_blocks, 0
        most = request.most_cached_tokens // self.block_size
        digests = self.names.of_blocks(request.block_hashes)[:most]
        blocks, num_tokens = self._finder.find(digests)
        if self.states is None:
            return blocks, num_tokens
        found, num_blocks = num_tokens, num_tokens // self.block_size
        while num_blocks and (length := self.states.longest_hit(digests, num_blocks)) < num_blocks:
            # Windows need other blocks for a shorter hit, and may have none of the same length.
            blocks, num_tokens = self._finder.find(digests[:length])
            num_blocks = num_tokens // self.block_size
        request.progress.junction = found if found > num_tokens else 0
        return blocks, num_tokens

    def stateless_blocks(self, request: Request, num_tokens: int) -> GroupBlocks:
        """The blocks that the pool has of the first `num_tokens` of a request, where the states
        behind them are to be loaded. Changes nothing."""
        digests = self.names.of_blocks(request.block_hashes)[: num_tokens // self.block_size]
        return self._finder.find(digests)[0]

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: GroupBlocks | None = None,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        keep_free_blocks: int = 0,
    ) -> GroupBlocks | None:
        """Blocks for the next tokens of a request: those added (hits not among them), or None.

        None means fewer than `keep_free_blocks` would be left, and nothing has changed. Hits that
        no request holds are in the free queue and count as taken; blocks that no later token reads
        are given back first, and count as free. Names are given at once, unless
        `delay_cache_blocks`: then `cache_blocks` gives them when the load has ended."""
        computed = request.num_computed_tokens
        forked = self.shared_tails.families
        if forked and not self._own_tail(request, num_new_tokens, keep_free_blocks):
            return None
        more = new_computed_blocks or num_external_computed_tokens
        if num_new_tokens == 1 and not more and (offset := computed % self.block_size):
            # A decode in a block that the request has.
            if offset == self._last_offset and not delay_cache_blocks:
                self._name_full(request, min(computed + 1, request.num_tokens))
            return self.no_blocks
        computed += num_new_computed_tokens + num_external_computed_tokens
        num_tokens = computed + num_new_tokens
        num_slots = min(num_tokens, self.max_model_len)
        if self.states is None:
            num_spare = self.pool.free_queue.num_free * self._width - keep_free_blocks
            added = self._add_blocks(
                request.request_id, num_slots, computed, new_computed_blocks, num_spare
            )
        else:
            added = self._add_with_states(
                self.states, request, num_slots, computed, new_computed_blocks, keep_free_blocks,
                is_load=num_external_computed_tokens > 0,
            )  # fmt: skip
        if added is None:
            return None
        if not delay_cache_blocks:
            self._name_full(request, min(num_tokens, request.num_tokens))
        return added

    def fork(self, parent_id: str, child: Request, num_tokens: int) -> None:
        """`child`, which holds no blocks, holds those of the first `num_tokens` of another one,
        which it has too."""
        num_full, rest = divmod(num_tokens, self.block_size)
        num_blocks = num_full + (rest > 0)
        tables = tuple([table[:num_blocks] for table in self._tables[parent_id]])
        for table in tables:
            self.pool.touch([block for block in table if not block.is_null])
        self._tables[child.request_id] = tables
        num_named = self.names.counts.get(parent_id, 0)
        self.names.counts[child.request_id] = min(num_named, num_full)
        if rest:
            self.shared_tails.add_fork(parent_id, child.request_id)

    def can_go_on(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request holds all that is read behind its first `num_computed_tokens`."""
        tables = self.tables(request.request_id)
        return all(group.can_go_on(tables[i], num_computed_tokens) for i, group in self._forgetful)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> bool:
        """Name the full blocks among the first `num_computed_tokens`, which a load brought. False,
        and nothing has changed, unless the request holds all that is read behind them."""
        if not self.can_go_on(request, num_computed_tokens):
            return False
        self._name_full(request, num_computed_tokens, computed=True)
        if self.states is not None:
            self.states.name_loaded(request, num_computed_tokens)
        return True

    def name_blocks(self, request: Request, num_tokens: int) -> None:
        """Name the full blocks among the first `num_tokens`, which the last step made computes."""
        self._name_full(request, num_tokens)
        if self.states is not None:
            self.states.name_known(request)

    def name_accepted(self, request: Request) -> None:
        """Name the full blocks of tokens that were drafts when a step computed them, which has come
        back."""
        tables = self.tables(request.request_id)
        first = self.names.counts.get(request.request_id, 0)
        num_tokens = min(request.num_tokens, request.num_computed_tokens)
        self.names.name_full(request, tables, num_tokens, computed=True)
        end = self.names.counts.get(request.request_id, 0)
        self.pool.note_computed([block for table in tables for block in table[first:end]])

    def trim(self, request: Request) -> None:
        """Blocks behind the tokens of a request, which drafts were given, are free."""
        num_blocks = -(-request.num_tokens // self.block_size)
        for table in self.tables(request.request_id):
            if len(table) > num_blocks:
                self.pool.free_blocks(table[: num_blocks - 1 : -1])
                del table[num_blocks:]

    def name_tail(self, request: Request) -> None:
        """Name the block that the prompt's end lies in, if it is not a full one. The prompt has
        been computed, and nothing more will be written for the request."""
        self.names.name_tail(request, self._tables[request.request_id])

    def prompt_keys(self, request: Request, *, with_tail: bool) -> list[bytes]:
        """The names of the blocks of a prompt, as the pool keeps them, that an engine reads which
        goes on behind it."""
        digests = self.names.of_prompt(request, with_tail=with_tail)
        keys = self.names.page_keys(digests, request.num_prompt_tokens)
        if self.states is not None and digests:
            # Without its states the other engine computes what is behind an earlier checkpoint.
            keys += [key for key in self.states.keys(digests[-1]) if self.pool.has(key)]
        return keys

    def revoke(
        self, request: Request, num_computed_tokens: int, block_ids: BlockIds | None
    ) -> None:
        """The step being scheduled will not compute the request after all: what the step named
        beyond its first `num_computed_tokens` loses its name, and the blocks that the step added,
        `block_ids` for each group, are given back. Raises RuntimeError where another request of the
        step has found one of them, and nothing changes."""
        request_id = request.request_id
        tables = self.tables(request_id)
        self.names.revoke_names(request_id, tables, num_computed_tokens // self.block_size)
        if block_ids is None:
            return
        for group, table in zip(self._groups, tables, strict=True):
            if count := len(block_ids[group.group_id]):
                self.pool.free_blocks(table[: -count - 1 : -1])
                del table[-count:]

    def free(self, request: Request) -> None:
        """Give the blocks of a request back, tail first; they keep names and bytes until reused."""
        self._free(request.request_id)

    def pin(self, request: Request, holder: str) -> None:
        """The blocks of a request that has ended are `holder`'s until `unpin`, who runs no more."""
        request_id = request.request_id
        self.shared_tails.remove_request(request_id)
        if self.states is not None:
            self.states.pin(request_id, holder)
        if request_id in self._tables:
            self._tables[holder] = self._tables.pop(request_id)
        if request_id in self.names.counts:
            self.names.counts[holder] = self.names.counts.pop(request_id)
        for table in self.tables(holder):
            self.pool.pin(table)

    def unpin(self, holder: str) -> None:
        """Give blocks back that were pinned, tail first."""
        for table in self.tables(holder):
            self.pool.unpin(table)
        if self.states is not None:
            self.states.unpin(holder)
        self._free(holder)

    def offer(self, request: Request) -> None:
        """Offer the blocks of a request to the tiers ahead of their eviction, its head first."""
        for table in self.tables(request.request_id):
            self.pool.offer(table)

    def drop_names(self, request: Request) -> list[bytes]:
        """Take their names from the blocks of a request, which keeps them, and from other blocks of
        the same names: no look-up finds them. Returns the names, head first, which tiers may have
        too."""
        digests = self.names.of_blocks(request.block_hashes)
        for group, table in zip(self._groups, self.tables(request.request_id), strict=True):
            self.pool.drop_names(table)
            self.pool.drop_keys(digests, group.group_id)
        keys = self.names.page_keys(digests)
        if self.states is None:
            return keys
        tail = request.prompt_tail_hash() if request.hands_over else b""
        ends = [*digests, tail] if tail else digests
        self.states.drop_names(ends)
        # All pieces, wherever they are: old ones beside those of a later checkpoint are wrong.
        return keys + [key for digest in ends for key in self.states.keys(digest)]

    def get_block_ids(self, request_id: str) -> BlockIds:
        return self.page_ids(self.tables(request_id))

    def load_page_ids(self, request_id: str, num_tokens: int) -> BlockIds:
        """The pages that a load is for which brings states and begins behind `num_tokens`: of each
        cache group those of all blocks from there on, some of which the pool may have, and behind
        these the pages of a checkpoint."""
        assert self.states is not None
        first = num_tokens // self.block_size
        pages = self.page_ids(tuple([table[first:] for table in self.tables(request_id)]))
        return (*pages, self.states.load_page_ids(request_id))

    def page_ids(self, blocks: GroupBlocks) -> BlockIds:
        """The ids of such blocks, of their page in each cache group."""
        return page_tables(blocks, self._width)

    def _add_blocks(
        self,
        request_id: str,
        num_slots: int,
        num_computed: int,
        hits: GroupBlocks | None,
        num_spare: int,
    ) -> GroupBlocks | None:
        """Blocks until `num_slots` tokens have a place, behind `num_computed`, of which `hits` hold
        the first. Those added, or None where the free ones would become fewer by more than
        `num_spare`, and nothing has changed."""
        tables = self._tables.get(request_id) or tuple([[] for _ in self._groups])
        num_hits = 0 if hits is None else len(hits[0])
        held, num_blocks = len(tables[0]) + num_hits, -(-num_slots // self.block_size)
        more = num_blocks - held if num_blocks > held else 0
        if (more + num_hits) * self.num_groups > num_spare:
            # Only if it could matter is it counted what hits take, and what is given back.
            taken = self._num_taken(tables, num_blocks, num_computed, hits)
            if taken > 0 and taken > num_spare:
                return None
        if hits is not None and num_hits:
            self._add_computed_blocks(request_id, tables, num_computed, hits)
        has_gaps = False
        for index, group in self._forgetful:
            if first := group.first_needed(num_computed):
                if gone := group.prune(tables[index], first):
                    self.pool.free_blocks(gone)
                has_gaps = has_gaps or first > held
        self._tables[request_id] = tables
        if has_gaps:
            return self._extend_behind_gaps(tables, num_blocks, num_computed)
        if not more:
            return self.no_blocks
        # One take for all of them, and each gets its part.
        new = self.pool.get_new_blocks(more * len(tables))
        added: list[list[KVCacheBlock]] = []
        for table in tables:
            part = new[len(added) * more : (len(added) + 1) * more]
            table += part
            added.append(part)
        return tuple(added)

    def _add_with_states(
        self,
        states: StateCheckpoints,
        request: Request,
        num_slots: int,
        computed: int,
        hits: GroupBlocks | None,
        keep_free_blocks: int,
        *,
        is_load: bool,
    ) -> GroupBlocks | None:
        """Add blocks as `_add_blocks` does, and pages for the states that a load brings; hits have
        a checkpoint behind them. Checkpoints without a name are given up where room is lacking."""
        request_id = request.request_id
        is_hit = hits is not None and bool(hits[0]) and not is_load
        if is_load:
            keep_free_blocks += states.num_pages
        elif is_hit:
            # Now, since the blocks added may be taken from its pages.
            digests = self.names.of_blocks(request.block_hashes)
            states.note_hit(request_id, digests[computed // self.block_size - 1])
        while True:
            num_spare = self.pool.free_queue.num_free - keep_free_blocks
            added = None
            if num_spare >= 0 or not is_load:
                added = self._add_blocks(request_id, num_slots, computed, hits, num_spare)
            if added is not None:
                if is_load:
                    states.hold_for_load(request_id)
                return added
            if not states.drop_unnamed():
                if is_hit:
                    states.drop_hit(request_id)
                return None

    def _own_tail(self, request: Request, num_new_tokens: int, keep_free_blocks: int) -> bool:
        """A forked request is about to write, and gets a copy of its last block where others hold
        that. False where there is no room for a copy, and nothing has changed."""
        request_id, computed = request.request_id, request.num_computed_tokens
        if request_id not in self.shared_tails.families:
            return True
        tables = self._tables[request_id]
        num_slots = min(computed + num_new_tokens, self.max_model_len)
        more = max(0, -(-num_slots // self.block_size) - len(tables[0])) * len(tables)
        num_spare = self.pool.free_queue.num_free - -(-keep_free_blocks // self._width)
        return self.shared_tails.own_block(
            request_id, tables, computed // self.block_size, more, num_spare
        )

    def _num_taken(
        self, tables: GroupBlocks, num_blocks: int, num_computed: int, hits: GroupBlocks | None
    ) -> int:
        """Free pages that are taken, net, where tables begin with hits, or are pruned, and then get
        `num_blocks`."""
        taken = 0
        for group, table, found in zip(self._groups, tables, hits or self.no_blocks, strict=True):
            first = group.first_needed(num_computed)
            taken += max(0, num_blocks - max(first, len(table) + len(found)))
            taken += num_free(found[first:]) - group.num_given_back(table, first)
        return taken * self._width

    def _add_computed_blocks(
        self, request_id: str, tables: GroupBlocks, num_computed: int, hits: GroupBlocks
    ) -> None:
        """Hold hits, but for what is not read of them. In all groups before any of them takes new
        blocks, which may be the hits of another."""
        if any(tables):
            raise RuntimeError(f"request {request_id} has blocks, so no hits can go before them")
        null = self.pool.null_block
        for group, table, found in zip(self._groups, tables, hits, strict=True):
            read = found[group.first_needed(num_computed) :]
            self.pool.touch(read)
            table += [null] * (len(found) - len(read)) + read
        self.names.counts[request_id] = len(hits[0])

    def _extend_behind_gaps(
        self, tables: GroupBlocks, num_blocks: int, num_computed: int
    ) -> GroupBlocks:
        """New blocks for all tables, and null blocks before the first that is read. All of those;
        a load brings what is read."""
        gaps = [
            max(0, group.first_needed(num_computed) - len(table))
            for group, table in zip(self._groups, tables, strict=True)
        ]
        counts = [
            max(0, num_blocks - len(table) - gap) for table, gap in zip(tables, gaps, strict=True)
        ]
        new = iter(self.pool.get_new_blocks(sum(counts)))
        null = self.pool.null_block
        both = zip(gaps, counts, strict=True)
        added = tuple([[null] * gap + list(islice(new, count)) for gap, count in both])
        for table, blocks in zip(tables, added, strict=True):
            table += blocks
        return added

    def _name_full(self, request: Request, num_tokens: int, *, computed: bool = False) -> None:
        tables = self.tables(request.request_id)
        self.names.name_full(request, tables, num_tokens, computed=computed)

    def _free(self, request_id: str) -> None:
        """Give all blocks of a request back: of all groups the last ones first, since a hit needs
        every group."""
        self.names.counts.pop(request_id, None)
        if self.states is not None:
            self.states.free(request_id)
        if self.shared_tails.families or self.shared_tails.sources:
            self.shared_tails.remove_request(request_id)
        tables = self._tables.pop(request_id, None)
        if tables is None:
            return
        tails_first = [table[::-1] for table in tables]
        if len(tails_first) == 1:
            self.pool.free_blocks(tails_first[0])
        else:
            self.pool.free_blocks(chain.from_iterable(zip(*tails_first, strict=True)))
