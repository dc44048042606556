# SPDX-License-Identifier: Apache-2.0
"""The worker process's loop, over its socket, with a runner whose device takes its time."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from socket import socketpair
from typing import Any

import pytest
import zmq

from stratakv.engine.core.worker_process.worker_messages import (
    Begin,
    Call,
    Done,
    Failed,
    Returned,
    Sample,
    Stop,
    WorkerStart,
    decode_from_worker,
    encode,
)
from stratakv.engine.core.worker_process.worker_process import WorkerServer
from stratakv.engine.scheduler.output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from stratakv.engine.worker.begun_step import BegunStep

from .conftest import config_of

WAIT_MILLISECONDS = 30_000


class SlowRunner:
    """Notes what is asked of it; steps are done when the test says so."""

    def __init__(self) -> None:
        self.seen: deque[tuple[str, int]] = deque()
        self.done = threading.Event()
        self.pool = type("Pool", (), {"num_blocks": 9})
        self.max_model_len = 99

    def enter_thread(self) -> None:
        pass

    def launch_step(self, output: SchedulerOutput) -> BegunStep:
        self.seen.append(("begin", output.step_id))
        if output.step_id == 13:
            raise MemoryError("no more memory")
        return BegunStep(output, ModelRunnerOutput({}))

    def sample(self, step: BegunStep, mask: Any = None) -> None:
        self.seen.append(("sample", step.output.step_id))

    def is_done(self, step: BegunStep) -> bool:
        return self.done.is_set()

    def collect_output(self, step: BegunStep) -> ModelRunnerOutput:
        self.seen.append(("collect", step.output.step_id))
        return step.result

    def poll_copies(self) -> None:
        self.seen.append(("poll", 0))


def step(step_id: int) -> Begin:
    output = SchedulerOutput([], CachedRequestData(), {}, 0, set(), set(), step_id=step_id)
    return Begin(output)


@pytest.fixture
def worker(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    runner = SlowRunner()
    monkeypatch.setattr(WorkerServer, "_load_model_runner", lambda self: runner)
    endpoint = f"ipc://{tmp_path}/worker"
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint)
    ours, theirs = socketpair()
    start = WorkerStart(config_of(tiny_model), endpoint, 9, 99, "ERROR", reads_fd=theirs.detach())
    thread = threading.Thread(target=lambda: WorkerServer(start).run())
    thread.start()

    def receive() -> Any:
        assert socket.poll(WAIT_MILLISECONDS)
        return decode_from_worker(socket.recv())

    receive()  # it is up
    yield runner, lambda message: socket.send(encode(message)), receive
    runner.done.set()
    socket.send(encode(Stop()))
    thread.join()
    socket.close()
    context.term()
    ours.close()


def test_the_next_step_begins_before_the_device_is_done(worker: Any) -> None:
    runner, send, receive = worker
    send(step(1))
    send(Sample())
    send(step(2))
    assert receive() == Done(1, ModelRunnerOutput({}))
    assert [*runner.seen] == [("begin", 1), ("sample", 1), ("begin", 2), ("collect", 1)]
    send(Sample())
    runner.done.set()
    assert receive() == Done(2, ModelRunnerOutput({}))
    assert [*runner.seen][4:] == [("sample", 2), ("collect", 2)]


def test_a_step_without_another_behind_it_is_answered_when_it_is_done(worker: Any) -> None:
    runner, send, receive = worker
    send(step(1))
    send(Sample())
    runner.done.set()
    assert receive() == Done(1, ModelRunnerOutput({}))


def test_a_call_comes_after_the_step_before_it(worker: Any) -> None:
    runner, send, receive = worker
    send(step(1))
    send(Sample())
    send(Call("poll_copies", None, None))
    assert receive() == Done(1, ModelRunnerOutput({}))
    assert receive() == Returned(None)
    assert [*runner.seen][2:] == [("collect", 1), ("poll", 0)]


def test_a_step_that_cannot_begin_is_answered_in_its_turn(worker: Any) -> None:
    _, send, receive = worker
    send(step(12))
    send(Sample())
    send(step(13))
    send(Sample())
    assert receive() == Done(12, ModelRunnerOutput({}))
    answer = receive()
    assert isinstance(answer, Failed)
    assert (answer.step_id, answer.error) == (13, "MemoryError: no more memory")
