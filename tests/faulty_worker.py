# SPDX-License-Identifier: Apache-2.0
"""A worker's process that goes wrong: its model and its copies at random, its answers once.

It is the product's `WorkerServer`, which also answers two calls of tests: `arm` (from now on the
model may fail) and `look` (what it holds, written to a file).
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from stratakv.connector.device import cpu as cpu_device
from stratakv.engine.core.worker_process import worker_process
from stratakv.engine.core.worker_process.worker_messages import (
    Begin,
    Call,
    Done,
    Failed,
    FromWorker,
    Returned,
    Sample,
    Up,
    WorkerStart,
)
from stratakv.engine.scheduler.output import ModelRunnerOutput
from stratakv.engine.worker.adapter_slots import ReadAdapter

from .faulty_parts import Mischief, faulty_copies, faulty_forward
from .leftovers import RunnerLook, look_at_runner
from .threads import WAIT_SECONDS

EXIT_STATUS = 7
# What a worker does once, and what is said of it then; see `_lie`.
LIES = {
    "dies at once": "ended with exit status -9",
    "dies instead of answering": "ended with exit status -9",
    "dies after answering": "ended with exit status -9",
    "exits": f"ended with exit status {EXIT_STATUS}",
    "is late": "did not answer within",
    "answers another step": "answered step",
    "fails another step": "answered step",
    "answers twice": "answered step",
    "says nonsense": "its answer cannot be read",
    "begins anew": "said Up, which was not asked for",
    "loses its device": "its device is lost",
}
# Of a step, where the others also befall the answer to a call.
LIES_OF_STEPS = ("answers another step", "fails another step", "answers twice", "loses its device")


class Plan(msgspec.Struct):
    """What is to go wrong in a worker."""

    look_path: str
    seed: int = 0
    rates: dict[str, float] = {}
    lie: str = ""  # one of LIES, or none
    lie_at: int = 0  # the number of the answer that it befalls
    late_seconds: float = 0.0
    reads_wait_for: str = ""  # a file that an adapter's read waits for; empty: no wait


class FaultyServer(worker_process.WorkerServer):
    """The product's, but for what is planned."""

    def __init__(self, start: WorkerStart, plan: Plan) -> None:
        super().__init__(start)
        self._plan = plan
        self._mischief = Mischief(plan.seed, plan.rates)
        self._num_answers = 0
        copies = faulty_copies(cpu_device._copy_runs, self._mischief)
        cpu_device._copy_runs = copies  # type: ignore[assignment]

    def _handle(self, message: Begin | Sample | Call) -> None:
        if self._plan.lie == "dies at once" and self._num_answers + 1 == self._plan.lie_at:
            _die()
        if isinstance(message, Call) and message.name in ("arm", "look"):
            self._serve_test(message.name)
            super()._send_to_executor(Returned())
        else:
            super()._handle(message)

    def _read_adapter(self, path: Path) -> ReadAdapter:
        deadline = time.monotonic() + WAIT_SECONDS
        while self._plan.reads_wait_for and not Path(self._plan.reads_wait_for).exists():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return super()._read_adapter(path)

    def _serve_test(self, name: str) -> None:
        if name == "arm":
            model = self._runner.model
            model.forward = faulty_forward(model.forward, self._mischief)  # type: ignore[method-assign]
        else:
            look = look_at_runner(self._runner)
            np.savez(self._plan.look_path, pool=look.pool, held=np.array(look.held, str))

    def _send_to_executor(self, message: FromWorker) -> None:
        lie = self._plan.lie
        if isinstance(message, Up) or not lie:
            super()._send_to_executor(message)
            return
        if lie not in LIES_OF_STEPS or isinstance(message, Done | Failed):
            self._num_answers += 1
            if self._num_answers == self._plan.lie_at:
                message = self._lie(message)
        super()._send_to_executor(message)
        if lie == "dies after answering" and self._num_answers == self._plan.lie_at:
            _die()

    def _lie(self, message: FromWorker) -> FromWorker:
        """What to send instead."""
        lie = self._plan.lie
        step_id = getattr(message, "step_id", None) or 0
        if lie == "dies instead of answering":
            _die()
        if lie == "exits":
            os._exit(EXIT_STATUS)
        if lie == "is late":
            time.sleep(self._plan.late_seconds)
        if lie == "answers twice":
            super()._send_to_executor(message)
        if lie == "says nonsense":
            self._socket.send(b"\xc1")
        if lie == "answers another step":
            return Done(step_id + 1, ModelRunnerOutput({}))
        if lie == "fails another step":
            return Failed("it failed", step_id - 1)
        if lie == "begins anew":
            return Up(1, 1)
        if lie == "loses its device":
            return Failed("it fell off", step_id, is_device_lost=True)
        return message


def run(plan: Plan) -> int:
    """A worker's whole life, its settings from standard input; the exit status."""
    server = partial(FaultyServer, plan=plan)
    worker_process.WorkerServer = server  # type: ignore[misc, assignment]
    return worker_process.main()


def read_look(path: str) -> RunnerLook:
    """What `look` has written."""
    with np.load(path) as file:
        look = RunnerLook(file["held"].tolist(), file["pool"])
    Path(path).unlink()
    return look


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
