# SPDX-License-Identifier: Apache-2.0
"""Plans copy jobs, without a device: addresses, runs of neighbouring blocks and ways to copy.

    job   block ids and slots
     ├─ slots that are page-locked      → one batch, by the copy engine or by a capped kernel
     └─ slots that are not (or not yet) → through a page-locked buffer, or by the driver

Sources are always read in the order of the stream. Stores need this order, because a kernel queued
before may still write the block. CUDA could read the source of a load before earlier work of the
stream has ended. But a store in the other stream may still write the slot, so loads need the order
too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ...kernels.copy.copy_engine import Batch
from ...tiers.errors import InvalidBlock
from .base import Stream

ABOUT_AS_FAST = 0.95
# The factor by which a kernel must be faster, because a kernel takes time from computing.
KERNEL_GAIN = 1.5
# The block size below which the copy engine is slow, so that a kernel is measured too.
FRAGMENT_BYTES = 64 << 10


class Way(Enum):
    """A way to copy bytes."""

    BATCHED = "one call for all"
    SINGLE = "one call each"
    KERNEL = "a kernel of few programs"
    STAGED = "through a page-locked buffer"
    PAGEABLE = "as the driver copies ordinary memory"


# Of ways about as fast, the first is chosen, because it is cheaper to submit.
LOCKED_WAYS = (Way.BATCHED, Way.SINGLE, Way.KERNEL)
PAGEABLE_WAYS = (Way.PAGEABLE, Way.STAGED)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The addresses and sizes of blocks and slots. The slab is page-locked in pieces of
    `piece_slots` neighbouring slots; CUDA refuses a copy that spans two pieces."""

    pool_address: int
    num_blocks: int
    slab_address: int
    num_slots: int
    page_bytes: int
    slot_bytes: int
    piece_slots: int


Pairs = list[tuple[int, int]]  # (block, slot)


def check_pairs(geometry: Geometry, block_ids: Sequence[int], slots: Sequence[int]) -> None:
    """Raise InvalidBlock for numbers outside the pool or the slab, and for a repeated slot or
    block, because the copies of a batch run in no fixed order."""
    if len(block_ids) != len(slots):
        raise InvalidBlock(f"{len(block_ids)} blocks cannot go to {len(slots)} slots")
    _check("block", block_ids, geometry.num_blocks)
    _check("slot", slots, geometry.num_slots)


def make_pairs(block_ids: Sequence[int], slots: Sequence[int]) -> Pairs:
    """Make pairs of block and slot, sorted by block, so that neighbours follow each other."""
    return sorted(zip(block_ids, slots, strict=True))


def split_locked(pairs: Pairs, num_locked: int) -> tuple[Pairs, Pairs]:
    """Split the pairs into those with page-locked slots (below `num_locked`) and the others."""
    return (
        [pair for pair in pairs if pair[1] < num_locked],
        [pair for pair in pairs if pair[1] >= num_locked],
    )


def make_batch(geometry: Geometry, stream: Stream, pairs: Pairs) -> Batch:
    """Make a batch with one copy for each run of neighbours in one page-locked piece."""
    size, slot_size, piece = geometry.page_bytes, geometry.slot_bytes, geometry.piece_slots
    pool: list[int] = []
    slab: list[int] = []
    sizes: list[int] = []
    next_block = next_slot = -1
    # Plain Python is quicker than arrays for the tens of pairs of a job. Slots longer than pages
    # have gaps between them, so their copies cannot be merged.
    for block, slot in pairs:
        if block == next_block and slot == next_slot and slot % piece and size == slot_size:
            sizes[-1] += size
        else:
            pool.append(geometry.pool_address + block * size)
            slab.append(geometry.slab_address + slot * slot_size)
            sizes.append(size)
        next_block, next_slot = block + 1, slot + 1
    return Batch(pool, slab, sizes) if stream is Stream.STORE else Batch(slab, pool, sizes)


def cut(batch: Batch, most_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the copies, each `(source, target, size)`, in groups of at most `most_bytes`. A copy
    that does not fit into a group is cut."""
    group: list[tuple[int, int, int]] = []
    room = most_bytes
    table = (batch.sources.tolist(), batch.targets.tolist(), batch.sizes.tolist())
    for source, target, size in zip(*table, strict=True):
        done = 0
        while done < size:
            length = min(room, size - done)
            group.append((source + done, target + done, length))
            done += length
            room -= length
            if not room:
                yield group
                group, room = [], most_bytes
    if group:
        yield group


def choose_locked(rates: Mapping[Way, float]) -> Way:
    """Choose the way to copy between the pool and page-locked slots from the bytes per second of
    each way. A kernel takes time from computing, so it must beat the copy engine by KERNEL_GAIN."""
    engine = _choose({way: rate for way, rate in rates.items() if way is not Way.KERNEL})
    if rates.get(Way.KERNEL, 0.0) > KERNEL_GAIN * rates[engine]:
        return Way.KERNEL
    return engine


def choose_pageable(rates: Mapping[Way, float]) -> Way:
    """Choose the way to copy between the pool and pageable memory from their bytes per second."""
    return _choose({way: rate for way, rate in rates.items() if way in PAGEABLE_WAYS})


def _choose(rates: Mapping[Way, float]) -> Way:
    best = max(rates.values())
    good = [way for way in (*LOCKED_WAYS, *PAGEABLE_WAYS) if way in rates]
    return next(way for way in good if rates[way] >= ABOUT_AS_FAST * best)


def _check(what: str, ids: Sequence[int], count: int) -> None:
    if len(ids) == 0:
        return
    if min(ids) < 0 or max(ids) >= count:
        raise InvalidBlock(f"{what} ids go from 0 to {count - 1}, not {min(ids)} to {max(ids)}")
    if len(set(ids)) < len(ids):
        raise InvalidBlock(f"a {what} is named twice in one copy: {list(ids)}")


class Run(NamedTuple):
    """A copy of `length` neighbouring blocks or slots to `length` neighbouring slots or blocks."""

    source: int
    target: int
    length: int


def merge_runs(sources: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """Merge pairs of block and slot into few copies: neighbours on both sides become one run."""
    if not sources:
        return []
    # For the tens of pairs of a job, plain Python takes half the time of arrays.
    runs = []
    source, target, length = sources[0], targets[0], 0
    for next_source, next_target in zip(sources, targets, strict=True):
        if next_source == source + length and next_target == target + length:
            length += 1
        else:
            runs.append(Run(source, target, length))
            source, target, length = next_source, next_target, 1
    runs.append(Run(source, target, length))
    return runs
