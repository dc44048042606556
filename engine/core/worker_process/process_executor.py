# SPDX-License-Identifier: Apache-2.0
"""An executor whose model runner lives in another process.

The worker process reads its settings from standard input; end of file there means that the launcher
has ended. The executor declares the worker dead, with the reason, if it ends, answers late or in
wrong order."""

from __future__ import annotations

import logging
import math
import os
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from ....connector.base import CLOSE_SECONDS
from ....connector.messages import ConnectorMetadata, ConnectorWorkerOutput
from ....tiers.processes.python_command import python_command
from ....tiers.settings.values import ConfigError
from ...config.engine_config import EngineConfig
from ...sampling.token_mask import TokenMask
from ...scheduler.output import ModelRunnerOutput, SchedulerOutput
from ...worker.adapter_slots import ReadAdapter
from ..executor import Executor, ExecutorDied, StepHandle
from ..offload import OpenTiers
from ..start import encode_start
from .adapter_reads import AdapterReads
from .worker_messages import (
    Begin,
    Call,
    Done,
    Failed,
    FromWorker,
    Returned,
    Sample,
    Stop,
    ToWorker,
    Up,
    WorkerStart,
    decode_from_worker,
    encode,
)

logger = logging.getLogger(__name__)

START_SECONDS = 1800.0  # enough for a large model on a slow disk
STEP_SECONDS = 600.0  # far beyond the longest step; a worker that takes longer counts as stuck
WORKER_COMMAND = tuple(python_command("-m", "stratakv.engine.core.worker_process.worker_process"))
_NUMBER = struct.Struct("<I")
_ALL = 2**32
_POLL_SECONDS = 0.2
_END_SECONDS = 10.0  # the time to exit, added to the time for copies


class StepFailed(RuntimeError):
    """A step failed in the worker process; the message is the worker's."""


