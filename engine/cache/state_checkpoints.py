# SPDX-License-Identifier: Apache-2.0
"""StateCheckpoints: copies of sequences' states after some of their tokens, in pages of the pool.

A state-space layer (Mamba, for example) has no K and V per block; its state summarizes all tokens
so far. The worker holds the state of each running request. At some positions the worker copies the
state into pages, one page for each piece of the state:

    position     0 ............ 32 ............ 64 ............ 80
    K and V      |  block 0      |  block 1      |  block 2   |
    states                       D1|1 D1|2 D1|3  (none)            D1: the digest of block 1

A prefix hit ends at a checkpoint, because it needs both the K and V before its end and the states
at its end. If the pool has room, checkpoints are made at

- the last full block before a prompt's last token, if the prompt is not too short;
- a junction, a position up to which K and V were found, but no states;
- each multiple of the `interval`, unless it is 0, in prompts and answers;
- the very end of a prompt that another engine continues.

The pages of a checkpoint are cached while their step is scheduled, and are free afterwards. Later
steps may reuse the free pages, because the worker writes the pages after a step's forward pass, and
first reads the pages of a hit. Pages are held only by a load until its request runs, by a
checkpoint after unknown tokens, and by the pin of an agent's request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from ...connector.messages import EvictedBlock
from ...connector.page_keys import group_of, group_suffix
from ...tiers.block import DIGEST_BYTES
from ..request.request import Request
from .block_pool import BlockPool
from .kv_block import KVCacheBlock

# The largest size of a checkpoint at a prompt's end or a junction, as a multiple of the K and V
# before it: checkpoints of short prompts would otherwise evict long ones.
LEAST_SHARE = 16


class StateSave(NamedTuple):
    """A checkpoint that a step makes of a request's states after `position` tokens."""

    position: int
    page_ids: list[int]  # one page for each piece


