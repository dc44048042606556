# SPDX-License-Identifier: Apache-2.0
"""StateCheckpoints: the states of sequences at some of their tokens, kept in pages of the pool.

A layer that carries a state (state space) has no K and V that could be kept block by block: its
state stands for all tokens before it. The worker holds the state of each running request, and
copies it at some positions into pages, a piece each:

    position     0 ............ 32 ............ 64 ............ 80
    K and V      |  block 0      |  block 1      |  block 2   |
    states                       D1|1 D1|2 D1|3  (none)            D1: the digest of block 1

A hit of a request needs the blocks of K and V up to its end and the states there, so it ends at a
checkpoint. These are made, where the pool has room, at

- the end of a prompt, at the last full block before its last token, if it is not too short;
- a junction: a position up to which K and V were found, and no states;
- each multiple of the interval, if there is one, in answers too;
- the very end of a prompt that another engine goes on with.

Pages of a checkpoint are named when their step is made, and free once it has been made: the worker
writes them behind the step's forward pass, and reads those of a hit before everything else that a
step does, so whichever step takes them comes after that. Only a load holds pages, until its request
runs, and a pinned turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from ...connector.messages import EvictedBlock
from ...connector.page_names import group_of, group_suffix
from ...tiers.block import DIGEST_BYTES
from ..request.request import Request
from .block_pool import BlockPool
from .kv_block import KVCacheBlock

# A checkpoint at the end of a prompt or at a junction takes at most so many times what K and V of
# the tokens before it take: for a few words it would drive documents out.
LEAST_SHARE = 16


class StateSave(NamedTuple):
    """A checkpoint that a step makes of a request: its states behind `position` tokens."""

    position: int
    page_ids: list[int]  # one for each piece


class StateCheckpoints:
    """The checkpoints of one pool. Called by the engine's step thread only.

    Digests are those of blocks; `interval` is tokens, 0 for none, else a multiple of a block's.
    """

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
        # By request, until the step that it starts in is made.
        self._hits: dict[str, list[KVCacheBlock]] = {}
        self._loads: dict[str, list[KVCacheBlock]] = {}  # held
        # The checkpoint of each request that a later one will want: the last that it made or read.
        self._newest: dict[str, bytes] = {}
        # Of tokens that are not known yet, by request: held, and named when they are.
        self._unnamed: dict[str, tuple[int, list[KVCacheBlock]]] = {}
        self._pinned: dict[str, list[KVCacheBlock]] = {}  # by holder
        self._saved: list[KVCacheBlock] = []  # held while the step is being made
        self.num_saved = self.num_left_out = 0

    @property
    def held(self) -> list[KVCacheBlock]:
        """The pages that are held: for a load, until tokens are known, or for a pinned turn."""
        unnamed = [blocks for _, blocks in self._unnamed.values()]
        held = (*self._loads.values(), *unnamed, *self._pinned.values())
        return list(chain.from_iterable(held))

    def is_readable(self, digest: bytes) -> bool:
        """Whether a checkpoint of this name can be read by the step being scheduled."""
        pool = self._pool
        keys = [digest + suffix for suffix in self._suffixes]
        return all(map(pool.has, keys)) and not pool.is_due(pool.named(keys[-1]))

    def longest_hit(self, digests: Sequence[bytes], most_blocks: int) -> int:
        """The most blocks, up to `most_blocks`, behind which there is a checkpoint; 0 needs none,
        for a sequence begins with states of zeros."""
        first, has = self._suffixes[0], self._pool.has
        for length in range(most_blocks, 0, -1):
            if has(digests[length - 1] + first) and self.is_readable(digests[length - 1]):
                return length
        return 0

    def note_hit(self, request_id: str, digest: bytes) -> None:
        """A request starts behind this checkpoint, which is in the pool. Nothing is held."""
        self._newest[request_id] = digest
        self._hits[request_id] = [self._pool.named(digest + suffix) for suffix in self._suffixes]

    def drop_hit(self, request_id: str) -> None:
        """A request for which `note_hit` was called has found no room, and does not start."""
        self._hits.pop(request_id, None)

    def hold_for_load(self, request_id: str) -> None:
        """Hold pages for the states that a load is to bring; there is room for them."""
        self._loads[request_id] = self._pool.get_new_blocks(self.num_pages)

    def load_page_ids(self, request_id: str) -> list[int]:
        """The ids of the pages that are held for the load of a request, in the order of pieces."""
        return [block.block_id for block in self._loads[request_id]]

    def name_loaded(self, request: Request, position: int) -> None:
        """The load of a request has brought states; those behind a block that is not full get no
        name."""
        if position % self._block_size == 0:
            held = self._loads[request.request_id]
            self._name(request, position, held, computed=True)

    def take_start(self, request_id: str) -> list[int]:
        """The pages that a request's states are read from, which starts in the step being made;
        empty where it begins with zeros. They are free from now on."""
        held = self._loads.pop(request_id, None)
        if held is not None:
            self._pool.free_blocks(held)
            return [block.block_id for block in held]
        return [block.block_id for block in self._hits.pop(request_id, [])]

    def positions(self, request: Request, computed: int, end: int) -> list[int]:
        """The places of the checkpoints to be made of a request whose tokens `computed` to `end` a
        step computes; ascending."""
        if not self._pool.enable_caching:
            return []
        size, interval, junction = self._block_size, self.interval, request.progress.junction
        num_prompt = request.num_prompt_tokens
        has_multiple = interval > 0 and end // interval > computed // interval
        if computed >= num_prompt and computed >= junction and not has_multiple:
            return []  # nearly each token of an answer
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
        """Whether a checkpoint saves enough tokens, for what it takes."""
        return position * LEAST_SHARE >= self.num_pages * self._block_size

    def most_tokens(
        self, request: Request, computed: int, num_tokens: int, num_spare: int
    ) -> tuple[int, int]:
        """The tokens that a step may compute of a request, of `num_tokens` behind `computed` ones,
        and the states that it needs for them, of `num_spare`: one for each checkpoint in front of
        their end."""
        within = self.positions(request, computed, computed + num_tokens - 1)
        if len(within) <= num_spare:
            return num_tokens, len(within)
        return within[num_spare] - computed, num_spare

    def most_drafts(self, end: int) -> int:
        """The drafts that a step may check behind `end` computed tokens, where there is an
        interval: a step that computes for sure up to its next multiple makes the checkpoint."""
        return self.interval - end % self.interval - 1

    def num_to_pin(self, request_id: str) -> int:
        """The pages that `pin` would hold for a request: those of its newest checkpoint, if that is
        readable."""
        digest = self._newest.get(request_id)
        return self.num_pages if digest is not None and self.is_readable(digest) else 0

    def save(self, request: Request, computed: int, end: int, num_spare: int) -> list[StateSave]:
        """The checkpoints that the step being made, which has all its blocks, makes of a request;
        fewer where the pool has no room for them, and at most `num_spare` in front of the end."""
        found: list[tuple[int, list[KVCacheBlock]]] = []
        num_within = 0
        positions = self.positions(request, computed, end)
        # Another engine waits for the very end; of others the last one saves most.
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
            if self._name(request, position, blocks, computed=False):
                self._saved += blocks
            else:
                self._drop_unnamed(request.request_id)
                self._unnamed[request.request_id] = (position, blocks)
        self.num_saved += len(found)
        return [
            StateSave(position, [block.block_id for block in blocks]) for position, blocks in found
        ]

    def free_saved(self) -> None:
        """The step being made takes no more blocks: the pages of its checkpoints are free."""
        self._pool.free_blocks(self._saved)
        self._saved.clear()

    def name_known(self, request: Request) -> None:
        """Name a checkpoint behind tokens that have become known."""
        unnamed = self._unnamed.get(request.request_id)
        if unnamed is None:
            return
        position, blocks = unnamed
        if self._name(request, position, blocks, computed=False):
            del self._unnamed[request.request_id]
            self._pool.free_blocks(blocks)

    def drop_unnamed(self) -> bool:
        """Give up the checkpoints of tokens that are not known yet, for their room; whether there
        were any."""
        given_up = list(self._unnamed)
        for request_id in given_up:
            self._drop_unnamed(request_id)
        return bool(given_up)

    def pin(self, request_id: str, holder: str) -> None:
        """The newest checkpoint of a request that has ended is `holder`'s until `unpin`."""
        digest = self._newest.get(request_id)
        self.free(request_id)
        if digest is not None and self.is_readable(digest):
            blocks = self._pinned[holder] = [self._pool.named(key) for key in self.keys(digest)]
            self._pool.touch(blocks)
            self._pool.pin(blocks)

    def unpin(self, holder: str) -> None:
        """Give the pages of a checkpoint back that was pinned, if one was."""
        blocks = self._pinned.pop(holder, [])
        self._pool.unpin(blocks)
        self._pool.free_blocks(blocks)

    def drop_names(self, digests: Iterable[bytes]) -> None:
        """Make checkpoints of these names impossible to find."""
        digests, has = list(digests), self._pool.has
        for group_id, suffix in zip(self._groups, self._suffixes, strict=True):
            found = [digest for digest in digests if has(digest + suffix)]
            self._pool.drop_keys(found, group_id)

    def keys(self, digest: bytes) -> list[bytes]:
        """The names of a checkpoint's pages, as the pool keeps them."""
        return [digest + suffix for suffix in self._suffixes]

    def offer_beside(self, evicted: Iterable[EvictedBlock]) -> None:
        """Offer the pool's part of a checkpoint to the tiers where the block in front of it, or a
        piece of it, is evicted: a tier is of use only with all of it."""
        first, has = self._suffixes[0], self._pool.has
        digests = [
            block.key[:DIGEST_BYTES]
            for block in evicted
            if group_of(block.key) in self._groups or has(block.key[:DIGEST_BYTES] + first)
        ]
        for digest in dict.fromkeys(digests):
            keys = [key for key in self.keys(digest) if has(key)]
            self._pool.offer([self._pool.named(key) for key in keys])

    def free(self, request_id: str) -> None:
        """A request holds nothing any more, and starts nowhere. Its blocks are about to be free,
        and its checkpoint is reused with them, not before."""
        self._drop_hold(request_id)
        digest = self._newest.pop(request_id, None)
        if digest is not None:
            keys = self.keys(digest)
            blocks = [self._pool.named(key) for key in keys if self._pool.has(key)]
            free = [block for block in blocks if block.ref_cnt == 0]
            self._pool.touch(free)
            self._pool.free_blocks(free)

    def _drop_hold(self, request_id: str) -> None:
        self._hits.pop(request_id, None)
        self._drop_unnamed(request_id)
        held = self._loads.pop(request_id, None)
        if held is not None:
            self._pool.free_blocks(held)

    def _is_made(self, request: Request, position: int) -> bool:
        digest = self._digest(request, position)
        return digest is not None and self._pool.has(digest + self._suffixes[0])

    def _digest(self, request: Request, position: int) -> bytes | None:
        """The name of a checkpoint behind so many tokens; None while they are not known."""
        index, rest = divmod(position, self._block_size)
        if rest:
            return request.prompt_tail_hash()
        index *= self._hashes_per_block
        return request.block_hashes[index - 1] if index <= len(request.block_hashes) else None

    def _name(
        self, request: Request, position: int, blocks: Sequence[KVCacheBlock], *, computed: bool
    ) -> bool:
        """Name the pages of a checkpoint; False where its tokens are not known."""
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

    def _drop_unnamed(self, request_id: str) -> None:
        position_and_blocks = self._unnamed.pop(request_id, None)
        if position_and_blocks is not None:
            self._pool.free_blocks(position_and_blocks[1])
