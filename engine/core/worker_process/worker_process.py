# SPDX-License-Identifier: Apache-2.0
"""The entry point of a worker process: reads settings from standard input, then runs steps over
ZMQ."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import struct
import sys
import threading
from collections import deque
from pathlib import Path

import torch
import zmq

from ....connector.base import KVConnectorWorker
from ....connector.build import build_worker_side
from ....tiers.errors import TierConfigError
from ....tiers.settings.values import ConfigError
from ... import logs
from ...collector import settle_collector
from ...models.spec.spec_parser import load_model_spec
from ...worker.adapter_slots import ReadAdapter
from ...worker.begun_step import BegunStep
from ...worker.model_runner import ModelRunner
from ...worker.runtime.device_runtime import is_device_lost
from ..executor import call_runner, load_runner
from ..setup.model_check import find_draft
from ..setup.resolve_placement import dtype_for, placement_of
from ..start import read_start
from .adapter_reads import AdapterReader
from .worker_messages import (
    Begin,
    Call,
    Done,
    Failed,
    FromWorker,
    Returned,
    Sample,
    Stop,
    Up,
    WorkerStart,
    decode_to_worker,
    encode,
)

# The name is written out, because `__name__` is __main__ in this process.
logger = logging.getLogger("stratakv.engine.core.worker_process.worker_process")

_LINGER_MILLISECONDS = 2000
_LOOK_MILLISECONDS = 1  # between two checks of the device, while no message comes
_READER_SECONDS = 5.0  # for adapters that are being read at the end
EXIT_FAILED = 1
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class WorkerServer:
    """Answers the messages of one executor, one after another."""

    def __init__(self, start: WorkerStart) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._socket.set_hwm(0)
        self._socket.connect(start.endpoint)
        self._start = start
        # Steps that have begun, each with its state or its error, the oldest first.
        self._steps: deque[tuple[int, BegunStep | Exception]] = deque()
        # The step that was sampled and whose result was not sent yet.
        self._sampled: tuple[int, BegunStep | Exception] | None = None

    def run(self) -> int:
        """Run until `Stop`. Return the process's exit status."""
        try:
            self._runner = self._load_model_runner()
        except Exception as error:
            is_config = isinstance(error, ConfigError | TierConfigError)
            if not is_config:
                logger.error("the worker cannot start", exc_info=error)
            self._send_to_executor(Failed(_words(error), is_config_error=is_config))
            self._close_zmq()
            return EXIT_FAILED
        self._reader = AdapterReader(self._start.reads_fd, self._read_adapter)
        self._runner.enter_thread()
        settle_collector()
        self._send_to_executor(Up(self._runner.pool.num_blocks, self._runner.max_model_len))
        while True:
            self._deliver_when_done()
            message = decode_to_worker(self._socket.recv())
            if isinstance(message, Stop):
                self._reader.close(_READER_SECONDS)
                self._close_zmq()
                return 0
            self._handle(message)

    def _load_model_runner(self) -> ModelRunner:
        config = self._start.config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        spec = load_model_spec(config.model.path)
        placement = placement_of(config)
        return load_runner(
            config,
            self._start.num_blocks,
            self._start.max_model_len,
            spec=spec,
            draft=find_draft(config, spec),
            dtype=dtype_for(config, spec, placement.device),
            placement=placement,
            connector=self._copies(),
            progress=logger.info,
        )

    def _copies(self) -> KVConnectorWorker | None:
        description, fd = self._start.copies, self._start.wake_fd
        if description is None:
            return None

        def wake(num_ended: int) -> None:
            os.write(fd, struct.pack("<I", num_ended))

        return build_worker_side(description, wake)

    def _handle(self, message: Begin | Sample | Call) -> None:
        if isinstance(message, Begin):
            step = message.step
            try:
                self._steps.append((step.step_id, self._runner.launch_step(step)))
            except Exception as error:  # noqa: BLE001 - sent in the answer to its Sample
                self._steps.append((step.step_id, error))
            self._deliver()
        elif isinstance(message, Sample):
            self._deliver()
            self._sample(message)
        else:
            self._deliver()
            self._send_to_executor(self._call_model_runner(message))

    def _sample(self, message: Sample) -> None:
        step_id, step = self._steps.popleft()
        if isinstance(step, BegunStep):
            try:
                self._runner.sample(step, message.mask)
            except Exception as error:  # noqa: BLE001 - told with the answer
                step = error
        self._sampled = (step_id, step)

    def _deliver_when_done(self) -> None:
        """Send the result of the sampled step as soon as the device has finished it. If a message
        comes first, return; the result is then sent after the next step has been launched."""
        while self._sampled is not None:
            _, step = self._sampled
            if not isinstance(step, BegunStep) or self._runner.is_done(step):
                self._deliver()
            elif self._socket.poll(_LOOK_MILLISECONDS):
                return

    def _deliver(self) -> None:
        if self._sampled is None:
            return
        (step_id, step), self._sampled = self._sampled, None
        error = step if isinstance(step, Exception) else None
        if isinstance(step, BegunStep):
            try:
                self._send_to_executor(Done(step_id, self._runner.collect_output(step)))
                return
            except Exception as caught:  # noqa: BLE001 - sent, and logged by the executor
                error = caught
        assert error is not None
        self._send_to_executor(Failed(_words(error), step_id, is_device_lost=is_device_lost(error)))

    def _call_model_runner(self, call: Call) -> FromWorker:
        try:
            if call.name == "add_adapter":
                self._runner.adapters.add_adapter(self._reader.take_adapter(call.number))
                return Returned()
            if call.name == "drop_adapter":
                self._runner.drop_adapter(call.fingerprint)
                return Returned()
            return Returned(call_runner(self._runner, call.name, call.meta, call.seconds))
        except Exception as error:  # noqa: BLE001 - told
            return Failed(_words(error))

    def _read_adapter(self, path: Path) -> ReadAdapter:
        return self._runner.adapters.read_adapter(path)

    def _send_to_executor(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def _close_zmq(self) -> None:
        self._socket.close()
        self._context.term()


def _words(error: Exception) -> str:
    is_config = isinstance(error, ConfigError | TierConfigError)
    return str(error) if is_config else f"{type(error).__name__}: {error}"


def _leave_with_launcher() -> None:
    """Exit at the end of standard input, which means that the launcher has ended."""
    # Read by descriptor, because the interpreter needs the file object's lock at its exit.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(EXIT_FAILED)


def _die_with_launcher() -> None:
    """Let the kernel kill this process when the launcher ends, even if it hangs and does not read
    standard input. Linux only."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main() -> int:
    """Run the worker with the settings from standard input."""
    # The executor's process handles signals, and ends this process. A terminal may be set to stop
    # background processes that write to the terminal.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    try:
        start = read_start(sys.stdin.buffer, WorkerStart)
    except ValueError as error:  # includes msgspec's errors
        sys.stderr.write(f"stratakv: {error}\n")
        return 2
    logs.set_up(start.log_level)
    if start.dies_with_launcher and sys.platform == "linux":
        _die_with_launcher()
    threading.Thread(target=_leave_with_launcher, name="worker-watch", daemon=True).start()
    return WorkerServer(start).run()


if __name__ == "__main__":
    sys.exit(main())