class StateCheckpoints:
    """The state checkpoints in one pool; called by the engine's step thread only.

    A checkpoint has the digest of the block that ends there. `interval` is in tokens: 0, or a
    multiple of the block size."""

    def __init__(
        self,
        pool: BlockPool,
        num_pages: int,
        first_group: int,
        block_size: int,
        *,
        interval: int = 0,
        hashes_per_block: int = 1,
    ) -> None:
        if interval % block_size:
            raise ValueError(
                f"checkpoints every {interval} tokens do not end where blocks of {block_size} do"
            )
        self.num_pages = num_pages
        self._pool = pool
        self._groups = range(first_group, first_group + num_pages)
        self._suffixes = [group_suffix(group_id) for group_id in self._groups]
        self._block_size, self._hashes_per_block = block_size, hashes_per_block
        self.interval = interval
        # Checkpoints at which requests start, by request id, until the step is scheduled.
        self._hits: dict[str, list[KVCacheBlock]] = {}
        self._loads: dict[str, list[KVCacheBlock]] = {}  # held
        # The digest of the last checkpoint that each request made or read.
        self._newest: dict[str, bytes] = {}
        # By request id: checkpoints after unknown tokens, held, and cached once these are known.
        self._uncached: dict[str, tuple[int, list[KVCacheBlock]]] = {}
        self._pinned: dict[str, list[KVCacheBlock]] = {}  # by holder
        self._saved: list[KVCacheBlock] = []  # held while the step is scheduled
        self.num_saved = self.num_left_out = 0

    @property
    def held(self) -> list[KVCacheBlock]:
        """The pages held for loads, for checkpoints after unknown tokens, and for pins."""
        uncached = [blocks for _, blocks in self._uncached.values()]
        held = (*self._loads.values(), *uncached, *self._pinned.values())
        return list(chain.from_iterable(held))

    def is_readable(self, digest: bytes) -> bool:
        """Whether the step being scheduled can read the checkpoint with this digest."""
        pool = self._pool
        keys = [digest + suffix for suffix in self._suffixes]
        return all(map(pool.has, keys)) and not pool.is_due(pool.cached_block(keys[-1]))

    def longest_hit(self, digests: Sequence[bytes], most_blocks: int) -> int:
        """Return the largest number of leading blocks, up to `most_blocks`, after which there is a
        checkpoint. The result may be 0."""
        first, has = self._suffixes[0], self._pool.has
        for length in range(most_blocks, 0, -1):
            if has(digests[length - 1] + first) and self.is_readable(digests[length - 1]):
                return length
        return 0

    def note_hit(self, request_id: str, digest: bytes) -> None:
        """Record that a request starts at this checkpoint, without holding its pages."""
        self._newest[request_id] = digest
        self._hits[request_id] = list(map(self._pool.cached_block, self.keys(digest)))

    def drop_hit(self, request_id: str) -> None:
        """Undo `note_hit` for a request that does not start, because it lacks room."""
        self._hits.pop(request_id, None)

    def hold_for_load(self, request_id: str) -> None:
        """Allocate pages for the states that a load brings. The caller checks for room before."""
        self._loads[request_id] = self._pool.get_new_blocks(self.num_pages)

    def load_page_ids(self, request_id: str) -> list[int]:
        """Return the ids of the pages held for a request's load, in piece order."""
        return [block.block_id for block in self._loads[request_id]]

    def cache_loaded(self, request: Request, position: int) -> None:
        """Cache the pages with the states that a request's load has brought. States after a partly
        filled block are not cached."""
        if position % self._block_size == 0:
            held = self._loads[request.request_id]
            self._cache_pages(request, position, held, computed=True)

    def take_start(self, request_id: str) -> list[int]:
        """Return the pages with the initial states of a request that starts in the step being
        scheduled, or no pages if the states begin with zeros. The pages become free."""
        held = self._loads.pop(request_id, None)
        if held is not None:
            self._pool.free_blocks(held)
            return [block.block_id for block in held]
        return [block.block_id for block in self._hits.pop(request_id, [])]

    def positions(self, request: Request, computed: int, end: int) -> list[int]:
        """Return the positions, ascending, at which a step that computes tokens `computed` to `end`
        of a request should make checkpoints."""
        if not self._pool.enable_caching:
            return []
        size, interval, junction = self._block_size, self.interval, request.progress.junction
        num_prompt = request.num_prompt_tokens
        has_multiple = interval > 0 and end // interval > computed // interval
        if computed >= num_prompt and computed >= junction and not has_multiple:
            return []  # nearly every decode ends here
        found = {
            position
            for position in ((num_prompt - 1) // size * size, junction)
            if self._is_worth_it(position)
        }
        if request.hands_over:
            found.add(num_prompt)
        if has_multiple:
            found.update(range(computed - computed % interval + interval, end + 1, interval))
        due = sorted(position for position in found if computed < position <= end)
        return [position for position in due if not self._is_made(request, position)]

    def _is_worth_it(self, position: int) -> bool:
        """Whether a checkpoint at `position` saves enough tokens for its size; see LEAST_SHARE."""
        return position * LEAST_SHARE >= self.num_pages * self._block_size

    def most_tokens(
        self, request: Request, computed: int, num_tokens: int, num_spare: int
    ) -> tuple[int, int]:
        """Return how many of the `num_tokens` tokens after `computed` a step may compute of a
        request, and how many of `num_spare` state slots it uses: one per checkpoint before the last
        token."""
        within = self.positions(request, computed, computed + num_tokens - 1)
        if len(within) <= num_spare:
            return num_tokens, len(within)
        return within[num_spare] - computed, num_spare

    def most_drafts(self, end: int) -> int:
        """Return the most drafts that a step may check after `end` tokens, if `interval` is not 0.
        Drafts end before the next multiple of `interval`, as checkpoints need known tokens."""
        return self.interval - end % self.interval - 1

    def num_to_pin(self, request_id: str) -> int:
        """Return how many pages `pin` would hold for the newest checkpoint; 0 without one."""
        digest = self._newest.get(request_id)
        return self.num_pages if digest is not None and self.is_readable(digest) else 0

    def save(self, request: Request, computed: int, end: int, num_spare: int) -> list[StateSave]:
        """Plan the checkpoints that the step makes of a request. All blocks of the step are
        allocated before. The step makes none without room in the pool, and at most `num_spare`
        before `end`."""
        found: list[tuple[int, list[KVCacheBlock]]] = []
        num_within = 0
        positions = self.positions(request, computed, end)
        # Later positions come first: a hit there saves more tokens, or another engine needs it.
        for position in reversed(positions):
            if position < end and num_within == num_spare:
                break
            if self._pool.free_queue.num_free < self.num_pages:
                self.num_left_out += 1
                continue
            num_within += position < end
            found.append((position, self._pool.get_new_blocks(self.num_pages)))
        found.reverse()
        for position, blocks in found:
            if self._cache_pages(request, position, blocks, computed=False):
                self._saved += blocks
            else:
                self._drop_uncached(request.request_id)
                self._uncached[request.request_id] = (position, blocks)
        self.num_saved += len(found)
        return [
            StateSave(position, [block.block_id for block in blocks]) for position, blocks in found
        ]

    def free_saved(self) -> None:
        """Release the pages of the step's checkpoints. The step must allocate no more blocks."""
        self._pool.free_blocks(self._saved)
        self._saved.clear()

    def cache_known(self, request: Request) -> None:
        """Cache a request's uncached checkpoint if all tokens before the checkpoint are known."""
        uncached = self._uncached.get(request.request_id)
        if uncached is None:
            return
        position, blocks = uncached
        if self._cache_pages(request, position, blocks, computed=False):
            del self._uncached[request.request_id]
            self._pool.free_blocks(blocks)

    def drop_uncached(self) -> bool:
        """Release all uncached checkpoints, to make room. Return whether there were any."""
        given_up = list(self._uncached)
        for request_id in given_up:
            self._drop_uncached(request_id)
        return bool(given_up)

    def pin(self, request_id: str, holder: str) -> None:
        """Let `holder` hold the newest checkpoint of an ended request until `unpin`."""
        digest = self._newest.get(request_id)
        self.free(request_id)
        if digest is not None and self.is_readable(digest):
            blocks = self._pinned[holder] = list(map(self._pool.cached_block, self.keys(digest)))
            self._pool.touch(blocks)
            self._pool.pin(blocks)

    def unpin(self, holder: str) -> None:
        """Release the pages of a pinned checkpoint, if there is one."""
        blocks = self._pinned.pop(holder, [])
        self._pool.unpin(blocks)
        self._pool.free_blocks(blocks)

    def uncache_digests(self, digests: Iterable[bytes]) -> None:
        """Uncache the checkpoints with these digests, so that no lookup finds them."""
        digests, has = list(digests), self._pool.has
        for group_id, suffix in zip(self._groups, self._suffixes, strict=True):
            found = [digest for digest in digests if has(digest + suffix)]
            self._pool.uncache_digests(found, group_id)

    def keys(self, digest: bytes) -> list[bytes]:
        """Return the keys, in piece order, of the pages of the checkpoint with this digest."""
        return [digest + suffix for suffix in self._suffixes]

    def offer_beside(self, evicted: Iterable[EvictedBlock]) -> None:
        """Offer all pieces of a checkpoint to the tiers if one piece, or the K and V block before
        the checkpoint, is evicted, because a tier needs the whole checkpoint."""
        first, has = self._suffixes[0], self._pool.has
        digests = [
            block.key[:DIGEST_BYTES]
            for block in evicted
            if group_of(block.key) in self._groups or has(block.key[:DIGEST_BYTES] + first)
        ]
        for digest in dict.fromkeys(digests):
            keys = [key for key in self.keys(digest) if has(key)]
            self._pool.offer([self._pool.cached_block(key) for key in keys])

    def free(self, request_id: str) -> None:
        """Forget a request that ends or does not start. The request's newest checkpoint moves to
        the end of the free queue, so that it is reused together with the request's blocks, not
        earlier."""
        self._drop_hold(request_id)
        digest = self._newest.pop(request_id, None)
        if digest is not None:
            keys = self.keys(digest)
            blocks = [self._pool.cached_block(key) for key in keys if self._pool.has(key)]
            free = [block for block in blocks if block.ref_cnt == 0]
            self._pool.touch(free)
            self._pool.free_blocks(free)

    def _drop_hold(self, request_id: str) -> None:
        self._hits.pop(request_id, None)
        self._drop_uncached(request_id)
        held = self._loads.pop(request_id, None)
        if held is not None:
            self._pool.free_blocks(held)

    def _is_made(self, request: Request, position: int) -> bool:
        digest = self._digest(request, position)
        return digest is not None and self._pool.has(digest + self._suffixes[0])

    def _digest(self, request: Request, position: int) -> bytes | None:
        """Return the digest of a checkpoint after `position` tokens; None if a token is unknown."""
        index, rest = divmod(position, self._block_size)
        if rest:
            return request.prompt_tail_hash()
        index *= self._hashes_per_block
        return request.block_hashes[index - 1] if index <= len(request.block_hashes) else None

    def _cache_pages(
        self, request: Request, position: int, blocks: Sequence[KVCacheBlock], *, computed: bool
    ) -> bool:
        """Cache the pages of a checkpoint. Return False if a token before `position` is unknown."""
        digest = self._digest(request, position)
        if digest is None:
            return False
        self._newest[request.request_id] = digest
        index, rest = divmod(position, self._block_size)
        observer = self._pool.observer
        for group_id, block in zip(self._groups, blocks, strict=True):
            self._pool.cache_full_blocks([digest], [block], group_id, computed)
            if observer is not None and not rest:
                observer.named(request, group_id, index - 1, [block.block_id])
        return True

    def _drop_uncached(self, request_id: str) -> None:
        position_and_blocks = self._uncached.pop(request_id, None)
        if position_and_blocks is not None:
            self._pool.free_blocks(position_and_blocks[1])
