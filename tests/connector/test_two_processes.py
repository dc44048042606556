# SPDX-License-Identifier: Apache-2.0
"""The worker side in a process of its own: it gets a description, the slab's file descriptor, and a
pipe for its wake-ups, and nothing else that the scheduler side has."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import pytest
import torch

from stratakv.connector.build import (
    WorkerDescription,
    build_scheduler_side,
    build_worker_side,
)
from stratakv.connector.messages import ConnectorMetadata, ConnectorWorkerOutput, EvictedBlock
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.tier_settings import CpuSettings, SsdSettings, TierSettings

from ..nursery_site.nursery_client import popen

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
NUM_BLOCKS = 8
WAIT_SECONDS = 30.0
ROOT = Path(__file__).resolve().parents[2]


def pool() -> torch.Tensor:
    """The pool as it is at first, in both processes."""
    made = torch.arange(NUM_BLOCKS * LAYOUT.page_bytes // 4, dtype=torch.float32)
    return made.reshape(NUM_BLOCKS, 1, 2, 4, 1, 8)


class Start(msgspec.Struct):
    description: WorkerDescription
    wake_fd: int


class Call(msgspec.Struct):
    name: str
    meta: ConnectorMetadata | None = None
    row: int = 0


class Answer(msgspec.Struct):
    output: ConnectorWorkerOutput | None = None
    row: bytes = b""


Message = TypeVar("Message", bound=msgspec.Struct)


def say(stream: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def hear(stream: BinaryIO, kind: type[Message]) -> Message:
    (size,) = struct.unpack("<I", stream.read(4))
    return msgspec.msgpack.decode(stream.read(size), type=kind)


class RemoteWorker:
    """The worker side, spoken to in plain messages over pipes. Its wake-ups come as numbers."""

    def __init__(self, description: Any, note_ended: Any) -> None:
        read_end, write_end = os.pipe()
        code = "from tests.connector.test_two_processes import serve; serve()"
        self.process = popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[description.slab_fd, write_end],
            cwd=ROOT,
        )
        os.close(write_end)
        assert self.process.stdin is not None
        say(self.process.stdin, Start(description, write_end))
        self._reader = threading.Thread(target=self._listen, args=(read_end, note_ended))
        self._reader.start()

    def call(self, name: str, meta: ConnectorMetadata | None = None, row: int = 0) -> Answer:
        assert self.process.stdin is not None and self.process.stdout is not None
        say(self.process.stdin, Call(name, meta, row))
        return hear(self.process.stdout, Answer)

    def end(self) -> None:
        self.call("shutdown")
        assert self.process.wait(WAIT_SECONDS) == 0
        self._reader.join(WAIT_SECONDS)
        assert not self._reader.is_alive()

    def _listen(self, fd: int, note_ended: Any) -> None:
        with os.fdopen(fd, "rb") as pipe:
            while number := pipe.read(4):
                note_ended(struct.unpack("<I", number)[0])


def serve() -> None:
    """The other process."""
    start = hear(sys.stdin.buffer, Start)

    def wake(number: int) -> None:
        os.write(start.wake_fd, struct.pack("<I", number))

    worker = build_worker_side(start.description, wake)
    memory = pool()
    worker.register_pool(memory)
    name = ""
    while name != "shutdown":
        call = hear(sys.stdin.buffer, Call)
        name, answer = call.name, Answer()
        if name == "row":
            answer.row = memory[call.row].numpy().tobytes()
        elif name == "wipe":
            memory.zero_()
        elif name == "poll":
            answer.output = worker.poll()
        elif call.meta is not None:
            worker.start_step(call.meta)
        else:
            getattr(worker, name)()
        say(sys.stdout.buffer, answer)


class FakeRequest:
    def __init__(self, hashes: list[bytes]) -> None:
        self.request_id = "r"
        self.block_hashes = hashes
        self.tail_hash = None
        self.num_tokens = LAYOUT.block_size * len(hashes) + 1


@pytest.mark.parametrize("with_ssd", [False, True])
def test_blocks_go_out_and_come_back(with_ssd: bool, tmp_path: Path) -> None:
    side, description, _ = build_scheduler_side(
        LAYOUT,
        TierSettings(
            cpu=CpuSettings(capacity_bytes=16 * LAYOUT.slot_bytes, populate_threads=1),
            ssd=SsdSettings(path=tmp_path if with_ssd else None, capacity_bytes=16 * 1024**2),
        ),
        namespace=b"test",
    )
    assert description.makes_digests == with_ssd
    woken = threading.Event()
    side.set_wakeup(woken.set)
    worker = RemoteWorker(description, side.note_ended)
    hashes = [bytes([number]) * 32 for number in range(4)]

    def step(evicted: list[EvictedBlock]) -> Any:
        worker.call("start_step", side.build_meta(evicted))
        worker.call("wait_before_forward")
        output = worker.call("poll").output
        assert output is not None
        return side.update_from_worker(output)

    def wait() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not side.has_pending_work():
            assert woken.wait(deadline - time.monotonic()), "no wake-up came"
            woken.clear()

    step([EvictedBlock(number, hashes[number] + b"\0\0") for number in range(4)])
    while side.stats()["stores_in_flight"]:
        wait()
        assert step([]) == []
    worker.call("wipe")
    asks = FakeRequest(hashes)
    match = side.get_matched_tokens(asks, 0)
    assert match.tokens == 16
    side.begin_load(asks, [[7, 6, 5, 4]], 16, overlapped=False)
    while not (reports := step([])):
        wait()
    assert reports[0].num_loaded_tokens == 16
    before = pool()
    for number in range(4):
        assert worker.call("row", row=7 - number).row == before[number].numpy().tobytes()
    assert worker.call("row", row=0).row == bytes(LAYOUT.page_bytes)
    worker.end()
    assert not side.has_pending_work()
    side.shutdown(WAIT_SECONDS)
