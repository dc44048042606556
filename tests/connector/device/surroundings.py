# SPDX-License-Identifier: Apache-2.0
"""The devices that the contract is run over, and what each needs around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stratakv.connector.device.base import CopyDevice
from stratakv.connector.device.contract_rig import WAIT_SECONDS, Gate, Surroundings
from stratakv.connector.device.cpu import CpuCopyDevice, CpuEvent
from stratakv.connector.device.cuda import CudaCopyDevice
from stratakv.tiers.block import BlockLayout

from .fake_cuda import FakeCuda


def random_pool(num_blocks: int, layout: BlockLayout) -> torch.Tensor:
    shape = (num_blocks, layout.num_layers, 2, layout.block_size, 1, layout.head_dim)
    return torch.randint(1, 99, shape).to(torch.bfloat16)


def host_gate() -> Gate:
    event = CpuEvent()
    return Gate(event, event.mark_done)


class CpuSurroundings(Surroundings):
    """The CPU device."""

    name = "cpu"

    def device(self) -> CopyDevice:
        return CpuCopyDevice()

    def pool(self, num_blocks: int, layout: BlockLayout) -> torch.Tensor:
        return random_pool(num_blocks, layout)

    def gate(self, device: CopyDevice) -> Gate:
        return host_gate()


class FakeCudaSurroundings(Surroundings):
    """The CUDA device on a CUDA made of queues. Gates are events of a stream that is held up, or
    events that only threads can wait for."""

    def __init__(
        self,
        name: str,
        make: Callable[[], FakeCuda] = FakeCuda,
        *,
        slow: Sequence[str] = (),
        has_host_gates: bool = False,
        is_lockable: bool = True,
        piece_bytes: int = 4 * 4096,
    ) -> None:
        self.name = name
        self._make = make
        self._slow = frozenset(slow)
        self._has_host_gates = has_host_gates
        self._is_lockable = is_lockable
        self._piece_bytes = piece_bytes
        self.cuda: FakeCuda = make()

    def device(self) -> CopyDevice:
        self.cuda.shut_down()  # the one of the device before
        self.cuda = self._make()
        self.cuda.slow = self._slow
        if not self._is_lockable:
            self.cuda.failures["register_host"] = 2
        self._device = CudaCopyDevice(self.cuda, piece_bytes=self._piece_bytes, staging_bytes=5000)
        return self._device

    def pool(self, num_blocks: int, layout: BlockLayout) -> torch.Tensor:
        return self.cuda.adopt(random_pool(num_blocks, layout))

    def gate(self, device: CopyDevice) -> Gate:
        if self._has_host_gates:
            return host_gate()
        computing = self.cuda.current
        self.cuda.new_compute_stream()
        opened = self.cuda.block_stream()
        event = device.writer_event()
        self.cuda.current = computing

        def open_gate() -> None:
            opened.set()
            self.cuda.nudge()

        return Gate(event, open_gate)

    def write(self, pool: torch.Tensor, block_id: int, value: int) -> None:
        self.cuda.compute(*(lambda layer=layer: layer.fill_(value) for layer in pool[block_id]))  # type: ignore[misc]

    def settle(self) -> None:
        assert self._device.wait_locked(WAIT_SECONDS)
        self.cuda.slow = frozenset()  # the ways to copy have been chosen
        self.cuda.idle(stream=self.cuda.current)


# What is slow while the ways to copy are measured decides which are taken.
BATCHED, SINGLE, KERNEL = (
    ("copy_each", "move_blocks"), ("copy_batch", "move_blocks"), ("copy_batch", "copy_each")
)  # fmt: skip
ALL: tuple[CpuSurroundings | FakeCudaSurroundings, ...] = (
    CpuSurroundings(),
    FakeCudaSurroundings("cuda", slow=BATCHED),
    FakeCudaSurroundings("cuda-single", slow=SINGLE),
    FakeCudaSurroundings("cuda-kernel", slow=KERNEL),
    FakeCudaSurroundings("cuda-host-events", has_host_gates=True, slow=BATCHED),
    FakeCudaSurroundings("cuda-staged", is_lockable=False, slow=BATCHED),
    FakeCudaSurroundings("cuda-pageable", is_lockable=False, slow=SINGLE),
    FakeCudaSurroundings(
        "cuda-partly-locked", lambda: FakeCuda(most_locked_bytes=60_000), slow=BATCHED
    ),
    FakeCudaSurroundings(
        "cuda-old-driver", lambda: FakeCuda(batch_refusal="the driver is old"), slow=SINGLE
    ),
)
