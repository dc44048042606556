# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager: allocates blocks to requests, or refuses and changes nothing.

The tokens of one request in a call of `allocate_slots`:

    | computed | newly computed | external | new  |
    |  held    |  hits, to be   | to be allocated |
    |          |  attached      |                 |

`computed` is `request.num_computed_tokens`; a tier will load the `external` tokens. Full blocks are
cached, for prefix lookups, except blocks with tokens beyond `request.num_tokens`.

Forked requests share all blocks, including a partly filled last block (`shared_tails.py`).

If layers carry states, a hit ends at a checkpoint of the states (`state_checkpoints.py`).

Every method handles all cache groups. Groups that share blocks (`group_spec.pages_per_block`) have
one group manager and count as one group, except for their page ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice

from ..models.layer_attention import LayerAttention, full
from ..request.request import Request
from .block_keys import BlockKeys
from .block_pool import BlockPool
from .group_manager import FullAttentionManager, GroupManager, LocalAttentionManager, num_free
from .group_spec import pages_per_block
from .kv_block import BlockIds, GroupBlocks, KVCacheBlock, page_tables
from .prefix_finder import HybridPrefixFinder, UnitaryPrefixFinder
from .shared_tails import SharedTails
from .state_checkpoints import StateCheckpoints


class KVCacheManager:
    """Allocates and caches the blocks of requests; called by the engine's step thread only.

    Admission leaves the fraction `watermark` of all blocks free (`watermark_blocks`), so that
    running requests can grow for some steps before a request is preempted.

    Every `GroupBlocks` has one list for each group manager, in the same order. The tables of one
    request have equal lengths and equal numbers of cached blocks."""

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
        """`attention` is the kind of attention of each cache group; without `attention` there are
        `num_groups` groups with full attention. `most_step_tokens`, the most tokens of a request in
        one step, limits the blocks of groups with windows. `hash_block_size` is the number of
        tokens per digest in `Request.block_hashes`, by default the block size; no option sets it
        yet (row A7 of docs/rows.md, for hybrid models). `num_state_pages` is the size of a state
        checkpoint in pages, 0 if no layer carries a state. `state_interval` is the number of tokens
        between checkpoints.

        Raises ValueError unless a block is a whole number of digests."""
        each, rest = divmod(block_size, hash_block_size or block_size)
        if rest or not each:
            raise ValueError(
                f"blocks of {block_size} tokens cannot have keys of digests of {hash_block_size} "
                f"tokens; take a divisor of {block_size}"
            )
        attention = tuple(attention) or (full(),) * num_groups
        self.block_size = block_size
        self._last_offset = block_size - 1
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * num_blocks)
        # With states, blocks have one page, because a piece of a checkpoint takes a single page.
        width = 1 if num_state_pages else pages_per_block(attention)
        self.pool = BlockPool(num_blocks, enable_caching, width)
        self.num_groups = len(attention)  # also the number of pages of a block of tokens
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
        self.keys = BlockKeys(self.pool, self._groups, block_size, each)
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
        """Return the blocks of a request, or empty tables if it has none. Read only."""
        return self._tables.get(request_id, self.no_blocks)

    def num_slots(self, request_id: str) -> int:
        """Return how many tokens, from the first token on, have slots in a request's blocks."""
        return len(self.tables(request_id)[0]) * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most pages that a request of `num_tokens` holds at once if it loads states."""
        num_blocks = self._width * sum(group.most_blocks(num_tokens) for group in self._groups)
        return num_blocks if self.states is None else num_blocks + self.states.num_pages

    def num_missing_blocks(self, request: Request, hits: GroupBlocks | None = None) -> int:
        """Return the most free pages that a request takes until all its present tokens are
        computed. Free hits count, because the request does not hold them yet."""
        given = self.no_blocks if hits is None else hits
        tables = self.tables(request.request_id)
        return self._width * sum(
            group.num_missing(table, request.num_tokens, blocks)
            for group, table, blocks in zip(self._groups, tables, given, strict=True)
        )

    def num_reserved(self, wanted: Mapping[str, int]) -> int:
        """Return the most free pages that requests take until each has computed its number of
        tokens in `wanted`, even if requests share blocks and a request ends."""
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
        """Return how many pages become held or reserved if a request starts with `hits` and will
        compute `num_tokens`."""
        given = self.no_blocks if hits is None else hits
        both = zip(self._groups, given, strict=True)
        blocks = sum([group.num_to_reserve(num_tokens, found) for group, found in both])
        return self._width * blocks

    def get_computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """Find the longest cached prefix of a request that holds no blocks. Return the prefix's
        blocks and number of tokens.

        The prefix has at most `num_tokens - 1` tokens, because the last token must be computed for
        its logits. The pool does not change; `allocate_slots` later adds the request as a
        holder."""
        if not self.pool.enable_caching or request.skip_reading_prefix_cache:
            return self.no_blocks, 0
        most = request.most_cached_tokens // self.block_size
        digests = self.keys.of_blocks(request.block_hashes)[:most]
        blocks, num_tokens = self._finder.find(digests)
        if self.states is None:
            return blocks, num_tokens
        found, num_blocks = num_tokens, num_tokens // self.block_size
        while num_blocks and (length := self.states.longest_hit(digests, num_blocks)) < num_blocks:
            # Within windows, a shorter hit needs other blocks, which may be missing.
            blocks, num_tokens = self._finder.find(digests[:length])
            num_blocks = num_tokens // self.block_size
        request.progress.junction = found if found > num_tokens else 0
        return blocks, num_tokens

    def stateless_blocks(self, request: Request, num_tokens: int) -> GroupBlocks:
        """Return the pool's blocks of the first `num_tokens` tokens of a request whose states will
        be loaded. Changes nothing."""
        digests = self.keys.of_blocks(request.block_hashes)[: num_tokens // self.block_size]
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
        """Allocate blocks for a request's next tokens. Return the added blocks, without hits, or
        None.

        The result None means that fewer than `keep_free_blocks` pages would stay free; then nothing
        has changed. Hits without a holder are in the free queue and count as taken. Blocks that no
        later token reads are released first and count as free. Full blocks are cached at once, or
        with `delay_cache_blocks` by `cache_blocks` after the load."""
        computed = request.num_computed_tokens
        forked = self.shared_tails.families
        if forked and not self._own_tail(request, num_new_tokens, keep_free_blocks):
            return None
        more = new_computed_blocks or num_external_computed_tokens
        if num_new_tokens == 1 and not more and (offset := computed % self.block_size):
            # The token is decoded into a block that the request has already.
            if offset == self._last_offset and not delay_cache_blocks:
                self._cache_full(request, min(computed + 1, request.num_tokens))
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
            self._cache_full(request, min(num_tokens, request.num_tokens))
        return added

    def fork(self, parent_id: str, child: Request, num_tokens: int) -> None:
        """Let `child`, which has no blocks, share the parent's blocks of the first `num_tokens`."""
        num_full, rest = divmod(num_tokens, self.block_size)
        num_blocks = num_full + (rest > 0)
        tables = tuple([table[:num_blocks] for table in self._tables[parent_id]])
        for table in tables:
            self.pool.touch([block for block in table if not block.is_null])
        self._tables[child.request_id] = tables
        num_cached = self.keys.counts.get(parent_id, 0)
        self.keys.counts[child.request_id] = min(num_cached, num_full)
        if rest:
            self.shared_tails.add_fork(parent_id, child.request_id)

    def can_go_on(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request holds all blocks that the token at `num_computed_tokens` reads."""
        tables = self.tables(request.request_id)
        return all(group.can_go_on(tables[i], num_computed_tokens) for i, group in self._forgetful)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> bool:
        """Cache the full blocks of the first `num_computed_tokens`, which a load brought. If the
        request lacks a block that the next token reads, return False and change nothing."""
        if not self.can_go_on(request, num_computed_tokens):
            return False
        self._cache_full(request, num_computed_tokens, computed=True)
        if self.states is not None:
            self.states.cache_loaded(request, num_computed_tokens)
        return True

    def cache_scheduled(self, request: Request, num_tokens: int) -> None:
        """Cache the full blocks of the first `num_tokens`, computed by the last scheduled step."""
        self._cache_full(request, num_tokens)
        if self.states is not None:
            self.states.cache_known(request)

    def cache_accepted(self, request: Request) -> None:
        """Cache the full blocks of accepted drafts, whose step has run."""
        tables = self.tables(request.request_id)
        first = self.keys.counts.get(request.request_id, 0)
        num_tokens = min(request.num_tokens, request.num_computed_tokens)
        self.keys.cache_full_blocks(request, tables, num_tokens, computed=True)
        end = self.keys.counts.get(request.request_id, 0)
        self.pool.note_computed([block for table in tables for block in table[first:end]])

    def trim(self, request: Request) -> None:
        """Release the blocks after the request's tokens, which only drafts used."""
        num_blocks = -(-request.num_tokens // self.block_size)
        for table in self.tables(request.request_id):
            if len(table) > num_blocks:
                self.pool.free_blocks(table[: num_blocks - 1 : -1])
                del table[num_blocks:]

    def cache_tail(self, request: Request) -> None:
        """Cache the block at the prompt's end if it is partly filled. The caller makes sure that
        the prompt is computed and that the request writes no more tokens."""
        self.keys.cache_tail(request, self._tables[request.request_id])

    def prompt_keys(self, request: Request, *, with_tail: bool) -> list[bytes]:
        """Return the page keys of the blocks that another engine needs to continue the prompt."""
        digests = self.keys.of_prompt(request, with_tail=with_tail)
        keys = self.keys.page_keys(digests, request.num_prompt_tokens)
        if self.states is not None and digests:
            # Without these states the other engine would compute from an earlier checkpoint on.
            keys += [key for key in self.states.keys(digests[-1]) if self.pool.has(key)]
        return keys

    def revoke(
        self, request: Request, num_computed_tokens: int, block_ids: BlockIds | None
    ) -> None:
        """Undo the scheduling of a request in the present step. The request's blocks after the
        first `num_computed_tokens` tokens are uncached if the step has cached them. The step's new
        blocks (`block_ids` for each group) are released. If another request of the step has found
        one of these blocks, raise RuntimeError and change nothing."""
        request_id = request.request_id
        tables = self.tables(request_id)
        self.keys.revoke_caching(request_id, tables, num_computed_tokens // self.block_size)
        if block_ids is None:
            return
        for group, table in zip(self._groups, tables, strict=True):
            if count := len(block_ids[group.group_id]):
                self.pool.free_blocks(table[: -count - 1 : -1])
                del table[-count:]

    def free(self, request: Request) -> None:
        """Release a request's blocks, last block first; until reused, they keep keys and bytes."""
        self._free(request.request_id)

    def pin(self, request: Request, holder: str) -> None:
        """Move an ended request's blocks to the id `holder`, which never runs, until `unpin`."""
        request_id = request.request_id
        self.shared_tails.remove_request(request_id)
        if self.states is not None:
            self.states.pin(request_id, holder)
        if request_id in self._tables:
            self._tables[holder] = self._tables.pop(request_id)
        if request_id in self.keys.counts:
            self.keys.counts[holder] = self.keys.counts.pop(request_id)
        for table in self.tables(holder):
            self.pool.pin(table)

    def unpin(self, holder: str) -> None:
        """Release the blocks of a pin, last block first."""
        for table in self.tables(holder):
            self.pool.unpin(table)
        if self.states is not None:
            self.states.unpin(holder)
        self._free(holder)

    def offer(self, request: Request) -> None:
        """Offer the blocks of a request to the tiers before they are evicted, first block first."""
        for table in self.tables(request.request_id):
            self.pool.offer(table)

    def uncache_request(self, request: Request) -> list[bytes]:
        """Remove the request's blocks, and all other blocks with the same keys, from the prefix
        cache. The request keeps its blocks. Return the keys, first block first."""
        digests = self.keys.of_blocks(request.block_hashes)
        for group, table in zip(self._groups, self.tables(request.request_id), strict=True):
            self.pool.uncache_blocks(table)
            self.pool.uncache_digests(digests, group.group_id)
        keys = self.keys.page_keys(digests)
        if self.states is None:
            return keys
        tail = request.prompt_tail_hash() if request.hands_over else b""
        ends = [*digests, tail] if tail else digests
        self.states.uncache_digests(ends)
        # All pieces of a checkpoint are removed, as a tier must not mix pieces of two checkpoints.
        return keys + [key for digest in ends for key in self.states.keys(digest)]

    def get_block_ids(self, request_id: str) -> BlockIds:
        return self.page_ids(self.tables(request_id))

    def load_page_ids(self, request_id: str, num_tokens: int) -> BlockIds:
        """Return the target pages of a load that brings states and begins after `num_tokens`: for
        each cache group, all blocks after `num_tokens`, even those that the pool has cached, then
        the pages of a state checkpoint."""
        assert self.states is not None
        first = num_tokens // self.block_size
        pages = self.page_ids(tuple([table[first:] for table in self.tables(request_id)]))
        return (*pages, self.states.load_page_ids(request_id))

    def page_ids(self, blocks: GroupBlocks) -> BlockIds:
        return page_tables(blocks, self._width)

    def _add_blocks(
        self,
        request_id: str,
        num_slots: int,
        num_computed: int,
        hits: GroupBlocks | None,
        num_spare: int,
    ) -> GroupBlocks | None:
        """Add blocks until `num_slots` tokens have slots, and return the added blocks. The first
        `num_computed` tokens are already computed, or in `hits`, or come with a load. If more than
        `num_spare` free pages would be taken, return None and change nothing."""
        tables = self._tables.get(request_id) or tuple([[] for _ in self._groups])
        num_hits = 0 if hits is None else len(hits[0])
        held, num_blocks = len(tables[0]) + num_hits, -(-num_slots // self.block_size)
        more = num_blocks - held if num_blocks > held else 0
        if (more + num_hits) * self.num_groups > num_spare:
            # Only a nearly full pool needs the slow count of hits and released blocks.
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
        # One call allocates the blocks of all tables.
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
        """Add blocks like `_add_blocks`, and pages for the states that a load brings. Hits must end
        at a checkpoint. If room is short, uncached checkpoints are given up."""
        request_id = request.request_id
        is_hit = hits is not None and bool(hits[0]) and not is_load
        if is_load:
            keep_free_blocks += states.num_pages
        elif is_hit:
            # Noted before blocks are added, because a block may take the checkpoint's pages.
            digests = self.keys.of_blocks(request.block_hashes)
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
            if not states.drop_uncached():
                if is_hit:
                    states.drop_hit(request_id)
                return None

    def _own_tail(self, request: Request, num_new_tokens: int, keep_free_blocks: int) -> bool:
        """Replace the last block of a forked request by a copy before the request writes to it, if
        other requests hold it. If the copy has no room, return False and change nothing."""
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
        """Return the net number of free pages taken if tables get the hits, are pruned, and then
        grow to `num_blocks` blocks."""
        taken = 0
        for group, table, found in zip(self._groups, tables, hits or self.no_blocks, strict=True):
            first = group.first_needed(num_computed)
            taken += max(0, num_blocks - max(first, len(table) + len(found)))
            taken += num_free(found[first:]) - group.num_given_back(table, first)
        return taken * self._width

    def _add_computed_blocks(
        self, request_id: str, tables: GroupBlocks, num_computed: int, hits: GroupBlocks
    ) -> None:
        """Make the request a holder of the hits that later tokens read. Hits of all groups are held
        before new blocks are allocated, because a new block could be a hit of another group."""
        if any(tables):
            raise RuntimeError(f"request {request_id} has blocks, so no hits can go before them")
        null = self.pool.null_block
        for group, table, found in zip(self._groups, tables, hits, strict=True):
            read = found[group.first_needed(num_computed) :]
            self.pool.touch(read)
            table += [null] * (len(found) - len(read)) + read
        self.keys.counts[request_id] = len(hits[0])

    def _extend_behind_gaps(
        self, tables: GroupBlocks, num_blocks: int, num_computed: int
    ) -> GroupBlocks:
        """Extend all tables to `num_blocks` blocks: null blocks before the first block that a later
        token reads, then new blocks, which a load will fill. Return all added blocks."""
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

    def _cache_full(self, request: Request, num_tokens: int, *, computed: bool = False) -> None:
        tables = self.tables(request.request_id)
        self.keys.cache_full_blocks(request, tables, num_tokens, computed=computed)

    def _free(self, request_id: str) -> None:
        """Release all blocks of a request. The last blocks of all groups are released first,
        because a hit needs a block in every group."""
        self.keys.counts.pop(request_id, None)
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
