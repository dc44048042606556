# SPDX-License-Identifier: Apache-2.0
"""The records of a step trace file, which has one JSON object per line.

    start       an engine has begun to write; the following records belong to this engine
    snapshot    the engine will now schedule step `step`
    hit         tokens that a request of the step need not compute
    event       a change of a request's state, with the cause
    decision    the step is scheduled
    dropped     the number of records lost here, because writing was too slow

Steps are numbered. All records between a snapshot and its decision have the number of their step;
events between two steps have the earlier step's number. `time` is seconds since the start record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...tiers.settings.values import ConfigError

VERSION = 1
MAX_LINE_BYTES = 1 << 24


class StartRecord(msgspec.Struct, tag_field="record", tag="start", frozen=True, gc=False):
    """The start of an engine. `started` is the time of day (ISO 8601), for information only."""

    version: int
    started: str
    model: str
    block_size: int
    num_gpu_blocks: int
    connector_name: str


class SnapshotRecord(msgspec.Struct, tag_field="record", tag="snapshot", frozen=True, gc=False):
    """The state of an engine just before a step. Counts of CPU blocks are counts of the CPU tier,
    or None without that tier. Cached blocks can be found by hash; some are free."""

    step: int
    time: float
    running: int
    waiting: int  # including requests with loads under way
    gpu_blocks_free: int
    gpu_blocks_total: int
    gpu_blocks_cached: int
    cpu_blocks_free: int | None
    cpu_blocks_total: int | None
    cpu_blocks_cached: int | None
    num_pinned: int  # pinned turns of jobs
    pinned_blocks: int
    pinned_job_ids: tuple[str, ...]
    max_num_running_reqs: int
    max_num_scheduled_tokens: int


class HitRecord(msgspec.Struct, tag_field="record", tag="hit", frozen=True, gc=False):
    """The cached tokens that a request need not compute. Another hit is recorded when the request
    resumes after a preemption, and when an overlapped load has ended."""

    step: int
    time: float
    req_id: str
    job_id: str  # "": not a turn of a job
    local_hit_tokens: int  # in the KV pool
    external_hit_tokens: int  # loaded from a tier
    tokens_by_tier: dict[str, int]  # the tokens of `external_hit_tokens`
    total_prompt_tokens: int
    num_tokens: int  # prompt and output so far
    connector_name: str
    load_kv_async: bool  # whether blocks are loaded; a load never delays a step


class EventRecord(msgspec.Struct, tag_field="record", tag="event", frozen=True, gc=False):
    """A change of a request's state. `event` is a value of `Decision`; `cause` is as in
    `Observer.decision`. Waiting is recorded when it begins and when its cause changes."""

    step: int
    time: float
    req_id: str
    event: str
    cause: str = ""
    num_tokens: int = 0  # prompt and output so far
    num_computed_tokens: int = 0


class DecisionRecord(msgspec.Struct, tag_field="record", tag="decision", frozen=True, gc=False):
    """A scheduled step. `num_scheduled_tokens` has the number of tokens for each request."""

    step: int
    time: float
    scheduled_new_ids: list[str]
    scheduled_resumed_ids: list[str]
    scheduled_running_ids: list[str]
    preempted_ids: list[str]
    num_scheduled_tokens: dict[str, int]
    total_scheduled_tokens: int


class EncodedDecision(msgspec.Struct, tag_field="record", tag="decision", frozen=True, gc=False):
    """A `DecisionRecord` for writing only; its long fields are already encoded as JSON."""

    step: int
    time: float
    scheduled_new_ids: Sequence[str]
    scheduled_resumed_ids: Sequence[str]
    scheduled_running_ids: msgspec.Raw
    preempted_ids: Sequence[str]
    num_scheduled_tokens: msgspec.Raw
    total_scheduled_tokens: int


class DroppedRecord(msgspec.Struct, tag_field="record", tag="dropped", frozen=True, gc=False):
    """The number of records that were lost before the next record."""

    count: int


Record = (
    StartRecord | SnapshotRecord | HitRecord | EventRecord | DecisionRecord | DroppedRecord
)  # fmt: skip

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file in order, without an incomplete last line. Raise ConfigError if
    the file cannot be read or a line is not a record of a trace."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if not line.endswith(b"\n"):
                    if len(line) == MAX_LINE_BYTES:
                        raise _no_trace(path, number, f"it is longer than {MAX_LINE_BYTES} bytes")
                    return
                try:
                    record = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise _no_trace(path, number, str(error)) from error
                if isinstance(record, StartRecord):
                    if record.version != VERSION:
                        raise _no_trace(
                            path, number, f"it has version {record.version}, and {VERSION} is read"
                        )
                elif number == 1:
                    raise _no_trace(path, number, "a trace begins with a start record")
                yield record
    except OSError as error:
        raise ConfigError(f"the step trace {path} cannot be read: {error.strerror}") from error


def _no_trace(path: Path, number: int, reason: str) -> ConfigError:
    return ConfigError(
        f"line {number} of {path} is no record of a step trace ({reason}); give the file that "
        "--step-trace wrote"
    )