class ProcessExecutor(Executor):
    """Runs the model in a worker process. Raises ConfigError if the worker cannot start with these
    settings, ExecutorDied if it ends during the start; either error leaves nothing open."""

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int | None,
        max_model_len: int,
        tiers: OpenTiers | None = None,
        *,
        step_seconds: float = STEP_SECONDS,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._step_seconds = step_seconds
        self._due: deque[int] = deque()  # ids of dispatched steps without a result yet
        self._outcomes: dict[int, ModelRunnerOutput | Exception] = {}
        self._dead: str | None = None
        self._deadline = math.inf  # of every wait, in monotonic seconds; set by `end_by`
        self._closed = False
        self._directory = Path(tempfile.mkdtemp(prefix="stratakv-", dir="/tmp"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)  # no limit, because at most a few messages are queued
        endpoint = f"ipc://{self._directory}/worker"
        self._socket.bind(endpoint)
        copies = None if tiers is None else tiers.description
        wake_read, wake_write = os.pipe()
        self._reads = AdapterReads()
        passed = [wake_write, self._reads.worker_fd]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=passed if copies is None else [*passed, copies.slab_fd],
                stdin=subprocess.PIPE,
                stdout=2,  # to standard error, because the output is text for the user
                # A process group of its own keeps Ctrl-C from the worker, which this process ends.
                # The worker stays in the session, because Linux yields only within one.
                process_group=0,
            )
        except BaseException:
            os.close(wake_read)
            self._close_socket()
            raise
        finally:
            os.close(wake_write)
        self._reads.start_receiving()
        note_ended = None if tiers is None else tiers.note_ended
        threading.Thread(
            target=_pass_on, args=(wake_read, note_ended), name="stratakv-worker-wake", daemon=True
        ).start()
        level = logging.getLevelName(logging.getLogger("stratakv").getEffectiveLevel())
        start = WorkerStart(
            config,
            endpoint,
            num_blocks,
            max_model_len,
            level,
            copies,
            wake_fd=wake_write,
            reads_fd=self._reads.worker_fd,
            # Linux ends the worker with the thread that began it, so only the main thread will do.
            dies_with_launcher=threading.current_thread() is threading.main_thread(),
        )
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(encode_start(start))
            self._process.stdin.flush()
            first = self._receive(START_SECONDS)
            if isinstance(first, Failed):
                raise ConfigError(first.error) if first.is_config_error else self._died(first.error)
            if not isinstance(first, Up):
                raise self._died(f"it began with {type(first).__name__}")
        except BaseException as error:
            self._terminate_process(0.0)
            if isinstance(error, BrokenPipeError):
                raise self._died(self._exit_words()) from error
            raise
        self._up = first
        # Both ends are connected. A killed process would leave the socket's file behind.
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def num_blocks(self) -> int:
        return self._up.num_blocks

    @property
    def max_model_len(self) -> int:
        return self._up.max_model_len

    @property
    def is_alive(self) -> bool:
        return self._dead is None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def end_by(self, deadline: float) -> None:
        self._deadline = deadline

    def dispatch(self, step: SchedulerOutput) -> StepHandle:
        self._send_to_worker(Begin(step))
        self._due.append(step.step_id)
        return StepHandle(step)

    def sample(self, handle: StepHandle, mask: TokenMask | None = None) -> None:
        self._send_to_worker(Sample(mask))

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        step_id = handle.step.step_id
        deadline = time.monotonic() + self._step_seconds
        while step_id not in self._outcomes:
            if step_id not in self._due:
                raise RuntimeError(f"step {step_id} was not dispatched, or is over")
            self._save_outcome(self._receive(deadline - time.monotonic()))
        outcome = self._outcomes.pop(step_id)
        if isinstance(outcome, ModelRunnerOutput):
            return outcome
        raise outcome

    def call_worker(
        self, name: str, *, meta: ConnectorMetadata | None = None, seconds: float | None = None
    ) -> ConnectorWorkerOutput | None:
        return self._call(Call(name, meta, seconds))

    def read_adapter(self, path: Path) -> ReadAdapter:
        return self._reads.read_adapter(path)

    def add_adapter(self, adapter: ReadAdapter) -> None:
        self._call(Call("add_adapter", number=adapter.number))

    def drop_adapter(self, fingerprint: bytes) -> None:
        self._call(Call("drop_adapter", fingerprint=fingerprint))

    def _call(self, call: Call) -> ConnectorWorkerOutput | None:
        seconds = call.seconds
        self._send_to_worker(call)
        # A call with `seconds` ends soon, so it gets less extra time than a step.
        more = self._step_seconds if seconds is None else min(self._step_seconds, _END_SECONDS)
        deadline = time.monotonic() + more + (seconds or 0.0)
        while True:
            message = self._receive(deadline - time.monotonic())
            if isinstance(message, Returned):
                return message.output
            if isinstance(message, Failed) and message.step_id is None:
                raise StepFailed(message.error)
            self._save_outcome(message)

    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> ConnectorWorkerOutput | None:
        if self._closed:
            return None
        output = None
        self._deadline = math.inf  # the call below has its own time limit
        if self._dead is None:
            try:
                output = self.call_worker("shutdown", seconds=timeout_seconds)
                self._send_to_worker(Stop())
            except (ExecutorDied, StepFailed) as error:
                logger.error("the worker process did not shut down: %s", error)
        self._terminate_process(_END_SECONDS if self._dead is None else 0.0)
        return output

    def _save_outcome(self, message: FromWorker) -> None:
        """Store the result or the error of a step. A worker that answers steps out of order is
        declared dead."""
        if not isinstance(message, Done | Failed):
            raise self._died(f"it said {type(message).__name__}, which was not asked for")
        due = self._due.popleft() if self._due else None
        if due is None or due != message.step_id:
            raise self._died(f"it answered step {message.step_id} where step {due} was due")
        if isinstance(message, Done):
            self._outcomes[message.step_id] = message.result
        elif message.is_device_lost:
            raise self._died(f"its device is lost: {message.error}")
        else:
            self._outcomes[due] = StepFailed(message.error)

    def _send_to_worker(self, message: ToWorker) -> None:
        if self._dead is not None:
            raise ExecutorDied(self._dead)
        data = encode(message)
        while True:
            # The socket accepts no message if no worker is connected.
            self._poll_socket(zmq.POLLOUT, self._step_seconds)
            try:
                self._socket.send(data, zmq.NOBLOCK)
                return
            except zmq.Again:
                pass  # the worker has ended meanwhile

    def _receive(self, seconds: float) -> FromWorker:
        """Return the next message. Raises ExecutorDied if none comes in time or if the worker
        ends."""
        if self._dead is not None:
            raise ExecutorDied(self._dead)
        self._poll_socket(zmq.POLLIN, seconds)
        try:
            return decode_from_worker(self._socket.recv())
        except (msgspec.MsgspecError, ValueError) as error:
            raise self._died(f"its answer cannot be read: {error}") from error

    def _poll_socket(self, event: int, seconds: float) -> None:
        """Wait until the socket can receive or send. Raises ExecutorDied if the time is up or the
        worker has ended."""
        now = time.monotonic()
        deadline = min(now + seconds, self._deadline)
        seconds = max(0.0, deadline - now)
        is_gone = False
        while not self._socket.poll(0 if is_gone else int(_POLL_SECONDS * 1000), event):
            if is_gone:
                if event == zmq.POLLOUT:
                    self._take_last_words()
                raise self._died(self._exit_words())
            is_gone = self._process.poll() is not None  # the worker's last messages may still come
            if time.monotonic() > deadline:
                what = "answer" if event == zmq.POLLIN else "take a message"
                raise self._died(f"it did not {what} within {seconds:.3g} s")

    def _take_last_words(self) -> None:
        """Store the answers that the worker sent before it ended."""
        while self._socket.poll(0, zmq.POLLIN):
            self._save_outcome(self._receive(0.0))

    def _died(self, why: str) -> ExecutorDied:
        self._dead = f"the worker process cannot be used any more: {why}"
        return ExecutorDied(self._dead)

    def _exit_words(self) -> str:
        return f"it ended with exit status {self._process.poll()}"

    def _terminate_process(self, seconds: float) -> None:
        """Wait for the process to end, kill it after `seconds`, and release all resources."""
        self._closed = True
        self._dead = self._dead or "the executor was shut down"
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass  # the reader of unwritten input has ended
        self._close_socket()

    def _close_socket(self) -> None:
        self._reads.close()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _pass_on(fd: int, note_ended: Callable[[int], None] | None) -> None:
    """Read from the worker how many copies have ended, and call `note_ended` with each number. When
    the worker ends, all copies count as ended."""
    with os.fdopen(fd, "rb", buffering=0) as pipe:
        while len(number := pipe.read(_NUMBER.size)) == _NUMBER.size:
            if note_ended is not None:
                note_ended(_NUMBER.unpack(number)[0])
    if note_ended is not None:
        note_ended(_ALL)
