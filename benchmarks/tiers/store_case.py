# SPDX-License-Identifier: Apache-2.0
"""The case of blocks to and from the real SSD store, compared with the limits of the disk.

The store is used like in the hierarchy: with buffers in a slab, batches of 32 MiB that are
acknowledged as a whole, and as many bytes in flight as in write-back. Before the first round, every
slot and the limit's file are written once; the rate of the store's first write is reported. The
limit's buffers are in the same slab.

The cost of checksums is the difference between reads and writes with and without hashing. The
product has no option without checksums, so functions are replaced during a round. The figures of
codecs are the ratio of bytes and the rates on one thread, for blocks of normally distributed
numbers; real keys and values may have other figures. Codecs have no gate, because an operator
chooses a codec only for a slow disk."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from ...connector.device.fp8_codec import DTYPES, Fp8Codec
from ...tiers import record
from ...tiers.base import Stored
from ...tiers.block import BlockLayout
from ...tiers.codecs.base import Codec
from ...tiers.codecs.known_codecs import CODECS
from ...tiers.contract import make_buffers
from ...tiers.slab.cpu_slab import CpuSlab
from ...tiers.ssd import SsdStore, reader, record_writer
from ...tiers.tag import NO_TAG, Proof
from ..harness.comparison import Comparison, WrongWork
from ..harness.report import Report, median, print_table
from .disk_limit import QUEUE_DEPTH, READ_DEPTHS, make_limit
from .scale import MIB, Scale, key_of, layout_of

BATCH_BYTES = 32 * MIB
BATCHES_IN_FLIGHT = 4
LOOK_UP_KEYS = 256
_LIVE_SHARE = 0.9
_SECONDS = 120.0
_LOOK_UP_SECONDS = 0.5

_T = TypeVar("_T")


class StoreCase:
    """A store in the new folder `folder`, whose slots have all been written once, and the file of
    the limit. `limit` is "fio", "loop" or None, with which fio is used if installed."""

    def __init__(
        self,
        folder: Path,
        block_bytes: int,
        scale: Scale,
        limit: str | None = None,
        *,
        huge_pages: bool = False,
        durability: str = "sync",
    ) -> None:
        self._size = block_bytes
        self._is_durable = durability == "sync"
        folder.mkdir()
        layout = layout_of(block_bytes)
        self.store = SsdStore(folder / "store", layout, scale.store_bytes, durability=durability)
        num_slots = self.store.stats().capacity_blocks
        self.num_live = int(num_slots * _LIVE_SHARE)
        self._round_blocks = min(self.num_live, scale.round_bytes // block_bytes)
        # A batch has at least BATCH_BYTES, except in a store too small for several batches.
        self._batch = max(1, min(-(-BATCH_BYTES // block_bytes), self.num_live // 6))
        slab_bytes = BATCHES_IN_FLIGHT * self._batch * block_bytes
        self.slab = CpuSlab(layout, slab_bytes, huge_pages=huge_pages)
        memory = self.slab.memory()
        for start in range(0, len(memory), MIB):
            memory[start : start + MIB] = os.urandom(MIB)[: len(memory) - start]
        slots = [self.slab.buffer(slot) for slot in range(self.slab.num_slots)]
        self._buffers = deque(
            slots[start : start + self._batch] for start in range(0, len(slots), self._batch)
        )
        self.limit = make_limit(limit, folder / "limit", block_bytes, scale.store_bytes, self.slab)
        self._rng = random.Random(block_bytes)
        self._num_keys = 0
        self._live: list[bytes] = []
        self.first_write_rate = self._timed_store(num_slots)
        self.clear()  # because a full store evicts blocks

    def comparisons(self, name: str) -> list[Comparison]:
        """Return comparisons of writes to free slots, and of random reads, with acknowledged
        batches."""
        moved = self._round_blocks * self._size
        return [
            self._written(f"ssd_write_{name}", self.write, moved),
            Comparison(
                f"ssd_read_cold_{name}",
                "bytes/s",
                self.limit.name,
                self.read,
                partial(self.limit.read, moved),
                # Rivals have other numbers of concurrent requests, which may be faster.
                rivals={
                    f"loop x{requests}": partial(self.limit.read_in_turn, moved, requests)
                    for requests in READ_DEPTHS
                    if (self.limit.name, requests) != ("loop", QUEUE_DEPTH)
                },
            ),
        ]

    def churn_comparison(self, name: str) -> Comparison:
        """Return the comparison of rounds that replace all blocks of the store once."""
        turned = self.num_live * self._size
        return self._written(f"ssd_churn_{name}", self.churn, turned)

    def write(self) -> float:
        """Store new blocks in an empty store; return bytes per second."""
        self.clear()
        return self._timed_store(self._round_blocks)

    def read(self) -> float:
        """Load random blocks once each, without the page cache; return bytes per second."""
        self.fill()
        keys = self._rng.sample(self._live, self._round_blocks)

        def check(_: list[bytes], proofs: list[Proof | None]) -> None:
            if None in proofs:
                raise WrongWork("the store did not have a block that it kept")

        return self._move(keys, self.store.load, check)

    def churn(self) -> float:
        """Replace all blocks by new ones, in batches, in random order; return bytes per second."""
        self.fill()
        return self._timed_store(self.num_live, evicting=True)

    def fill(self) -> None:
        """Fill 90 % of the slots with blocks."""
        missing = self.num_live - len(self._live)
        if missing > 0:
            self._timed_store(missing)

    def clear(self) -> None:
        """Empty the store and its index on the disk, so that the next round does not include the
        commit that removes rows."""
        self.store.clear()
        self._live.clear()
        index = self.store._state.index
        deadline = time.monotonic() + _SECONDS
        while index.free.count < index.num_slots:
            if time.monotonic() > deadline:
                raise WrongWork("the store did not get empty")
            time.sleep(0.002)

    def look_ups_while_churning(self) -> float:
        """Return keys per second of batched look-ups, while another thread replaces blocks."""
        self.fill()
        batches = [
            [key_of(self._rng.randrange(2 * self._num_keys)) for _ in range(LOOK_UP_KEYS)]
            for _ in range(64)
        ]
        end = time.perf_counter() + _LOOK_UP_SECONDS

        def turn() -> None:
            while time.perf_counter() < end:
                self._timed_store(self._batch * BATCHES_IN_FLIGHT, evicting=True)

        with ThreadPoolExecutor(1) as thread:
            turning = thread.submit(turn)
            count, began = 0, time.perf_counter()
            while time.perf_counter() < end:
                self.store.lookup(batches[count % len(batches)])
                count += 1
            rate = count * LOOK_UP_KEYS / (time.perf_counter() - began)
            turning.result(_SECONDS)
        return rate

    def close(self) -> None:
        """Close store, limit and slab. Raises WrongWork if the store has had any fault."""
        stats = self.store.stats()
        self.store.close(_SECONDS)
        self.limit.close()
        self._buffers.clear()
        self.slab.close()
        if stats.rejected or stats.errors:
            raise WrongWork(f"the store met faults: {stats.rejected} {stats.errors}")

    def _written(self, name: str, ours: Callable[[], float], num_bytes: int) -> Comparison:
        """Return a comparison with the disk's durable writes if the store is durable, else with
        plain writes. The other kind of limit is only reported."""
        kind, size = self.limit.name, self._batch * self._size
        written: dict[str, Callable[[], float]] = {kind: partial(self.limit.write, num_bytes)}
        durable: dict[str, Callable[[], float]] = {
            f"{kind}+sync": partial(self.limit.write_durably, num_bytes, size),
            "loop+sync": partial(self.limit.write_in_turn, num_bytes, size),
        }
        decide, shown = (durable, written) if self._is_durable else (written, durable)
        (limit, work), *rivals = decide.items()
        return Comparison(
            name, "bytes/s", limit, ours, work, rivals=dict(rivals) | shown, shown=tuple(shown)
        )

    def _timed_store(self, count: int, *, evicting: bool = False) -> float:
        """Store `count` new blocks until the last acknowledgement; return bytes per second."""

        def store(batch: list[bytes], buffers: list[memoryview]) -> Future[list[Stored]]:
            if evicting:
                self.store.drop([self._take_victim() for _ in batch])
            return self.store.store(batch, buffers)

        def check(batch: list[bytes], outcomes: list[Stored]) -> None:
            if outcomes.count(Stored.KEPT) != len(outcomes):
                raise WrongWork("the store did not keep a new block")
            self._live += batch

        keys = [key_of(self._num_keys + i) for i in range(count)]
        self._num_keys += count
        return self._move(keys, store, check)

    def _take_victim(self) -> bytes:
        place = self._rng.randrange(len(self._live))
        self._live[place], self._live[-1] = self._live[-1], self._live[place]
        return self._live.pop()

    def _move(
        self,
        keys: list[bytes],
        begin: Callable[[list[bytes], list[memoryview]], Future[_T]],
        check: Callable[[list[bytes], _T], None],
    ) -> float:
        """Move the blocks of `keys` in batches, as soon as buffers are free; return bytes per
        second."""
        flying: deque[tuple[list[bytes], Future[_T], list[memoryview]]] = deque()

        def end_first() -> None:
            batch, future, buffers = flying.popleft()
            check(batch, future.result(_SECONDS))
            self._buffers.append(buffers)

        began = time.perf_counter()
        for start in range(0, len(keys), self._batch):
            batch = keys[start : start + self._batch]
            if not self._buffers:
                end_first()
            buffers = self._buffers.popleft()
            flying.append((batch, begin(batch, buffers[: len(batch)]), buffers))
        while flying:
            end_first()
        return len(keys) * self._size / (time.perf_counter() - began)


NAMES = ("checksum_cost_read_2MiB", "checksum_cost_write_2MiB")


def checksum_comparisons(case: StoreCase) -> list[Comparison]:
    """Return the comparisons of reads and of writes with hashing and without hashing."""
    return [
        Comparison(name, "bytes/s", "no hashing", work, _plainly(work))
        for name, work in zip(NAMES, (case.read, case.write), strict=True)
    ]


def cost(ratio: float) -> float:
    """Return the time of hashing, as a share of the time without hashing, from a ratio of rates."""
    return 1 / ratio - 1


def _plainly(work: Callable[[], float]) -> Callable[[], float]:
    def plain() -> float:
        with (
            patch.multiple(record, payload_digest=lambda _payload: NO_TAG),
            patch.multiple(record_writer, payload_digest=lambda _payload: NO_TAG),
            patch.multiple(reader, verify_record=lambda *_record: Proof(NO_TAG, NO_TAG)),
        ):
            return work()

    return plain


_ROUNDS = 9
_SEED = 5


def measure_codecs(rounds: int = _ROUNDS) -> dict[str, dict[str, Any]]:
    """Return figures by codec and dtype: the `ratio` of bytes, and rates in bytes of uncompressed
    blocks per second."""
    found = {}
    for dtype in DTYPES:
        layout = BlockLayout(32, 16, 8, 2**8 // DTYPES[dtype].itemsize, dtype)
        for make in (*CODECS.values(), Fp8Codec):
            codec = make(layout)
            found[f"{codec.name}_{dtype}"] = _codec_figures(codec, rounds)
    return found


def print_codecs(report: Report) -> None:
    """Print a row for each codec and dtype."""
    rows = [
        [name.replace("_", " ", 1), f"{each['ratio']:.2f}"]
        + [f"{median(each[rates]) / 1e9:.2f}" for rates in ("encode", "decode")]
        for name, each in report.figures["codecs"].items()
    ]
    columns = ["codec", "bytes left", "encode GB/s", "decode GB/s"]
    print_table("Codecs, one thread, normal numbers, blocks of 2 MiB", columns, rows)


def _codec_figures(codec: Codec, rounds: int) -> dict[str, Any]:
    payload, out, back = make_buffers(3, codec.layout)
    dtype = DTYPES[codec.layout.kv_dtype]
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randn(codec.layout.page_bytes // dtype.itemsize, generator=generator)
    torch.frombuffer(payload, dtype=dtype).copy_(numbers)
    used = codec.encode(payload, out)
    if used is None:
        raise WrongWork(f"the codec {codec.name} has no encoding for normal numbers")
    encoded = out[:used]
    codec.decode(encoded, back)
    if codec.is_lossless and back != payload:
        raise WrongWork(f"the codec {codec.name} gave other bytes back")
    size = len(payload)
    return {
        "ratio": used / size,
        "encode": [_codec_rate(lambda: codec.encode(payload, out), size) for _ in range(rounds)],
        "decode": [_codec_rate(lambda: codec.decode(encoded, back), size) for _ in range(rounds)],
    }


def _codec_rate(work: Callable[[], object], num_bytes: int) -> float:
    began = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - began)
