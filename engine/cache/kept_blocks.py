# SPDX-License-Identifier: Apache-2.0
"""KeptBlocks: the blocks of ended requests, kept for the requests that will continue them.

No running request holds kept blocks. Kept blocks are released when any request lacks room; a
request that continues the ended one then recomputes the blocks that the pool no longer caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..request.request import KeptEnd, Request
from .kv_block import GroupBlocks
from .kv_cache_manager import KVCacheManager


class KeptBlocks:
    """The kept blocks by ended request, the oldest first. Called by the step thread only."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._ended: list[Request] = []

    def __len__(self) -> int:
        return len(self._ended)

    def keep_blocks(self, request: Request) -> None:
        holder = f"\0kept {request.number}"  # no request can have this id
        self._manager.pin(request, holder)
        request.progress.kept = KeptEnd(holder)
        self._ended.append(request)

    def add_heir(self, ended: Request) -> None:
        """Record that a new request continues an ended one and needs its kept blocks."""
        if (kept := ended.progress.kept) is not None:
            kept.num_heirs += 1

    def blocks_for(self, request: Request) -> GroupBlocks:
        return self._manager.tables(_kept_for(request).holder)

    def lend(self, request: Request) -> None:
        """Let a request hold the kept blocks of the request that it continues, as computed blocks.
        If no other request will continue the ended one, its blocks are no longer kept."""
        assert request.continues is not None
        num_tokens = num_common_tokens(request.continues, request)
        self._manager.fork(_kept_for(request).holder, request, num_tokens)
        request.num_computed_tokens = num_tokens
        self.remove_heir(request)

    def take_back(self, request: Request) -> None:
        """Undo `lend` for a request that could not start; it then holds no blocks."""
        self._manager.free(request)
        request.num_computed_tokens = 0
        if request.continues is not None:
            self.add_heir(request.continues)

    def remove_heir(self, request: Request) -> None:
        """Record that a request no longer needs kept blocks, because it has started in them or has
        ended. After the last such request the blocks are released."""
        before = request.continues
        if before is not None and (kept := before.progress.kept):
            kept.num_heirs -= 1
            if not kept.num_heirs:
                self.release_blocks([before])

    def release_blocks(self, requests: Iterable[Request]) -> None:
        """Release the blocks kept for these requests; requests without kept blocks are ignored."""
        for request in requests:
            if (kept := request.progress.kept) is not None:
                request.progress.kept = None
                self._ended.remove(request)
                self._manager.unpin(kept.holder)

    @property
    def ended(self) -> Sequence[Request]:
        """The requests whose blocks are kept, in the order in which they ended."""
        return self._ended


def num_common_tokens(ended: Request, request: Request) -> int:
    """Return how many tokens `request` need not compute if it continues `ended`: the prompt of
    `ended`, but never the last token of `request`, whose logits are needed."""
    return min(ended.num_prompt_tokens, request.num_tokens - 1)


def _kept_for(request: Request) -> KeptEnd:
    assert request.continues is not None and request.continues.progress.kept is not None
    return request.continues.progress.kept
