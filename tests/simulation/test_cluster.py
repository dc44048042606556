# SPDX-License-Identifier: Apache-2.0
"""Simulated lives of prefill and decode engines that share a server: whatever is killed, hangs or
is lost, everybody is answered once and rightly, and nothing is held for ever. Prompts come whole
and in parts, and some are asked for several answers.

Engine cores, schedulers, connectors and hierarchies are the real ones; see cluster.py. A seed that
fails is replayed by `python -m tests.simulation --cluster SEED --trace`.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import pytest

from stratakv.connector.messages import Match
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.prefill_decode.prefill_waits import PrefillWaits
from stratakv.connector.prefill_decode.wait_limit import End, WaitLimit
from stratakv.connector.request_offload import RequestOffload
from stratakv.engine.cache.kept_blocks import KeptBlocks
from stratakv.engine.cache.kv_block import KVCacheBlock
from stratakv.engine.cache.shared_tails import SharedTails
from stratakv.engine.core import request_builder
from stratakv.engine.core.continued.prompt_sessions import PromptSession, PromptSessions
from stratakv.engine.core.handover import HeldAnswers
from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.request.request import Request
from stratakv.engine.scheduler.output import SchedulerOutput
from stratakv.engine.scheduler.scheduler import Scheduler
from stratakv.tiers.hierarchy.hierarchy import Hierarchy

from ..engine.scheduler.conftest import SIZE
from ..stepping import noted
from .clock import VirtualClock, virtual_time
from .cluster import MODES, Cluster

LIVES = {"ci": 600, "long": 100_000}
PARTS = 4
# A planted bug has to be found within so many lives.
LIVES_TO_FIND = 300


def live_all(seeds: Iterable[int], seen: Counter[str] | None = None) -> list[str]:
    """The hashes of these lives. A failure says how to see it again."""
    clock, rng = VirtualClock(), random.Random()
    cluster = Cluster(clock, rng)
    hashes = []
    with virtual_time(clock, rng):
        for seed in seeds:
            with noted(f"replay: python -m tests.simulation --cluster {seed}"):
                hashes.append(cluster.live(seed))
    if seen is not None:
        seen += cluster.seen
    return hashes


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What all lives together went through."""
    return Counter()


@pytest.mark.parametrize("part", range(PARTS))
def test_everybody_is_answered_once(part: int, seed: int, scale: str, seen: Counter[str]) -> None:
    lives = LIVES[scale] // PARTS
    first = seed + part * lives
    live_all(range(first, first + lives), seen)
    seen["parts"] += 1


def test_the_lives_were_worth_living(seen: Counter[str]) -> None:
    """Prompts are handed over whole, in part and not at all, and everything breaks that can."""
    if seen["parts"] < PARTS:
        pytest.skip("not all lives were lived in this process")
    for what in (*MODES, "handed over", "handed on whole", "incomplete", "too late", "restarts",
                 "killed prefill", "killed decode", "failed steps", "foreign tickets",
                 "bad tickets", "preemptions", "ended_abort", "ended_error", "loads_failed",
                 "helped", "helper lost", "wait whole", "wait stalled", "wait lost", "wait gone",
                 "stop", "length", "cut", "left", "forks", "copied_blocks", "accepted drafts",
                 "rejected drafts", "several answers", "whole in parts", "changed prompts",
                 "parts for nothing", "waited too long", "sessions refused", "nan"):  # fmt: skip
        assert seen[what], what
    assert seen["length"] + seen["stop"] > 10 * seen["cut"], "most are answered whole"
    assert seen["handed over"] > 2 * seen["incomplete"]


def test_the_same_seed_gives_the_same_trace(seed: int) -> None:
    seeds = range(seed, seed + 10)
    hashes = live_all(seeds)
    assert live_all(reversed(seeds)) == hashes[::-1]
    assert len(set(hashes)) == len(hashes)


def cache_too_early(self: Scheduler, held: Set[str]) -> SchedulerOutput:
    """The end of a prompt is cached before it was computed."""
    for request in self._states.running:
        if request.hands_over and request.num_computed_tokens < request.num_prompt_tokens:
            blocks = self.manager.get_block_ids(request.request_id)[0]
            if len(blocks) * self.manager.block_size >= request.num_prompt_tokens:
                self.manager.cache_tail(request)
    return schedule(self, held)


