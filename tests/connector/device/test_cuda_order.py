# SPDX-License-Identifier: Apache-2.0
"""Random programs on a CUDA that runs streams in any legal order: every byte is as if all had run
one after the other. The same programs find each of the known mistakes, put in on purpose."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from stratakv.connector.device.base import Event, Stream
from stratakv.connector.device.contract_rig import WHOLE_PAGES
from stratakv.connector.device.cuda import CudaCopyDevice
from stratakv.tiers.slab.cpu_slab import CpuSlab

from .fake_cuda import Choose, FakeCuda
from .surroundings import random_pool

BLOCKS, SLOTS, STEPS = 6, 8, 30
WAIT_SECONDS = 20.0
SEEDS = {"ci": 40, "long": 20_000}


def compute_first(able: Sequence[int]) -> int:
    """What copies is late: whoever overwrites without waiting does so before the copy."""
    return min(able)  # the compute stream was made first


def copies_first(able: Sequence[int]) -> int:
    """What computes is late: whoever copies without waiting reads what was there before."""
    return max(able)


class Program:
    """Random steps, and what pool and slab must hold after them."""

    def __init__(self, seed: int, cuda: FakeCuda, *, forgets: str = "") -> None:
        self._random = random.Random(seed)
        self._forgets = forgets
        self._cuda = cuda
        self._slab = CpuSlab(WHOLE_PAGES, SLOTS * WHOLE_PAGES.slot_bytes, populate_threads=1)
        self._device = CudaCopyDevice(cuda, piece_bytes=3 * 4096, staging_bytes=5000)
        self._pool = cuda.adopt(random_pool(BLOCKS, WHOLE_PAGES))
        self._pages = self._pool.view(torch.uint8).reshape(BLOCKS, -1).numpy()
        self._slots = np.frombuffer(self._slab.memory(), dtype=np.uint8).reshape(SLOTS, -1)
        self._device.register_slab(self._slab)
        self._device.register_pool(self._pool)
        assert self._device.wait_locked(WAIT_SECONDS)
        self._pool_now, self._slab_now = self._pages.copy(), self._slots.copy()
        self._events: list[tuple[Stream, set[int], set[int], Event]] = []

    def run(self) -> bool:
        """Whether every byte is right."""
        try:
            # What is queued while the device stands still may then run in any order.
            for _ in range(3):
                with self._cuda.paused():
                    for _ in range(STEPS // 3):
                        self._random.choice((self._compute, self._store, self._load))()
            for *_, event in self._events:
                assert event.wait(WAIT_SECONDS) and event.error() is None
            self._cuda.idle()
            right = np.array_equal(self._pages, self._pool_now)
            return right and np.array_equal(self._slots, self._slab_now)
        finally:
            del self._slots
            assert self._device.close(WAIT_SECONDS)
            self._slab.close()

    def _compute(self) -> None:
        blocks, value = self._some(BLOCKS), self._random.randrange(1, 256)
        held = [event for _, used, _, event in self._events if used & set(blocks)]
        if self._forgets != "reuse":
            assert self._device.hold_compute(held, WAIT_SECONDS) == []
        half = self._pages.shape[1] // 2
        parts = [self._pages[b][p] for b in blocks for p in (slice(half), slice(half, None))]
        self._cuda.compute(*(lambda part=part: part.fill(value) for part in parts))  # type: ignore[misc]
        self._pool_now[blocks] = value

    def _store(self) -> None:
        blocks, slots = self._some(BLOCKS), self._some(SLOTS)
        blocks, slots = self._copy(Stream.STORE, blocks, slots)
        self._slab_now[slots] = self._pool_now[blocks]

    def _load(self) -> None:
        blocks, slots = self._copy(Stream.LOAD, self._some(BLOCKS), self._some(SLOTS))
        self._pool_now[blocks] = self._slab_now[slots]

    def _copy(
        self, stream: Stream, blocks: list[int], slots: list[int]
    ) -> tuple[list[int], list[int]]:
        count = min(len(blocks), len(slots))
        blocks, slots = blocks[:count], slots[:count]
        after = [] if self._forgets == "writer" else [self._device.writer_event()]
        if self._forgets != "other stream":
            after += [
                event
                for other, used, places, event in self._events
                if other is not stream and (used & set(blocks) or places & set(slots))
            ]
        event = self._device.copy(stream, blocks, slots, after)
        self._events.append((stream, set(blocks), set(slots), event))
        return blocks, slots

    def _some(self, count: int) -> list[int]:
        return self._random.sample(range(count), self._random.randint(1, 4))


@contextlib.contextmanager
def running(cuda: FakeCuda) -> Iterator[FakeCuda]:
    try:
        yield cuda
    finally:
        cuda.shut_down()


def run(
    seed: int,
    *,
    choose: Choose | None = None,
    access: str = "stream",
    forgets: str = "",
    break_it: Callable[[FakeCuda], None] = lambda cuda: None,
) -> bool:
    with running(FakeCuda(choose, seed=seed, access=access)) as cuda:
        program = Program(seed, cuda, forgets=forgets)
        break_it(cuda)
        return program.run()


@pytest.mark.parametrize("choose", [None, compute_first, copies_first])
def test_any_order_that_is_legal_gives_the_same_bytes(
    choose: Choose | None, scale: str, seed: int
) -> None:
    for number in range(SEEDS[scale] // 4):
        assert run(seed + number, choose=choose), f"seed {seed + number}"


def ignore_waits(cuda: FakeCuda) -> None:
    cuda.wait_event = lambda stream, event: None  # type: ignore[method-assign]


MISTAKES: dict[str, dict[str, object]] = {
    "a store before its writer's event": {"forgets": "writer", "choose": copies_first},
    "a block reused before its copy's event": {"forgets": "reuse", "choose": compute_first},
    "a copy before that of the other stream": {"forgets": "other stream"},
    "streams told to wait for nothing": {"break_it": ignore_waits, "choose": copies_first},
    "sources read before the stream is there": {"access": "any"},
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda name: name.replace(" ", "-"))
def test_a_mistake_is_found(mistake: str, seed: int) -> None:
    assert not all(run(seed + i, **MISTAKES[mistake]) for i in range(60))  # type: ignore[arg-type]
