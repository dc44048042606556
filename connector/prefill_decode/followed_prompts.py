# SPDX-License-Identifier: Apache-2.0
"""Prompts that another engine is computing and this one will go on with: their blocks are read into
the slab as they come, so that little is left to load when a request needs them.

They are only hints: a prompt that does not come costs the slots that its blocks take until other
blocks need them. Requests that wait for such a prompt are in `prefill_waits.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...tiers.hierarchy.hierarchy import Hierarchy
from ...tiers.hierarchy.promotions import LoadTicket
from ...tiers.mailbox import Alarm

# Limit on following a prompt; computing one elsewhere takes seconds where it is worth it.
FOLLOW_SECONDS = 60.0
MOST_PROMPTS = 256
# Reads of this kind hold at most this share of the slab.
SHARE = 0.25
# Blocks that others have stored are remembered for so long; a step of theirs takes less.
NEWS_SECONDS = 5.0
MOST_NEWS = 65_536  # blocks


@dataclass(slots=True, eq=False)
class FollowedPrompt:
    """A prompt whose blocks are read as they come."""

    keys: list[bytes]
    give_up_at: float  # monotonic
    num_asked: int = 0  # leading keys that are in the slab, or on their way there
    num_there: int = 0  # leading keys that some tier has
    version: int = -1  # of the hierarchy, when it was looked at last
    tickets: list[LoadTicket] = field(default_factory=list)

    @property
    def missing(self) -> list[bytes]:
        """The keys that no tier has."""
        return self.keys[self.num_there :]


class Follows:
    """The prompts that one connector follows. `alarm` wakes the engine when one is given up."""

    def __init__(self, hierarchy: Hierarchy, alarm: Alarm) -> None:
        self._hierarchy = hierarchy
        self._alarm = alarm
        self.prompts: list[FollowedPrompt] = []  # followed now; not to be changed
        self._room = int(SHARE * hierarchy.num_slots)  # slots
        self._is_watching = False
        self._news: dict[bytes, float] = {}  # blocks of others and when they came, in that order
        self.num_followed = 0  # since the start

    def start_watching(self) -> None:
        """Record the blocks that other engines store from now on."""
        if not self._is_watching and self._hierarchy.hears_of_others:
            self._is_watching = True
            self._hierarchy.watch_stores(self._hear)

    def newest(self, keys: Sequence[bytes]) -> tuple[int, float, float]:
        """The number of these keys, counted from the last one back, that others have stored just
        now, and the times when the first and the last of them came."""
        recent = itertools.takewhile(self._news.__contains__, reversed(keys))
        moments = [self._news[key] for key in recent]
        return len(moments), min(moments, default=0.0), max(moments, default=0.0)

    def track_prompt(self, keys: Sequence[bytes]) -> FollowedPrompt | None:
        """Follow a prompt with these blocks, head first. None if that is of no use."""
        if not keys or not self._hierarchy.hears_of_others or len(self.prompts) >= MOST_PROMPTS:
            return None
        self.start_watching()
        give_up_at = time.monotonic() + FOLLOW_SECONDS
        prompt = FollowedPrompt(list(keys), give_up_at)
        self.prompts.append(prompt)
        self._alarm.at(give_up_at)
        self._hierarchy.prefetch_lookup(keys)  # what came before
        self.num_followed += 1
        return prompt

    def remove_prompt(self, prompt: FollowedPrompt) -> None:
        """Stop following a prompt, which may have ended by itself."""
        self._let_go(prompt, all_of_them=True)
        if prompt in self.prompts:
            self.prompts.remove(prompt)

    def read_arrived(self) -> None:
        """Read the blocks that have come, and release reads that have ended."""
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
        """Note blocks that others have stored. Return whether to look them up."""
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
            count = ticket.begun  # where the slab has no room for all, the leading part
        prompt.num_asked += count

    def _let_go(self, prompt: FollowedPrompt, *, all_of_them: bool) -> None:
        over = [ticket for ticket in prompt.tickets if all_of_them or not ticket.waiting]
        for ticket in over:
            prompt.tickets.remove(ticket)
            self._room += len(ticket.keys)
            self._hierarchy.end_load(ticket)
