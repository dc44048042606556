# SPDX-License-Identifier: Apache-2.0
"""The KV cache manager: blocks for requests, or a "no" that has changed nothing.

The tokens of one request, as `allocate_slots` sees them:

    | computed | newly computed | external | new  |
    |  held    |  hits, to be   | to be allocated |
    |          |  attached      |                 |

`computed` is `request.num_computed_tokens`; `external` tokens will come from a tier. Full blocks
are named; tokens beyond `request.num_tokens` get a place but no name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..models.layer_attention import LayerAttention, full
from ..request.request import Request
from .block_pool import BlockPool
from .group_spec import pages_per_block
from .kv_block import BlockIds, GroupBlocks
from .kv_cache_coordinator import KVCacheCoordinator, make_coordinator


class KVCacheManager:
    """Called by the engine's step thread only. Block counts are per pool, token counts per request.

    `watermark` is the fraction of all blocks that admission leaves free (`watermark_blocks`), so
    that running requests can grow for some steps before anyone is preempted.
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
        drops_last_hit: bool = False,
    ) -> None:
        """`attention`: how the layers of each cache group attend; without it there are `num_groups`
        that attend to everything. `most_step_tokens`: the most that a step computes of a request,
        which bounds what groups with windows hold. `hash_block_size`: the tokens of a digest of
        `Request.block_hashes`, if not those of a block. `drops_last_hit`: the last block of a hit
        is computed again, for a proposer that needs the hidden states of its tokens. No option sets
        either yet: rows A6 and A7 of docs/rows.md ask for them, for drafters and hybrid models.

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
        self.pool = BlockPool(num_blocks, enable_caching, pages_per_block(attention))
        self._coordinator: KVCacheCoordinator = make_coordinator(
            self.pool,
            block_size,
            attention,
            most_step_tokens=min(most_step_tokens or max_model_len, max_model_len),
            hashes_per_block=each,
            drops_last_hit=drops_last_hit,
        )
        self.num_groups = len(attention)
        self.no_blocks: GroupBlocks = self._coordinator.no_blocks
        self.forgets = not all(kind.is_full for kind in attention)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at once, at most, when nothing is shared."""
        return self._coordinator.num_blocks_for(num_tokens)

    def num_missing_blocks(self, request: Request, hits: GroupBlocks | None = None) -> int:
        """Free blocks that a request takes, at most, until all tokens that it has now have been
        computed. The hits are not its own yet."""
        return self._coordinator.num_missing(request.request_id, request.num_tokens, hits)

    def num_reserved(self, wanted: Mapping[str, int]) -> int:
        """Free blocks that requests by these ids take, at most, until each has had so many tokens
        computed; also where they share blocks, and one of them gives its own back."""
        return self._coordinator.num_reserved(wanted)

    def num_to_reserve(self, num_tokens: int, hits: GroupBlocks | None = None) -> int:
        """By how many blocks `num_reserved` and what is held become more if a request begins, with
        these hits, that will have `num_tokens` computed."""
        return self._coordinator.num_to_reserve(num_tokens, hits)

    def get_computed_blocks(self, request: Request) -> tuple[GroupBlocks, int]:
        """The longest known prefix of a request that holds no blocks, and its tokens.

        At most `num_tokens - 1` tokens, because the last one must be computed to get its logits.
        Changes nothing; the hits are the request's own once `allocate_slots` was given them.
        """
        if not self.pool.enable_caching or request.skip_reading_prefix_cache:
            return self.no_blocks, 0
        return self._coordinator.find_longest_prefix(request.block_hashes, request.num_tokens - 1)

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
        nobody holds are in the free queue and count as taken; blocks that no later token reads are
        given back first, and count as free. Names are given at once, unless
        `delay_cache_blocks`: then `cache_blocks` gives them when the load has ended.
        """
        computed = request.num_computed_tokens
        more = new_computed_blocks or num_external_computed_tokens
        if num_new_tokens == 1 and not more and (offset := computed % self.block_size):
            # A decode in a block that the request has.
            if offset == self._last_offset and not delay_cache_blocks:
                self._cache(request, min(computed + 1, request.num_tokens), computed=False)
            return self.no_blocks
        computed += num_new_computed_tokens + num_external_computed_tokens
        num_tokens = computed + num_new_tokens
        added = self._coordinator.allocate(
            request.request_id,
            min(num_tokens, self.max_model_len),
            computed,
            new_computed_blocks,
            self.pool.num_free - keep_free_blocks,
        )
        if added is None:
            return None
        if not delay_cache_blocks:
            self._cache(request, min(num_tokens, request.num_tokens), computed=False)
        return added

    def can_go_on(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request holds all that is read behind its first `num_computed_tokens`."""
        return self._coordinator.can_go_on(request.request_id, num_computed_tokens)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Name the full blocks among the first `num_computed_tokens`, which a load brought."""
        self._cache(request, num_computed_tokens, computed=True)

    def name_blocks(self, request: Request, num_tokens: int) -> None:
        """Name the full blocks among the first `num_tokens`, which the last step made computes."""
        self._cache(request, num_tokens, computed=False)

    def name_tail(self, request: Request) -> None:
        """Name the block that the prompt's end lies in, if it is not a full one. The prompt has
        been computed, and nothing more will be written for the request."""
        if tail := request.prompt_tail_hash():
            self._coordinator.name_tail(request.request_id, request.num_prompt_tokens, tail)

    def prompt_keys(self, request: Request, *, with_tail: bool) -> list[bytes]:
        """The names of the blocks of a prompt, as the pool keeps them, that whoever goes on behind
        it reads."""
        digests = self.prompt_digests(request, with_tail=with_tail)
        return self._coordinator.keys(digests, request.num_prompt_tokens)

    def digests(self, request: Request) -> list[bytes]:
        """The digests of all full blocks of a request, its output's too."""
        return list(self._coordinator.of_blocks(request.block_hashes))

    def prompt_digests(self, request: Request, *, with_tail: bool = True) -> list[bytes]:
        """The digests of the blocks of a prompt; its end has one of its own where it fills none."""
        blocks = self._coordinator.of_blocks(request.block_hashes)
        digests = list(blocks[: request.num_prompt_tokens // self.block_size])
        tail = request.prompt_tail_hash() if with_tail else b""
        return [*digests, tail] if tail else digests

    def revoke(
        self, request: Request, num_computed_tokens: int, block_ids: BlockIds | None
    ) -> None:
        """The step being scheduled will not compute the request after all: what the step named
        beyond its first `num_computed_tokens` loses its name, and the blocks that the step added,
        `block_ids` for each group, are given back. Raises RuntimeError where another request of the
        step has found one of them, and nothing changes."""
        counts = [len(ids) for ids in block_ids] if block_ids else [0] * self.num_groups
        self._coordinator.revoke(request.request_id, num_computed_tokens, counts)

    def free(self, request: Request) -> None:
        """Give the blocks of a request back, tail first; they keep names and bytes until reused."""
        self._coordinator.free(request.request_id)

    def pin(self, request: Request, holder: str) -> None:
        """The blocks of a request that has ended are `holder`'s until `unpin`, who runs no more."""
        self._coordinator.pin(request.request_id, holder)

    def unpin(self, holder: str) -> None:
        """As `free`, for blocks that were pinned."""
        self._coordinator.unpin(holder)

    def offer(self, request: Request) -> None:
        """Have the blocks of a request stored ahead of need, its head first."""
        self._coordinator.offer(request.request_id)

    def drop_names(self, request: Request) -> list[bytes]:
        """Make sure that nobody finds the blocks of a request again, nor another block of the same
        name; it keeps them. The names, head first: tiers may have such blocks too."""
        digests = self._coordinator.of_blocks(request.block_hashes)
        self._coordinator.drop_names(request.request_id, digests)
        return self._coordinator.keys(digests)

    def get_block_ids(self, request_id: str) -> BlockIds:
        """The block table of each cache group."""
        return self._coordinator.block_ids(request_id)

    def page_ids(self, blocks: GroupBlocks) -> BlockIds:
        """The ids of such blocks, of their page in each cache group."""
        return self._coordinator.page_ids(blocks)

    def _cache(self, request: Request, num_tokens: int, computed: bool) -> None:
        self._coordinator.cache(request, num_tokens, computed)