def ask_nobody(
    self: Hierarchy, keys: Sequence[bytes], seconds: float, done: Callable[[list[bool]], None]
) -> None:
    """What is known of the server, which may be old, counts as what it says."""
    done([True] * len(keys))


def release_what_is_given(self: HeldAnswers) -> list[Any]:
    """An answer goes when its blocks are on their way."""
    going = [request_id for request_id, held in self._held.items() if held.is_moving]
    for request_id in going:
        self.handover.forget_hand_over(request_id)
    ended = [self._pop_deferred(request_id, 0.0, is_whole=True) for request_id in going]
    return ended + release(self)


def hold_for_ever(self: HeldAnswers, request_id: str) -> None:
    """A client that leaves is not known to have left."""


def fits_always(*_facts: Any) -> bool:
    """A ticket is used whatever it is of."""
    return True


def take_for_whole(self: OffloadScheduler, *facts: Any, **more: Any) -> Match:
    """The block that a prompt ends in counts as a full one."""
    match = get_matched_tokens(self, *facts, **more)
    return match._replace(tokens=-(-match.tokens // SIZE) * SIZE)


def wait_for_all(self: WaitLimit, _now: float) -> End | None:
    """A prompt that another engine computes is waited for until it is there."""
    return End.WHOLE if self.num_there >= self.num_blocks else None


def wait_for_nobody(self: PrefillWaits, offload: RequestOffload, end: End) -> None:
    """As `hold_for_ever`, for one that waits for a prompt."""
    if end is not End.GONE:
        end_wait(self, offload, end)


def write_in_place(self: SharedTails, block: KVCacheBlock) -> bool:
    """The end of a prompt is overwritten under its key by the last request that holds it."""
    return block.ref_cnt - (block in self.sources) > 1


def keep_for_ever(self: KeptBlocks, request: Request) -> None:
    """The blocks of a session's part stay when the request that goes on in them has begun."""


def give_nothing_back(self: PromptSessions, session: PromptSession) -> None:
    """A session that ends keeps the blocks of its last part."""
    requests = [each for each in (session.before, session.asked) if each is not None]
    self.scheduler.finish_requests([each.request_id for each in requests])


def wait_for_parts(self: PromptSessions) -> list[TokenOutput]:
    """A session waits as long as its user likes."""
    return []


def keep_all_tokens(self: PromptSessions, session: PromptSession, num_kept: int) -> None:
    """What a user has changed in the middle of a prompt stands."""


schedule = Scheduler.schedule
release = HeldAnswers.release_answers
end_wait = PrefillWaits.end_wait
get_matched_tokens = OffloadScheduler.get_matched_tokens

# How many lives of the default seed a bug leaves alone. They show nothing and are not lived.
LIVES_LEFT_ALONE: dict[Callable[..., Any], int] = {write_in_place: 22, keep_all_tokens: 15}


@pytest.mark.parametrize(
    ("part", "name", "bug", "found"),
    [
        (Scheduler, "schedule", cache_too_early, "was given wrong bytes"),
        (Hierarchy, "lease", ask_nobody, "was released too early"),
        (HeldAnswers, "release_answers", release_what_is_given, "was released too early"),
        (HeldAnswers, "drop_answer", hold_for_ever, "that nobody waits for"),
        (request_builder, "fits", fits_always, "^r"),
        (OffloadScheduler, "get_matched_tokens", take_for_whole, ""),
        (WaitLimit, "decide_end", wait_for_all, "is awaited too long"),
        (PrefillWaits, "end_wait", wait_for_nobody, "awaits what nobody wants"),
        (SharedTails, "_is_shared", write_in_place, "a key is left of a block"),
        (KeptBlocks, "remove_heir", keep_for_ever, "kept for nobody"),
        (PromptSessions, "_give_up_requests", give_nothing_back, "kept for nobody"),
        (PromptSessions, "end_idle", wait_for_parts, "waits for ever"),
        (PromptSessions, "_restart", keep_all_tokens, "^r"),
    ],
)
def test_a_planted_bug_is_found(
    part: object,
    name: str,
    bug: Callable[..., Any],
    found: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part, name, bug)
    first = seed + LIVES_LEFT_ALONE.get(bug, 0)
    with pytest.raises(AssertionError, match=found or None):
        live_all(range(first, first + LIVES_TO_FIND))
