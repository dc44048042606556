# SPDX-License-Identifier: Apache-2.0
"""PictureCache records which pictures have embeddings in the worker, and plans their encoding.

A chunk of a prompt needs the embeddings of all pictures that it touches. A step encodes the missing
ones, within a budget. The worker keeps the embeddings of a picture while a running request is in
its middle, and after that until another picture needs the room. If a picture finds no budget or no
room, the chunk ends before it. If it finds no room, later requests begin no picture in this step,
as their pictures could take the room again and again.

A step's plan names the pictures to encode and those to drop. The worker carries it out even if the
step computes no token. Scheduler and worker count in tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from ..request.pictures import Picture
from ..request.request import Request

# The pictures that a step encodes, and the digests of pictures that the worker drops before.
PicturePlan = tuple[list[Picture], list[bytes]]
NO_PLAN: PicturePlan = ([], [])


@dataclass(slots=True)
class _Entry:
    """The embeddings of one picture in the worker."""

    num_tokens: int
    step_id: int  # the step that encodes the picture
    owner: str  # the id of the request for which the picture is encoded
    holders: set[str] = field(default_factory=set)  # ids of requests that still need it


class PictureCache:
    """The picture embeddings in the worker's memory. `most_tokens` is both the room for embeddings
    and the budget of a step, in tokens; a single larger picture is encoded alone."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the longest unused first
        self._held_by: dict[str, set[bytes]] = {}
        self._num_tokens = 0  # picture tokens of all entries
        self._step_id = self._budget = 0
        self._is_full = False  # in this step a picture has found no room
        self._to_encode: list[Picture] = []
        self._to_drop: list[bytes] = []
        self._reusers: list[str] = []  # for each picture of others, the request that would use it
        self.num_encoded = self.num_reused = 0  # pictures since the start

    def begin_step(self, step_id: int, running: Iterable[Request]) -> None:
        """Begin a step. Release all pictures but those in whose middle a running request is: the
        next chunk of a prompt reserves its pictures again, also a picture that a prompt repeats."""
        self._step_id, self._budget, self._reusers = step_id, self._most_tokens, []
        self._is_full = False
        if not self._held_by:
            return
        inside = {
            each.request_id: {
                p.digest for p in each.pictures if p.start < each.num_computed_tokens < p.end
            }
            for each in running
            if each.request_id in self._held_by
        }
        for request_id, held in list(self._held_by.items()):
            self._release(request_id, held - inside.get(request_id, set()))

    def fit_chunk(self, request: Request, computed: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` after `computed` the request may compute in this step,
        and plan to encode the pictures among them that have no embeddings."""
        end = computed + num_tokens
        for each in request.pictures:
            if each.end <= computed:
                continue
            if each.start >= end:
                break
            if not self._hold(request.request_id, each):
                return max(0, each.start - computed)
        return num_tokens

    def take_plan(self, computing: Container[str] | None = None) -> PicturePlan:
        """Return the pictures that this step encodes, and the digests of pictures dropped before.
        `computing` has the ids of the requests that compute in this step; None: all that tried."""
        plan = self._to_encode, self._to_drop
        self.num_encoded += len(self._to_encode)
        self.num_reused += sum(computing is None or each in computing for each in self._reusers)
        self._to_encode, self._to_drop = [], []
        return plan

    def fail_step(self, step_id: int) -> None:
        """Forget the pictures that this step and later steps were to encode."""
        lost = [key for key, entry in self._entries.items() if entry.step_id >= step_id]
        for digest in lost:
            entry = self._entries.pop(digest)
            self._num_tokens -= entry.num_tokens
            self._to_drop.append(digest)
            for holder in entry.holders:
                self._held_by[holder].discard(digest)

    def stats(self) -> dict[str, int]:
        """Return counters since the start: pictures that a step has got to encode, and pictures
        whose embeddings a further request used."""
        return {"pictures_encoded": self.num_encoded, "pictures_reused": self.num_reused}

    def _hold(self, request_id: str, picture: Picture) -> bool:
        entry = self._entries.get(picture.digest)
        if self._is_full and (entry is None or request_id not in entry.holders):
            return False
        if entry is None:
            if not self._make_room(picture.num_tokens):
                return False
            entry = _Entry(picture.num_tokens, self._step_id, request_id)
            self._entries[picture.digest] = entry
            self._num_tokens += picture.num_tokens
            self._budget -= picture.num_tokens
            self._to_encode.append(picture)
        elif request_id not in entry.holders and request_id != entry.owner:
            self._reusers.append(request_id)
        self._entries.move_to_end(picture.digest)
        entry.holders.add(request_id)
        self._held_by.setdefault(request_id, set()).add(picture.digest)
        return True

    def _make_room(self, num_tokens: int) -> bool:
        """Drop unused embeddings until a picture fits into the budget and the room. A picture
        larger than `most_tokens` needs the whole budget and the whole room."""
        if num_tokens > self._budget and self._budget < self._most_tokens:
            return False
        unused = [key for key, entry in self._entries.items() if not entry.holders]
        while self._num_tokens + num_tokens > self._most_tokens and unused:
            digest = unused.pop(0)
            self._num_tokens -= self._entries.pop(digest).num_tokens
            self._to_drop.append(digest)
        self._is_full = self._num_tokens > 0 and self._num_tokens + num_tokens > self._most_tokens
        return not self._is_full

    def _release(self, request_id: str, digests: set[bytes]) -> None:
        held = self._held_by[request_id]
        for digest in digests:
            self._entries[digest].holders.discard(request_id)
            held.discard(digest)
        if not held:
            del self._held_by[request_id]
