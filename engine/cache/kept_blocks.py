# SPDX-License-Identifier: Apache-2.0
"""KeptBlocks: the blocks of requests that have ended, for the requests that continue them.

No running request holds them. They are given up where any request lacks room; a request that would
have gone on in them then computes what the pool has lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..request.request import KeptEnd, Request
from .kv_block import GroupBlocks
from .kv_cache_manager import KVCacheManager


class KeptBlocks:
    """Ended requests with the blocks that are kept of them, the oldest first. Called by the
    engine's step thread only."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._ended: list[Request] = []

    def __len__(self) -> int:
        return len(self._ended)

    def keep_blocks(self, request: Request) -> None:
        """Keep the blocks of a request that ends, until they are released."""
        holder = f"\0kept {request.number}"  # no request can have this id
        self._manager.pin(request, holder)
        request.progress.kept = KeptEnd(holder)
        self._ended.append(request)

    def add_heir(self, ended: Request) -> None:
        """A new request continues one that has ended, whose blocks are kept for it as well."""
        if (kept := ended.progress.kept) is not None:
            kept.num_heirs += 1

    def blocks_for(self, request: Request) -> GroupBlocks:
        """The kept blocks that a waiting request goes on in."""
        return self._manager.tables(_kept_for(request).holder)

    def lend(self, request: Request) -> None:
        """The request holds the blocks that `blocks_for` said, and what they hold is computed. They
        are kept no longer where no other request is to go on in them."""
        assert request.continues is not None
        num_tokens = num_common_tokens(request.continues, request)
        self._manager.fork(_kept_for(request).holder, request, num_tokens)
        request.num_computed_tokens = num_tokens
        self.remove_heir(request)

    def take_back(self, request: Request) -> None:
        """A request to which blocks were lent could not begin, and holds nothing again."""
        self._manager.free(request)
        request.num_computed_tokens = 0
        if request.continues is not None:
            self.add_heir(request.continues)

    def remove_heir(self, request: Request) -> None:
        """A request has begun in kept blocks, or has ended; the last of those that were to go on in
        them releases them."""
        before = request.continues
        if before is not None and (kept := before.progress.kept):
            kept.num_heirs -= 1
            if not kept.num_heirs:
                self.release_blocks([before])

    def release_blocks(self, requests: Iterable[Request]) -> None:
        """Give the blocks of these ended requests back; requests without any are ignored."""
        for request in requests:
            if (kept := request.progress.kept) is not None:
                request.progress.kept = None
                self._ended.remove(request)
                self._manager.unpin(kept.holder)

    @property
    def ended(self) -> Sequence[Request]:
        """The requests whose blocks are kept, in the order in which they have ended."""
        return self._ended


def num_common_tokens(ended: Request, request: Request) -> int:
    """The tokens that a request which continues an ended one need not compute: those of the other's
    prompt, but for its own last one, whose logits are wanted."""
    return min(ended.num_prompt_tokens, request.num_tokens - 1)


def _kept_for(request: Request) -> KeptEnd:
    assert request.continues is not None and request.continues.progress.kept is not None
    return request.continues.progress.kept
