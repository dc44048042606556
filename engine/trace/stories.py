# SPDX-License-Identifier: Apache-2.0
"""Builds a `Story` for each traced request: its states, with their start and end times.

queued ──► waiting ──► loading ──► waiting ──► running ──► (preempted: waiting) ──► ended"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ..observer import Decision, Obstacle
from .records import (
    DecisionRecord,
    DroppedRecord,
    EventRecord,
    HitRecord,
    Record,
    SnapshotRecord,
    StartRecord,
)

# Obstacles of a single request, which other requests may overtake.
_STANDS_ASIDE = {
    each.value
    for each in (
        Obstacle.LOOKUP, Obstacle.WRITER, Obstacle.PREFILL, Obstacle.MASK, Obstacle.ADAPTERS,
    )
}  # fmt: skip


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


_ENTERS = {
    Decision.QUEUED.value: State.WAITING,
    Decision.WAITS.value: State.WAITING,
    Decision.LOADING.value: State.LOADING,
    Decision.LOADED.value: State.WAITING,
    Decision.SCHEDULED.value: State.RUNNING,
    Decision.RESUMED.value: State.RUNNING,
    Decision.PREEMPTED.value: State.WAITING,
}


class Span(NamedTuple):
    """A period in one state. `obstacle` is the reason for waiting ("": unknown). If a request ahead
    in the queue had the obstacle, `behind` is that request."""

    state: State
    began: float
    ended: float
    step: int  # the step in which the period began
    obstacle: str = ""
    behind: str = ""


@dataclass(slots=True)
class Story:
    """The history of one request since it was queued."""

    request_id: str
    queued: float
    queued_step: int
    num_prompt_tokens: int
    events: list[EventRecord] = field(default_factory=list)
    hits: list[HitRecord] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    num_computed_tokens: int = 0  # in all steps, including recomputed tokens
    num_steps: int = 0
    last: EventRecord | None = None  # None: the request has not ended

    @property
    def num_preemptions(self) -> int:
        return sum(event.event == Decision.PREEMPTED.value for event in self.events)

    def tokens_found(self) -> dict[str, int]:
        """Return the numbers of reused tokens by place (pool or tier), summed over all hits."""
        found: dict[str, int] = {}
        for hit in self.hits:
            for place, count in (("pool", hit.local_hit_tokens), *hit.tokens_by_tier.items()):
                if count:
                    found[place] = found.get(place, 0) + count
        return found

    def waits(self) -> dict[tuple[str, str], float]:
        """Return the seconds of waiting by (obstacle, id of its request; "": this request)."""
        seconds: dict[tuple[str, str], float] = {}
        for span in self.spans:
            if span.state is State.WAITING and span.ended > span.began:
                cause = span.obstacle, span.behind
                seconds[cause] = seconds.get(cause, 0.0) + span.ended - span.began
        return seconds

    def seconds_in(self, state: State) -> float:
        return sum(span.ended - span.began for span in self.spans if span.state is state)


class _Open(NamedTuple):
    """A state that has not ended yet."""

    state: State
    began: float
    step: int
    obstacle: str  # "": an earlier request in the queue had the obstacle


class Stories:
    """Builds the stories of requests from records, which must be added in order."""

    def __init__(self) -> None:
        self.open: dict[str, Story] = {}
        self.num_dropped = 0
        self._states: dict[str, _Open] = {}
        self._waiting: set[str] = set()  # waiting requests without their own obstacle
        self._blocker: tuple[str, str] = ("", "")  # (obstacle, request) of `_waiting`
        self._now = 0.0

    def add_record(self, record: Record) -> Story | None:
        """Add a record. Return the story of the request that finishes with this record, or None."""
        if isinstance(record, StartRecord):
            self.__init__()  # type: ignore[misc]  # a new run, of this engine or another one
        elif isinstance(record, EventRecord):
            self._now = record.time
            return self._take_event(record)
        elif isinstance(record, HitRecord):
            self._now = record.time
            if record.req_id in self.open:
                self.open[record.req_id].hits.append(record)
        elif isinstance(record, DecisionRecord):
            self._now = record.time
            for request_id, count in record.num_scheduled_tokens.items():
                if (story := self.open.get(request_id)) is not None:
                    story.num_computed_tokens += count
                    story.num_steps += 1
        elif isinstance(record, SnapshotRecord):
            self._now = record.time
        elif isinstance(record, DroppedRecord):
            self.num_dropped += record.count
        return None

    def close(self) -> list[Story]:
        """Return the stories of unfinished requests; their last spans end at the last record."""
        for request_id, story in self.open.items():
            self._leave(story, self._states.pop(request_id), self._now)
        return list(self.open.values())

    def _take_event(self, event: EventRecord) -> Story | None:
        request_id = event.req_id
        if event.event == Decision.QUEUED.value:
            self.open[request_id] = Story(request_id, event.time, event.step, event.num_tokens)
        story = self.open.get(request_id)
        if story is None:
            return None  # the request was queued before the first record
        story.events.append(event)
        if event.event == Decision.LOAD_GIVEN_UP.value:
            return None  # the request waits for the same obstacle as before
        before = self._states.pop(request_id, None)
        if before is not None:
            self._leave(story, before, event.time)
        is_over = event.event == Decision.FINISHED.value
        obstacle = event.cause if event.event == Decision.WAITS.value else ""
        self._waiting.discard(request_id)
        if obstacle and obstacle not in _STANDS_ASIDE:
            self._set_blocker((obstacle, request_id), event.time)
        elif self._blocker[1] == request_id:
            self._set_blocker(("", ""), event.time)
        if is_over:
            story.last = event
            return self.open.pop(request_id)
        state = _ENTERS[event.event]
        self._states[request_id] = _Open(state, event.time, event.step, obstacle)
        if state is State.WAITING and not obstacle:
            self._waiting.add(request_id)
        return None

    def _set_blocker(self, blocker: tuple[str, str], now: float) -> None:
        """Set the obstacle and the request that has it, for which the other waiting requests wait.
        The current spans of these requests end at `now`, with the previous obstacle."""
        if blocker == self._blocker:
            return
        for request_id in self._waiting:
            state = self._states[request_id]
            self._leave(self.open[request_id], state, now)
            self._states[request_id] = state._replace(began=now)
        self._blocker = blocker

    def _leave(self, story: Story, state: _Open, now: float) -> None:
        obstacle, behind = state.obstacle, ""
        if state.state is State.WAITING and not obstacle:
            obstacle, behind = self._blocker
        story.spans.append(Span(state.state, state.began, now, state.step, obstacle, behind))


def last_run(records: Iterable[Record]) -> list[Record]:
    """Return the records of the last run in a file, beginning with its start record."""
    found: list[Record] = []
    for record in records:
        if isinstance(record, StartRecord):
            found = []
        found.append(record)
    return found


def stories_of(records: Iterable[Record]) -> Iterator[Story]:
    """Yield the stories of finished requests in the order of their ends, then all other stories."""
    stories = Stories()
    for record in records:
        if (ended := stories.add_record(record)) is not None:
            yield ended
    yield from stories.close()
