# SPDX-License-Identifier: Apache-2.0
"""An observer that writes everything down, to be compared with what the engine knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from stratakv.engine.observer import Decision, Observer, StepMade, StepSnapshot
from stratakv.engine.request.request import Request
from stratakv.engine.scheduler.scheduler import Scheduler


class Recorder(Observer):
    """Keys of the pool, each request's story, and every step."""

    def __init__(self, block_size: int = 4) -> None:
        self._block_size = block_size
        self.cached: dict[bytes, tuple[int, ...]] = {}  # key -> all tokens up to the block's end
        # By request, since an id may come back; the request is kept, so that its number is its own.
        self.stories: dict[int, list[Decision]] = {}
        self.reused: Counter[str] = Counter()
        self.steps: list[StepSnapshot] = []
        self.num_tokens = 0
        self._requests: list[Request] = []

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        if id(request) not in self.stories:
            self._requests.append(request)
        self.stories.setdefault(id(request), []).append(decision)

    def hit(self, request: Request, tokens: Mapping[str, int]) -> None:
        self.reused.update(tokens)

    def named(self, request: Request, group: int, first: int, block_ids: Sequence[int]) -> None:
        for index in range(first, first + len(block_ids)):
            key = request.block_hashes[index] + group.to_bytes(2, "little")
            tokens = request.all_token_ids[: (index + 1) * self._block_size]
            self.cached[key] = tuple(tokens.tolist())

    def unnamed(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.cached[key]

    def snapshot(self, snapshot: StepSnapshot) -> None:
        self.steps.append(snapshot)

    def step(self, made: StepMade) -> None:
        assert self.steps[-1].step_id == made.step_id
        self.num_tokens += sum(made.num_tokens.values())

    def check_keys(self, scheduler: Scheduler) -> None:
        """The pool's keys, at any moment."""
        assert self.cached.keys() == set(scheduler.manager.pool.list_keys())

    def check_all_ended(self, scheduler: Scheduler) -> None:
        """Every request has ended once, every step was made once, and the engine's counts agree."""
        counts = scheduler.counts
        for source, tokens in self.reused.items():
            assert counts[f"reused_tokens_{source}"] == tokens
        told = Counter(decision for story in self.stories.values() for decision in story)
        assert told[Decision.PREEMPTED] == counts["preemptions"]
        assert told[Decision.LOADING] == counts["loads"] + counts["meetings"]
        assert told[Decision.LOAD_GIVEN_UP] == counts["loads_given_up"]
        for story in self.stories.values():
            assert story[0] is Decision.QUEUED
            assert story[-1] is Decision.FINISHED
            assert story.count(Decision.QUEUED) == story.count(Decision.FINISHED) == 1
            assert story.count(Decision.SCHEDULED) <= 1
            assert story.count(Decision.RESUMED) <= story.count(Decision.PREEMPTED)
        made = [step.step_id for step in self.steps]
        assert made == sorted(set(made))
        assert len(made) == counts["steps"]
        assert self.num_tokens == counts["scheduled_tokens"]
