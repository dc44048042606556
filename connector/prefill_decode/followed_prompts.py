# SPDX-License-Identifier: Apache-2.0
"""Prompts that another engine computes for requests of this engine. A prompt's blocks are read into
the slab as soon as they are stored, so that the request has little to load when it runs here.

If the request never comes, the blocks stay in the slab until they are evicted. `prefill_waits.py`
has the requests that wait for a followed prompt."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...tiers.hierarchy.hierarchy import Hierarchy
from ...tiers.hierarchy.promotions import LoadTicket
from ...tiers.mailbox import Alarm

# The longest time for which a prompt is followed; the other engine computes a prompt in seconds.
FOLLOW_SECONDS = 60.0
MOST_PROMPTS = 256
# The largest share of the slab that reads of followed prompts hold.
SHARE = 0.25
# How long reports of blocks stored by other engines are kept: longer than a step takes there.
NEWS_SECONDS = 5.0
MOST_NEWS = 65_536  # blocks


@dataclass(slots=True, eq=False)
class FollowedPrompt:
    """A prompt whose blocks are read as soon as they are stored."""

    keys: list[bytes]
    give_up_at: float  # monotonic
    num_asked: int = 0  # leading keys in the slab or being read into it
    num_there: int = 0  # leading keys that a tier has
    version: int = -1  # the hierarchy's version at the last look-up
    tickets: list[LoadTicket] = field(default_factory=list)

    @property
    def missing(self) -> list[bytes]:
        """Return all keys from the first key on that no tier has."""
        return self.keys[self.num_there :]


class Follows:
    """The prompts that one connector follows. `alarm` wakes the engine at a prompt's time limit."""

    def __init__(self, hierarchy: Hierarchy, alarm: Alarm) -> None:
        self._hierarchy = hierarchy
        self._alarm = alarm
        self.prompts: list[FollowedPrompt] = []  # the prompts followed now
        self._room = int(SHARE * hierarchy.num_slots)  # slots
        self._is_watching = False
        self._news: dict[bytes, float] = {}  # other engines' blocks → their times, the oldest first
        self.num_followed = 0  # since the start

    def start_watching(self) -> None:
        """Record, after this call, which blocks other engines store, if the tiers report that."""
        if not self._is_watching and self._hierarchy.hears_of_others:
            self._is_watching = True
            self._hierarchy.watch_stores(self._hear)

    def newest(self, keys: Sequence[bytes]) -> tuple[int, float, float]:
        """Return how many keys at the end of `keys` other engines have stored within NEWS_SECONDS,
        and the times of the first and the last report of these blocks."""
        recent = itertools.takewhile(self._news.__contains__, reversed(keys))
        moments = [self._news[key] for key in recent]
        return len(moments), min(moments, default=0.0), max(moments, default=0.0)

    def track_prompt(self, keys: Sequence[bytes]) -> FollowedPrompt | None:
        """Follow a prompt with these blocks, in order. None if there are no blocks, if no tier
        reports what other engines store, or if MOST_PROMPTS are followed already."""
        if not keys or not self._hierarchy.hears_of_others or len(self.prompts) >= MOST_PROMPTS:
            return None
        self.start_watching()
        give_up_at = time.monotonic() + FOLLOW_SECONDS
        prompt = FollowedPrompt(list(keys), give_up_at)
        self.prompts.append(prompt)
        self._alarm.at(give_up_at)
        self._hierarchy.prefetch_lookup(keys)  # for blocks stored before
        self.num_followed += 1
        return prompt

    def remove_prompt(self, prompt: FollowedPrompt) -> None:
        """Stop following a prompt, if it is still followed, and release its reads."""
        self._let_go(prompt, all_of_them=True)
        if prompt in self.prompts:
            self.prompts.remove(prompt)

    def read_arrived(self) -> None:
        """Read the blocks that other engines have stored, and release reads that have ended."""
        if not self.prompts:
            return
        now = time.monotonic()
        for prompt in self.prompts:
            self._let_go(prompt, all_of_them=now >= prompt.give_up_at)
            if prompt.version != self._hierarchy.version:
                self._read_more(prompt)
        self.prompts = [
            prompt
            for prompt in self.prompts
            if prompt.tickets or (prompt.num_asked < len(prompt.keys) and now < prompt.give_up_at)
        ]

    def _hear(self, keys: Sequence[bytes]) -> bool:
        """Record blocks that other engines have stored. Return whether to look up blocks."""
        now = time.monotonic()
        news = self._news
        for key in keys:
            news.pop(key, None)
            news[key] = now
        while len(news) > MOST_NEWS or (news and next(iter(news.values())) < now - NEWS_SECONDS):
            del news[next(iter(news))]
        return bool(self.prompts)

    def _read_more(self, prompt: FollowedPrompt) -> None:
        prompt.version = self._hierarchy.version
        missing = prompt.keys[prompt.num_asked :]
        tiers = self._hierarchy.find_prefix(missing).tiers
        prompt.num_there = prompt.num_asked + len(tiers)
        slab = self._hierarchy.tiers[0]
        count = num_read = 0
        for tier in tiers:
            num_read += tier != slab
            if num_read > self._room:
                break
            count += 1
        if num_read:
            ticket = self._hierarchy.begin_load(missing[:count])
            self._room -= len(ticket.keys)
            prompt.tickets.append(ticket)
            count = ticket.begun  # fewer blocks if the slab lacks room
        prompt.num_asked += count

    def _let_go(self, prompt: FollowedPrompt, *, all_of_them: bool) -> None:
        over = [ticket for ticket in prompt.tickets if all_of_them or not ticket.waiting]
        for ticket in over:
            prompt.tickets.remove(ticket)
            self._room += len(ticket.keys)
            self._hierarchy.end_load(ticket)
