# SPDX-License-Identifier: Apache-2.0
"""The worker side in a process of its own: it gets a description, the slab's file descriptor, and a
pipe for its wake-ups, and nothing else that the scheduler side has."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.connector.base import EvictedBlock
from stratakv.connector.build import OffloadSettings, build_scheduler_side, build_worker_side
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.tier_settings import CpuSettings, SsdSettings

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
NUM_BLOCKS = 8
WAIT_SECONDS = 30.0
ROOT = Path(__file__).resolve().parents[2]


def pool() -> torch.Tensor:
    """The pool as it is at first, in both processes."""
    made = torch.arange(NUM_BLOCKS * LAYOUT.page_bytes // 4, dtype=torch.float32)
    return made.reshape(NUM_BLOCKS, 1, 2, 4, 1, 8)


class RemoteWorker:
    """The worker side, spoken to in pickles over pipes. Its wake-ups come as numbers."""

    def __init__(self, description: Any, note_ended: Any) -> None:
        read_end, write_end = os.pipe()
        code = "from tests.connector.test_two_processes import serve; serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[description.slab_fd, write_end],
            cwd=ROOT,
        )
        os.close(write_end)
        self._say((description, write_end))
        self._reader = threading.Thread(target=self._listen, args=(read_end, note_ended))
        self._reader.start()

    def call(self, name: str, *arguments: Any) -> Any:
        self._say((name, arguments))
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def end(self) -> None:
        self.call("shutdown")
        assert self.process.wait(WAIT_SECONDS) == 0
        self._reader.join(WAIT_SECONDS)
        assert not self._reader.is_alive()

    def _say(self, message: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()

    def _listen(self, fd: int, note_ended: Any) -> None:
        with os.fdopen(fd, "rb") as pipe:
            while number := pipe.read(4):
                note_ended(struct.unpack("<I", number)[0])


def serve() -> None:
    """The other process."""
    description, wake_fd = pickle.load(sys.stdin.buffer)
    worker = build_worker_side(
        description, lambda number: (os.write(wake_fd, struct.pack("<I", number)), None)[1]
    )
    memory = pool()
    worker.register_pool(memory)
    while True:
        name, arguments = pickle.load(sys.stdin.buffer)
        if name == "row":
            answer = memory[arguments[0]].numpy().tobytes()
        elif name == "wipe":
            answer = memory.zero_() is None
        else:
            answer = getattr(worker, name)(*arguments)
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        if name == "shutdown":
            return


class FakeRequest:
    def __init__(self, names: list[bytes]) -> None:
        self.request_id = "r"
        self.block_hashes = names
        self.num_tokens = LAYOUT.block_size * len(names) + 1


@pytest.mark.parametrize("with_ssd", [False, True])
def test_blocks_go_out_and_come_back(with_ssd: bool, tmp_path: Path) -> None:
    side, description = build_scheduler_side(
        LAYOUT,
        OffloadSettings(
            cpu=CpuSettings(capacity_bytes=16 * LAYOUT.slot_bytes, populate_threads=1),
            ssd=SsdSettings(path=tmp_path, capacity_bytes=16 * 1024**2) if with_ssd else None,
        ),
        namespace=b"test",
    )
    assert pickle.loads(pickle.dumps(description)) == description, "it is plain"
    assert description.makes_digests == with_ssd
    woken = threading.Event()
    side.set_wakeup(woken.set)
    worker = RemoteWorker(description, side.note_ended)
    names = [bytes([number]) * 32 for number in range(4)]

    def step(evicted: list[EvictedBlock]) -> Any:
        worker.call("start_step", side.build_meta(evicted))
        worker.call("wait_before_forward")
        return side.update_from_worker(worker.call("poll"))

    def wait() -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not side.has_pending_work():
            assert woken.wait(deadline - time.monotonic()), "no wake-up came"
            woken.clear()

    step([EvictedBlock(number, names[number] + b"\0\0") for number in range(4)])
    while side.stats()["stores_in_flight"]:
        wait()
        assert step([]) == []
    worker.call("wipe")
    asks = FakeRequest(names)
    match = side.get_matched_tokens(asks, 0)
    assert match.tokens == 16
    side.begin_load(asks, [[7, 6, 5, 4]], 16, overlapped=False)
    while not (reports := step([])):
        wait()
    assert reports[0].num_loaded_tokens == 16
    before = pool()
    for number in range(4):
        assert worker.call("row", 7 - number) == before[number].numpy().tobytes()
    assert worker.call("row", 0) == bytes(LAYOUT.page_bytes)
    worker.end()
    assert not side.has_pending_work()
    side.shutdown(WAIT_SECONDS)
