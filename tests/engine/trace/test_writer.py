# SPDX-License-Identifier: Apache-2.0
"""The trace's file: whole lines, bounded, and no harm to an engine where it cannot be written."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from stratakv.engine.trace import trace_writer as writer_module
from stratakv.engine.trace.records import (
    VERSION,
    DroppedRecord,
    EventRecord,
    StartRecord,
    read_records,
)
from stratakv.engine.trace.trace_writer import TraceWriter
from stratakv.tiers.settings.values import ConfigError

START = StartRecord(VERSION, "2026-11-24T10:00:00.000+00:00", "model", 16, 100, "none")


def event(number: int) -> EventRecord:
    return EventRecord(number, number / 10, f"r{number}", "queued")


def test_what_is_written_is_read_again_run_after_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    events = [event(number) for number in range(3000)]  # more than one write takes
    for _ in range(2):
        writer = TraceWriter(path)
        for record in (START, *events):
            writer.put(record)
        writer.close()
        writer.close()
    assert list(read_records(path)) == [START, *events] * 2


def test_a_writer_that_has_slept_is_woken(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    writer.put(START)
    while not writer._sleeps:
        writer._thread.join(0.01)
    writer.put(event(1))
    while path.read_bytes().count(b"\n") < 2:
        writer._thread.join(0.01)
    writer.close()


def test_records_beyond_the_bound_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    goes_on = threading.Event()
    write_whole = writer_module._write_whole

    async def slow(file: object, data: bytes) -> None:
        while not goes_on.is_set():
            await writer_module.asyncio.sleep(0.001)
        await write_whole(file, data)  # type: ignore[arg-type]

    monkeypatch.setattr(writer_module, "_write_whole", slow)
    writer = TraceWriter(path, most_queued=4)
    writer.put(START)
    while writer._queue:
        writer._thread.join(0.001)
    for number in range(9):
        writer.put(event(number))
    goes_on.set()
    writer.close()
    assert list(read_records(path)) == [START, *map(event, range(4)), DroppedRecord(5)]


def test_a_full_disk_ends_the_trace_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        writer = TraceWriter(Path("/dev/full"))
        writer.put(START)
        writer._thread.join(60)
        assert not writer._thread.is_alive()
        for number in range(10):
            writer.put(event(number))
        writer.close()
    assert caplog.text.count("ends here") == 1
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert not writer._queue


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step-trace .* No such file or directory"):
        TraceWriter(tmp_path / "none" / "trace.jsonl")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense\n", "line 1 .* is no record"),
        ('{"record":"event","step":1,"time":0,"req_id":"a","event":"queued"}\n', "start record"),
        ('{"record":"start","version":99,"started":"","model":"","block_size":1,'
         '"num_gpu_blocks":1,"connector_name":""}\n', "version 99, and 1 is read"),
    ],
)  # fmt: skip
def test_other_files_are_refused_with_their_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        list(read_records(path))


def test_a_line_that_was_cut_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(path)
    for record in (START, event(1), event(2)):
        writer.put(record)
    writer.close()
    path.write_bytes(path.read_bytes()[:-10])
    assert list(read_records(path)) == [START, event(1)]
