# SPDX-License-Identifier: Apache-2.0
"""A block is stored after it was written and reused after it was stored: with events, always.

A device only. One stream is slow on purpose, and another has work on the same block queued beside
it. With the event between them all bytes are right, round after round; without it they are not,
which shows that the rounds would see the fault. Nothing here knows who records events in the
engine: what is shown is that a kernel runs in the stream that is current, and there alone.
"""

from __future__ import annotations

import os

import pytest
import torch

from stratakv.kernels.copy.copy_blocks import gather_blocks, scatter_blocks
from stratakv.kernels.kernel_choice import TRITON
from stratakv.kernels.write.write_kv import write_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0",
        reason="CUDA_LAUNCH_BLOCKING leaves no two things under way at once",
    ),
]

ROUNDS = 150
ROUNDS_WITHOUT = 20
PAUSE_CYCLES = 4_000_000  # about 2 ms, many times what queuing a round takes
BLOCK_SIZE, HEADS, HEAD_DIM = 16, 8, 128
WAYS = pytest.mark.parametrize("way", ["gather", "copy"])


class Bench:
    """A pool with one block in use, page-locked memory for it, and a stream for each side."""

    def __init__(self, device: torch.device) -> None:
        shape = (2, BLOCK_SIZE, HEADS, HEAD_DIM)
        self.pool = torch.zeros(4, *shape, dtype=torch.float16, device=device)
        self.stored = torch.zeros(1, *shape, dtype=torch.float16).pin_memory()
        self.block = torch.tensor([2], device=device)
        self.slots = torch.arange(2 * BLOCK_SIZE, 3 * BLOCK_SIZE, device=device)
        numbers = torch.arange(ROUNDS + 1, device=device).half()  # each is a float16
        # In memory of their own: another alignment would be another kernel to compile.
        self.rows = numbers.view(-1, 1, 1, 1).repeat(1, BLOCK_SIZE, HEADS, HEAD_DIM)
        self.compute, self.copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Whatever is compiled at its first launch is compiled here and not in the middle of a race.
        self.write(0)
        for way in ("gather", "copy", "scatter"):
            self.move(way)
        torch.cuda.synchronize()

    def write(self, number: int) -> None:
        rows = self.rows[number]
        write_kv(rows, rows, self.pool, self.slots, kernel=TRITON)

    def move(self, way: str) -> None:
        if way == "gather":
            gather_blocks(self.pool, self.block, self.stored, kernel=TRITON, max_programs=12)
        elif way == "copy":
            self.stored.copy_(self.pool[2:3], non_blocking=True)
        else:
            scatter_blocks(self.stored, self.pool, self.block, kernel=TRITON, max_programs=12)

    def holds(self, memory: torch.Tensor, number: int) -> bool:
        return bool((memory == number).all())


def store_while_it_is_written(bench: Bench, way: str, number: int, *, waits: bool) -> bool:
    """Whether the stored bytes are the new ones."""
    bench.stored.fill_(-1)
    with torch.cuda.stream(bench.compute):
        torch.cuda._sleep(PAUSE_CYCLES)
        bench.write(number)
        written = bench.compute.record_event()
    with torch.cuda.stream(bench.copies):
        if waits:
            bench.copies.wait_event(written)
        bench.move(way)
        bench.copies.record_event().synchronize()
    right = bench.holds(bench.stored, number)
    torch.cuda.synchronize()
    return right


def write_while_it_is_stored(bench: Bench, way: str, number: int, *, waits: bool) -> bool:
    """Whether the stored bytes are those from before the block was handed on."""
    with torch.cuda.stream(bench.compute):
        bench.write(number - 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(bench.copies):
        torch.cuda._sleep(PAUSE_CYCLES)
        bench.move(way)
        copied = bench.copies.record_event()
    with torch.cuda.stream(bench.compute):
        if waits:
            bench.compute.wait_event(copied)
        bench.write(number)
    torch.cuda.synchronize()
    assert bench.holds(bench.pool[2], number)
    return bench.holds(bench.stored, number - 1)


def load_while_it_is_read(bench: Bench, number: int, *, waits: bool) -> bool:
    """Whether a reader of a block sees what a load brought."""
    bench.stored.fill_(number)
    read = torch.empty_like(bench.pool[:1])
    torch.cuda.synchronize()
    with torch.cuda.stream(bench.copies):
        torch.cuda._sleep(PAUSE_CYCLES)
        bench.move("scatter")
        loaded = bench.copies.record_event()
    with torch.cuda.stream(bench.compute):
        if waits:
            bench.compute.wait_event(loaded)
        gather_blocks(bench.pool, bench.block, read, kernel=TRITON)
    torch.cuda.synchronize()
    return bench.holds(read, number)


@WAYS
def test_a_store_that_waits_has_the_new_bytes(way: str, device: torch.device) -> None:
    bench = Bench(device)
    for number in range(1, ROUNDS + 1):
        assert store_while_it_is_written(bench, way, number, waits=True), number


@WAYS
def test_a_block_that_is_kept_until_it_is_stored(way: str, device: torch.device) -> None:
    bench = Bench(device)
    for number in range(1, ROUNDS + 1):
        assert write_while_it_is_stored(bench, way, number, waits=True), number


def test_a_reader_that_waits_has_what_was_loaded(device: torch.device) -> None:
    bench = Bench(device)
    for number in range(1, ROUNDS + 1):
        assert load_while_it_is_read(bench, number, waits=True), number


@WAYS
def test_without_the_event_the_faults_are_seen(way: str, device: torch.device) -> None:
    """The slow side takes longer than queuing the other by far, so nearly every round is wrong."""
    bench = Bench(device)
    numbers = range(1, ROUNDS_WITHOUT + 1)
    assert not all(store_while_it_is_written(bench, way, n, waits=False) for n in numbers)
    assert not all(write_while_it_is_stored(bench, way, n, waits=False) for n in numbers)
    assert not all(load_while_it_is_read(bench, n + ROUNDS, waits=False) for n in numbers)
