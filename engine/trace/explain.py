# SPDX-License-Identifier: Apache-2.0
"""Explains why a traced request waited and was preempted, and which tokens it reused."""

from __future__ import annotations

from ..observer import Decision, Obstacle
from .stories import State, Story

_OBSTACLES = {
    Obstacle.SEATS.value: "as many requests ran as may (--max-num-seqs)",
    Obstacle.BUDGET.value: "the tokens of the steps were used up (--max-num-batched-tokens)",
    Obstacle.ADAPTERS.value: "as many different adapters ran as may (--max-loras)",
    Obstacle.PRESSURE.value: "running requests held too much of the KV pool (--admit-below)",
    Obstacle.PROMPT_ROOM.value: "its whole prompt would have driven a running request out of the "
    "KV pool (--preempt-above)",
    Obstacle.RESERVATION.value: "what others may still take of the KV pool left no room "
    "for all that it has to have reserved (--reserve)",
    Obstacle.ROOM.value: "the KV pool had no free blocks to compute in",
    Obstacle.LOAD_ROOM.value: "the KV pool had no free blocks to load into",
    Obstacle.LOOKUP.value: "a tier had not answered yet",
    Obstacle.WRITER.value: "blocks that it shares with another request were being computed",
    Obstacle.PREFILL.value: "another engine computes its prompt",
    Obstacle.MASK.value: "which tokens its grammar allows next was being found out",
}
_ENDS = {
    "stop": "it stopped by itself",
    "length": "it had as many tokens as it may have",
    "abort": "its client left, or the engine shut down",
    "error": "it failed",
    "repetition": "it had begun to repeat itself",
}


def explain(story: Story) -> list[str]:
    """Return the lines for one request: first a summary, then its events with their times."""
    lines = [
        f"{story.request_id}: {story.num_prompt_tokens} prompt tokens, queued "
        f"{story.queued:.3f} s after the start of the trace, after step {story.queued_step}."
    ]
    lines += _waits(story)
    lines += _tokens(story)
    lines += _preemptions(story)
    lines.append(_end(story))
    lines.append("")
    lines += [_event_line(story, index) for index in range(len(story.events))]
    return lines


def _waits(story: Story) -> list[str]:
    lines = []
    waits = sorted(story.waits().items(), key=lambda item: -item[1])
    total = sum(seconds for _, seconds in waits)
    if waits:
        lines.append(f"It waited {total:.3f} s for its turn:")
    for (obstacle, behind), seconds in waits:
        why = _OBSTACLES.get(obstacle, "the next step was still to be made")
        whose = f"{behind} was before it, and " if behind else ""
        lines.append(f"  {seconds:.3f} s: {whose}{why}.")
    loading = story.seconds_in(State.LOADING)
    if loading:
        lines.append(f"It waited {loading:.3f} s for blocks to be loaded.")
    return lines


def _tokens(story: Story) -> list[str]:
    found = story.tokens_found()
    places = ", ".join(f"{count} in the {_place(place)}" for place, count in found.items())
    lines = [f"It found {places}." if places else "It found none of its tokens."]
    lines.append(f"It computed {story.num_computed_tokens} tokens in {story.num_steps} steps.")
    return lines


def _preemptions(story: Story) -> list[str]:
    return [
        f"It was preempted in step {event.step}: {_taker(event.cause)}."
        for event in story.events
        if event.event == Decision.PREEMPTED.value
    ]


def _end(story: Story) -> str:
    if story.last is None:
        return "It had not ended where the trace ends."
    last = story.last
    reason = _ENDS.get(last.cause, last.cause)
    num_output = last.num_tokens - story.num_prompt_tokens
    return (
        f"It ended {last.time - story.queued:.3f} s after it was queued, with {num_output} tokens: "
        f"{reason}."
    )


def _event_line(story: Story, index: int) -> str:
    event = story.events[index]
    what = event.event
    if what == Decision.WAITS.value:
        what += f": {_OBSTACLES.get(event.cause, event.cause)}"
    elif what == Decision.PREEMPTED.value:
        what += f": {_taker(event.cause)}"
    elif event.cause:
        what += f": {event.cause}"
    return f"  +{event.time - story.queued:9.3f} s  step {event.step:>7}  {what}"


def _taker(request_id: str) -> str:
    if request_id:
        return f"{request_id} took its room"
    return "running requests held too much of the KV pool (--preempt-above)"


def _place(name: str) -> str:
    return "KV pool" if name == "pool" else f"{name} tier"
