# SPDX-License-Identifier: Apache-2.0
"""CUDA without a device: streams are queues, and a thread runs them in any order that is legal.

Memory is real, and so are the bytes. What a caller may not rely on does not hold here:
- of several streams that could go on, `choose` takes one, copy by copy;
- the copies of a batch run in any order, each in two halves;
- a stream that waits for an event that was never recorded does not wait;
- plain copies from ordinary memory read it when they are queued, and into it wait for the stream;
- the copy engine reaches page-locked memory only, and no copy may reach into two locked pieces;
- a thread that has not entered the device, a handle that was destroyed: refused.
What the real signatures are is tested elsewhere; this knows what the calls mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from stratakv.kernels.copy.copy_engine import Batch, CudaError
from stratakv.kernels.kernel_choice import KernelRefused

INVALID_VALUE, INVALID_HANDLE, UNINITIALISED = 1, 400, 201
WAIT_SECONDS = 20.0

Step = Callable[[], None]
# Of the streams that could go on, in the order of their making; the number of one of them.
Choose = Callable[[Sequence[int]], int]


@dataclass(eq=False)
class Operation:
    """One thing in a stream: it may go on when `ready`, and is over when its steps are."""

    steps: deque[Step] = field(default_factory=deque)
    ready: Callable[[], bool] = lambda: True
    is_over: bool = False
    over_at: float = 0.0


class FakeCuda:
    """A `Runtime`. `choose` decides the interleaving; `access` is the order in which batches read
    their sources, right or wrong."""

    def __init__(
        self,
        choose: Choose | None = None,
        *,
        seed: int = 0,
        batch_refusal: str | None = None,
        access: str = "stream",
        most_locked_bytes: int | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._choose: Choose = self._random.choice if choose is None else choose
        self.device = torch.device("cpu")
        self.batch_refusal = batch_refusal
        self.has_kernels = True
        self.access = access
        self.calls: Counter[str] = Counter()
        self.entered: dict[str, bool] = {}  # thread's name → whether it is the device's own
        self.failures: dict[str, int] = {}  # method → code of its next calls
        self.slow: frozenset[str] = frozenset()  # methods that take their time
        self.slow_seconds = 0.001
        self.batches: list[list[tuple[int, int, int]]] = []
        self.locked: dict[int, int] = {}  # address → bytes
        self._most_locked_bytes = most_locked_bytes
        self._on_device: list[torch.Tensor] = []
        self._changed = threading.Condition()
        self._streams: dict[int, deque[Operation]] = {}
        self._events: dict[int, Operation | None] = {}
        self._handles = iter(range(0x1000, 1 << 40, 16))
        self._is_paused = False
        self._ends = False
        self._here = threading.local()
        self._here.entered = True
        self.current = self._new_stream()
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    # What tests do.

    def shut_down(self) -> None:
        """Ends the thread; nothing may be queued any more."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()

    @property
    def num_events(self) -> int:
        """That were made and not destroyed."""
        return len(self._events)

    def adopt(self, memory: torch.Tensor) -> torch.Tensor:
        """Call this memory the device's."""
        self._on_device.append(memory)
        return memory

    def compute(self, *steps: Step) -> None:
        """A kernel in the current stream."""
        self._put(self.current, Operation(deque(steps)))

    def new_compute_stream(self) -> int:
        """And make it the current one."""
        self.current = self._new_stream()
        return self.current

    def block_stream(self) -> threading.Event:
        """Nothing passes in the current stream until the event is set."""
        opened = threading.Event()
        self._put(self.current, Operation(ready=opened.is_set))
        return opened

    def nudge(self) -> None:
        """Look again at what could go on."""
        with self._changed:
            self._changed.notify_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The device stands still, so that what is queued here all lies there when it goes on."""
        with self._changed:
            self._is_paused = True
        try:
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def idle(self, *, stream: int | None = None) -> None:
        """Wait until all streams, or one, are empty."""
        with self._changed:
            streams = [stream] if stream is not None else list(self._streams)
            empty = self._changed.wait_for(
                lambda: not any(self._streams.get(one) for one in streams), WAIT_SECONDS
            )
        assert empty, "a stream did not get to its end"

    # What the device calls.

    def enter_thread(self, *, is_own: bool) -> None:
        self._fail("enter_thread")
        self._here.entered = True
        self.entered[threading.current_thread().name] = is_own

    def compute_stream(self) -> int:
        return self.current

    def create_stream(self) -> int:
        self._called("create_stream")
        return self._new_stream()

    def destroy_stream(self, stream: int) -> None:
        self._called("destroy_stream")
        with self._changed:
            self._check_handle(self._streams, stream)
            assert not self._streams.pop(stream), "a stream was destroyed with work in it"

    def create_event(self) -> int:
        self._called("create_event")
        with self._changed:
            handle = next(self._handles)
            self._events[handle] = None
            return handle

    def destroy_event(self, event: int) -> None:
        with self._changed:
            self._check_handle(self._events, event)
            del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        self._called("record_event")
        operation = Operation()
        with self._changed:
            self._check_handle(self._events, event)
            self._events[event] = operation
        self._put(stream, operation)

    def wait_event(self, stream: int, event: int) -> None:
        self._called("wait_event")
        with self._changed:
            self._check_handle(self._events, event)
            operation = self._events[event]
        if operation is not None:
            self._put(stream, Operation(ready=lambda: operation.is_over))

    def has_ended(self, event: int) -> bool:
        self._called("has_ended")
        with self._changed:
            self._check_handle(self._events, event)
            operation = self._events[event]
            return operation is None or operation.is_over

    def synchronise_event(self, event: int) -> None:
        self._called("synchronise_event")
        with self._changed:
            self._check_handle(self._events, event)
            operation = self._events[event]
            if operation is None:
                return
            self._changed.wait_for(lambda: operation.is_over or self._ends, 10 * WAIT_SECONDS)
        self._fail("after_synchronise")

    def seconds_between(self, start: int, end: int) -> float:
        self._called("seconds_between")
        first, last = self._events[start], self._events[end]
        assert first is not None and last is not None and first.is_over and last.is_over
        return last.over_at - first.over_at

    def copy_batch(self, batch: Batch, stream: int) -> None:
        self._called("copy_batch")
        if self.batch_refusal is not None:
            raise KernelRefused(self.batch_refusal)
        copies = _copies(batch)
        for source, target, size in copies:
            for address in (source, target):
                if not self._is_on_device(address) and not self._is_locked(address, size):
                    raise CudaError(f"{address:#x} is not page-locked", INVALID_VALUE)
        targets = [target for _, target, _ in copies]
        assert len(set(targets)) == len(targets), "copies of a batch have no order"
        with self._changed:
            self.batches.append(copies)
        if self.access == "stream":
            steps = [step for copy in copies for step in _halves(*copy)]
        else:
            steps = [_write(target, ctypes.string_at(source, n)) for source, target, n in copies]
        self._random.shuffle(steps)
        self._put(stream, Operation(deque(steps)))

    def copy_each(self, batch: Batch, stream: int, *, to_host: bool) -> None:
        for source, target, size in _copies(batch):
            self._called("copy_each")
            assert self._is_on_device(source if to_host else target), "the wrong direction"
            host = target if to_host else source
            assert not self._is_on_device(host), "the wrong direction"
            if self._is_locked(host, size):
                self._put(stream, Operation(deque(_halves(source, target, size))))
            elif to_host:
                operation = Operation(deque(_halves(source, target, size)))
                self._put(stream, operation)
                with self._changed:
                    self._changed.wait_for(lambda op=operation: op.is_over, WAIT_SECONDS)
            else:
                page = ctypes.string_at(source, size)
                self._put(stream, Operation(deque([_write(target, page)])))

    def move_blocks(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        stream: int,
    ) -> None:
        self._called("move_blocks")
        if not self.has_kernels:
            raise KernelRefused("there is no Triton")
        moves = list(zip(source_ids, target_ids, strict=True))
        for memory, ids in ((source, source_ids), (target, target_ids)):
            for number in ids:
                address = memory.data_ptr() + number * memory.stride(0)
                if not self._is_on_device(address) and not self._is_locked(
                    address, memory.shape[1]
                ):
                    raise CudaError("an illegal address", 700)
        steps: list[Step] = [
            lambda a=a, b=b: target[b].copy_(source[a])  # type: ignore[misc]
            for a, b in moves
        ]
        self._random.shuffle(steps)
        self._put(stream, Operation(deque(steps)))

    def register_host(self, address: int, num_bytes: int) -> None:
        self._called("register_host")
        most = self._most_locked_bytes
        if most is not None and sum(self.locked.values()) + num_bytes > most:
            raise CudaError("cudaHostRegister failed: out of memory", 2)
        self.locked[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        self._called("unregister_host")
        self._check_handle(self.locked, address)
        del self.locked[address]

    def page_locked(self, num_bytes: int) -> FakeMemory:
        self._called("page_locked")
        return FakeMemory(self, num_bytes)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return self.adopt(torch.zeros(num_bytes, dtype=torch.uint8))

    # How it works.

    def _new_stream(self) -> int:
        with self._changed:
            handle = next(self._handles)
            self._streams[handle] = deque()
            return handle

    def _put(self, stream: int, operation: Operation) -> None:
        with self._changed:
            self._check_handle(self._streams, stream)
            self._streams[stream].append(operation)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                able = self._able()
                while not able:
                    if self._ends:
                        return
                    self._changed.wait(WAIT_SECONDS)
                    able = self._able()
                self._go_on(able[0] if len(able) == 1 else self._choose(able))

    def _able(self) -> list[int]:
        if self._is_paused:
            return []
        return [one for one, queue in self._streams.items() if queue and queue[0].ready()]

    def _go_on(self, stream: int) -> None:
        operation = self._streams[stream][0]
        if operation.steps:
            operation.steps.popleft()()
        if not operation.steps:
            operation.is_over, operation.over_at = True, time.monotonic()
            self._streams[stream].popleft()
            self._changed.notify_all()

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if not getattr(self._here, "entered", False):
            raise CudaError(f"{name} in a thread that has not entered the device", UNINITIALISED)
        self._fail(name)
        if name in self.slow:
            time.sleep(self.slow_seconds)

    def _fail(self, name: str) -> None:
        code = self.failures.get(name, 0)
        if code:
            raise CudaError(f"{name} failed: what CUDA says (cudaErrorOfATest, {code})", code)

    def _check_handle(self, known: dict[int, object] | dict[int, int] | object, one: int) -> None:
        if one not in known:  # type: ignore[operator]
            raise CudaError(f"{one:#x} is not known", INVALID_HANDLE)

    def _is_on_device(self, address: int) -> bool:
        return any(m.data_ptr() <= address < m.data_ptr() + m.nbytes for m in self._on_device)

    def _is_locked(self, address: int, size: int) -> bool:
        return any(
            first <= address and address + size <= first + length
            for first, length in self.locked.items()
        )


class FakeMemory:
    """Page-locked memory."""

    def __init__(self, cuda: FakeCuda, num_bytes: int) -> None:
        self._cuda = cuda
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self.address = self._memory.data_ptr()
        cuda.locked[self.address] = num_bytes

    def tensor(self) -> torch.Tensor:
        return self._memory

    def close(self) -> None:
        del self._cuda.locked[self.address]


def _copies(batch: Batch) -> list[tuple[int, int, int]]:
    table = (batch.sources.tolist(), batch.targets.tolist(), batch.sizes.tolist())
    return list(zip(*table, strict=True))


def _halves(source: int, target: int, size: int) -> list[Step]:
    half = size // 2
    parts = [(source, target, half), (source + half, target + half, size - half)]
    return [lambda a=a, b=b, n=n: ctypes.memmove(b, a, n) for a, b, n in parts]  # type: ignore[misc]


def _write(target: int, page: bytes) -> Step:
    return lambda: ctypes.memmove(target, page, len(page)) and None
