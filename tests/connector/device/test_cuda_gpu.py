# SPDX-License-Identifier: Apache-2.0
"""The CUDA device on a device: its contract, and the two faults that nobody would be told of.

A store that starts before its block is written, and a block that is overwritten before it is
stored: 150 rounds of each with every byte right, and the same rounds without the events between
them, which shows that they would see the fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from stratakv.connector.device.base import CopyDevice, Event, Stream
from stratakv.connector.device.contract import CHECKS
from stratakv.connector.device.contract_rig import LAYOUTS, WAIT_SECONDS, Gate, Rig, Surroundings
from stratakv.connector.device.cuda import QUICK_BLOCKS, CudaCopyDevice
from stratakv.connector.device.cuda_copy_runtime import TorchRuntime
from stratakv.kernels.copy.copy_engine import cuda_library
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.slab.cpu_slab import CpuSlab

from .surroundings import host_gate, random_pool

pytestmark = pytest.mark.gpu
not_one_by_one = pytest.mark.skipif(
    os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0",
    reason="CUDA_LAUNCH_BLOCKING leaves no two things under way at once",
)

ROUNDS, ROUNDS_WITHOUT = 150, 20
PAUSE_CYCLES = 4_000_000  # about 2 ms, many times what queueing a round takes
PIECE_BYTES = 1 << 20
# What CUDA calls in a stream: it must not call CUDA, and may wait.
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class RealCuda(Surroundings):
    """The device of this machine. Gates are a host function in a stream, or a host's event."""

    def __init__(self, name: str, *, has_host_gates: bool = False) -> None:
        self.name = name
        self._has_host_gates = has_host_gates
        self._device: CudaCopyDevice
        self._kept: list[Any] = []  # what CUDA still calls

    def device(self) -> CopyDevice:
        runtime = TorchRuntime(torch.device("cuda"))
        self._device = CudaCopyDevice(runtime, piece_bytes=PIECE_BYTES)
        return self._device

    def pool(self, num_blocks: int, layout: BlockLayout) -> torch.Tensor:
        return random_pool(num_blocks, layout).cuda()

    def gate(self, device: CopyDevice) -> Gate:
        if self._has_host_gates:
            return host_gate()
        opened, stream = threading.Event(), torch.cuda.Stream()
        function = HostFunction(lambda _data: opened.wait(WAIT_SECONDS) and None)
        self._kept.append(function)
        handle = ctypes.c_void_p(stream.cuda_stream)
        assert cuda_library().cudaLaunchHostFunc(handle, function, None) == 0
        with torch.cuda.stream(stream):
            return Gate(device.writer_event(), opened.set)

    def settle(self) -> None:
        assert self._device.wait_locked(WAIT_SECONDS)
        torch.cuda.current_stream().synchronize()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["short-pages", "whole-pages"])
@pytest.mark.parametrize(
    "surroundings",
    [RealCuda("cuda"), RealCuda("cuda-host-events", has_host_gates=True)],
    ids=lambda one: one.name,
)
def test_contract(
    surroundings: RealCuda, layout: BlockLayout, check: Callable[[Rig], None]
) -> None:
    with contextlib.closing(Rig(surroundings, layout)) as rig:
        check(rig)


class Bench:
    """Blocks of 1 MiB, 4 of them in each job, and a stream that computes."""

    num_blocks = 24
    layout = BlockLayout(8, 64, 8, 64, "float16")
    ids, slots = [5, 1, 2, 9], [3, 7, 8, 0]

    def __init__(self) -> None:
        self.slab = CpuSlab(
            self.layout, self.num_blocks * self.layout.slot_bytes, populate_threads=1
        )
        self.device = CudaCopyDevice()
        self.device.register_slab(self.slab)
        shape = (self.num_blocks, self.layout.num_layers, 2, 64, 8, 64)
        self.pool = torch.zeros(shape, dtype=torch.float16, device="cuda")
        self.device.register_pool(self.pool)
        assert self.device.wait_locked(WAIT_SECONDS)
        self.compute = torch.cuda.Stream()
        self.ids_on_device = torch.tensor(self.ids, device="cuda")
        torch.cuda.synchronize()

    def pause(self) -> Event:
        """What ends in 2 ms, in a stream of its own."""
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(PAUSE_CYCLES)
            return self.device.writer_event()

    def write(self, number: int) -> Event:
        """In the stream that computes."""
        with torch.cuda.stream(self.compute):
            self.pool.index_fill_(0, self.ids_on_device, float(number))
            return self.device.writer_event()

    def stored(self, number: int) -> bool:
        """Whether the slots hold the number, and nothing else."""
        slots = torch.frombuffer(self.slab.memory(), dtype=torch.float16)
        slots = slots.view(self.num_blocks, -1)
        return bool((slots[self.slots] == number).all())

    def store(self, *after: Event) -> Event:
        return self.device.copy(Stream.STORE, self.ids, self.slots, after)

    def finish(self, event: Event) -> None:
        assert event.wait(WAIT_SECONDS) and event.error() is None
        torch.cuda.synchronize()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.device.close(WAIT_SECONDS)
    bench.slab.close()


def store_while_it_is_written(bench: Bench, number: int, *, waits: bool) -> bool:
    with torch.cuda.stream(bench.compute):
        torch.cuda._sleep(PAUSE_CYCLES)
    written = bench.write(number)
    bench.finish(bench.store(*([written] if waits else [])))
    return bench.stored(number)


def write_while_it_is_stored(bench: Bench, number: int, *, waits: bool) -> bool:
    bench.write(number - 1)
    torch.cuda.synchronize()
    store = bench.store(bench.pause())
    with torch.cuda.stream(bench.compute):
        if waits:
            assert bench.device.hold_compute([store], WAIT_SECONDS) == []
    bench.write(number)
    bench.finish(store)
    return bench.stored(number - 1)


@not_one_by_one
@pytest.mark.parametrize("fault", [store_while_it_is_written, write_while_it_is_stored])
def test_the_events_keep_every_byte(bench: Bench, fault: Callable[..., bool]) -> None:
    for number in range(1, ROUNDS + 1):
        assert fault(bench, number, waits=True), f"round {number}"


@not_one_by_one
@pytest.mark.parametrize("fault", [store_while_it_is_written, write_while_it_is_stored])
def test_without_the_events_the_fault_is_seen(bench: Bench, fault: Callable[..., bool]) -> None:
    assert not all(fault(bench, number, waits=False) for number in range(1, ROUNDS_WITHOUT + 1))


@not_one_by_one
def test_copies_go_on_beside_a_graph_capture(bench: Bench) -> None:
    bench.write(7)
    torch.cuda.synchronize()
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    ended = threading.Event()
    bench.device.set_notify(ended.set)
    everything = range(bench.num_blocks)
    assert len(everything) > QUICK_BLOCKS, "so that a thread of the device queues it"
    job = threading.Thread(target=lambda: bench.device.copy(Stream.STORE, everything, everything))
    with torch.cuda.graph(graph):
        static.add_(1)
        job.start()
        job.join(WAIT_SECONDS)
        assert ended.wait(WAIT_SECONDS)
        static.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert static.eq(2).all()
