# SPDX-License-Identifier: Apache-2.0
"""Writes a step trace as a timeline of JSON trace events, which Perfetto and Chromium open.

Each request has a track with its states, the steps share a track, and counters show blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import IO, Any

from .records import DecisionRecord, Record, SnapshotRecord
from .stories import Stories, Story

_STEPS = 1  # the track of the steps; the tracks of requests follow
_PROCESS = 1


def write_timeline(records: Iterable[Record], file: IO[str]) -> int:
    """Write the events of one run to a text file, and return the number of events."""
    count = 0

    def write(event: dict[str, Any]) -> None:
        nonlocal count
        file.write(",\n" if count else "[\n")
        json.dump({"pid": _PROCESS, **event}, file, separators=(",", ":"))
        count += 1

    write({"ph": "M", "name": "process_name", "args": {"name": "stratakv"}})
    write({"ph": "M", "tid": _STEPS, "name": "thread_name", "args": {"name": "steps"}})
    stories, began, track = Stories(), 0.0, _STEPS
    for record in records:
        if isinstance(record, SnapshotRecord):
            began = record.time
            _write_counters(record, write)
        elif isinstance(record, DecisionRecord):
            write(
                {
                    "ph": "X", "tid": _STEPS, "name": f"step {record.step}",
                    "ts": _micros(began), "dur": _micros(record.time - began),
                    "args": {
                        "tokens": record.total_scheduled_tokens,
                        "requests": len(record.num_scheduled_tokens),
                        "preempted": record.preempted_ids,
                    },
                }
            )  # fmt: skip
        if (story := stories.add_record(record)) is not None:
            track += 1
            _write_story(story, track, write)
    for story in stories.close():
        track += 1
        _write_story(story, track, write)
    file.write("\n]\n")
    return count


def _write_counters(record: SnapshotRecord, write: Any) -> None:
    counters = {
        "requests": {"running": record.running, "waiting": record.waiting},
        "KV pool blocks": {
            "held": record.gpu_blocks_total - record.gpu_blocks_free,
            "free": record.gpu_blocks_free,
        },
    }
    if record.cpu_blocks_total is not None and record.cpu_blocks_cached is not None:
        counters["CPU tier blocks"] = {"used": record.cpu_blocks_cached}
    for name, values in counters.items():
        write({"ph": "C", "name": name, "ts": _micros(record.time), "args": values})


def _write_story(story: Story, track: int, write: Any) -> None:
    write({"ph": "M", "tid": track, "name": "thread_name", "args": {"name": story.request_id}})
    for span in story.spans:
        write(
            {
                "ph": "X", "tid": track, "name": span.state.value,
                "ts": _micros(span.began), "dur": _micros(span.ended - span.began),
                "args": {"step": span.step, "obstacle": span.obstacle, "behind": span.behind},
            }
        )  # fmt: skip
    for hit in story.hits:
        write(
            {
                "ph": "i", "s": "t", "tid": track, "name": "hit", "ts": _micros(hit.time),
                "args": {"pool": hit.local_hit_tokens, **hit.tokens_by_tier},
            }
        )  # fmt: skip


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
