# SPDX-License-Identifier: Apache-2.0
"""Split plans of paged decode. A plan assigns a part of a request's context to each program, and is
computed from the lengths of the step's requests.

    lengths of the step ──► tiles per program (share) ──► list of (request, split), one per program
    2 requests of 5 and 2 tiles, share 2:   (0, 0) (0, 1) (0, 2) (1, 0) (-1, ·) (-1, ·)

The list has a fixed length that suffices for any batch, so that its address and the grid stay the
same in a CUDA graph; unused entries are -1. Without a plan, the splits are computed from the width
of the block table, which depends on the longest possible request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .paged_decode_launch import PROGRAM_TILES

NO_REQUEST = -1
# The programs of a kv head beyond one per request, as a multiple of the programs that run side by
# side. With 2, contexts of any lengths can be split so that no multiprocessor is idle for long.
ROUNDS = 2
_CANDIDATES = 12
_ALIGNED = 4  # int32 numbers in 16 bytes, Triton's alignment of arrays

IntArray = npt.NDArray[np.integer]


class SplitPlan(NamedTuple):
    """A split plan as int32 tensors, the form that the kernel reads."""

    share: Tensor  # [1]: the most tiles that a program computes
    first_items: Tensor  # [requests]: the index of each request's first item
    requests: Tensor  # [items]: the request of each item, or NO_REQUEST
    splits: Tensor  # [items]: the number of each item's split in its request, from 0


@dataclass(frozen=True, slots=True)
class SplitPlanner:
    """The sizes from which the split plans of a model on a device are computed. A tile has `tile`
    tokens. The device runs `slots` programs of a kv head in parallel. A split has at least
    `min_tiles` tiles."""

    tile: int
    slots: int
    min_tiles: int

    def num_items(self, num_requests: int) -> int:
        """Return the number of entries in the list of a plan for `num_requests` requests."""
        return _aligned(num_requests + ROUNDS * self.slots)

    def num_words(self, max_requests: int) -> int:
        return _ALIGNED + _aligned(max_requests) + 2 * self.num_items(max_requests)

    def tiles(self, lengths: npt.NDArray[np.integer], window: int | None) -> IntArray:
        """Return the number of tiles of each request, int32 `[requests]`; `lengths` and `window`
        are in tokens."""
        first = 0 if window is None else np.maximum(lengths - window, 0) // self.tile
        tiles: IntArray = (-(-lengths // self.tile) - first).astype(np.int32)
        return tiles

    def share(self, tiles: IntArray) -> int:
        """Return the number of tiles per program with the shortest estimated time. The estimate is
        the time of the rounds in which the device runs large splits, plus the summed time of the
        small splits divided by `slots`."""
        longest, total = int(tiles.max()), int(tiles.sum())
        room = ROUNDS * self.slots
        least = max(self.min_tiles, -(-total // room))
        if longest <= least:
            return least
        parts = np.arange(1, _CANDIDATES + 1)
        shares = np.concatenate([-(-longest // parts), -(-total // (self.slots * parts))])
        shares = np.unique(np.maximum(shares, least))
        whole, rest = np.divmod(tiles[:, None], shares)
        is_large = 2 * rest > shares
        large = (whole + is_large).sum(0)
        small = np.where(is_large | (rest == 0), 0, rest + PROGRAM_TILES)
        rounds = -(-large // self.slots) * (np.minimum(shares, longest) + PROGRAM_TILES)
        time = rounds + small.sum(0) / self.slots
        # Among equally fast shares, the largest has the fewest splits to combine.
        best = len(shares) - 1 - int(np.argmin(time[::-1]))
        return int(shares[best])


class PlanArray:
    """The layout of a plan in one array, so that one copy moves it to the device:

    share · first item of each request · request of each item · split of each item"""

    def __init__(self, planner: SplitPlanner, max_requests: int) -> None:
        self._planner = planner
        self._items = planner.num_items(max_requests)
        self._first = _ALIGNED
        self._requests = self._first + _aligned(max_requests)
        self._splits = self._requests + self._items

    def lay_down(self, array: IntArray, tiles: IntArray) -> None:
        """Write the plan to `array` `[num_words]`; `tiles` has the number of tiles of each request.
        A request with 0 tiles has no program; the combine kernel sets its result to zero."""
        share = self._planner.share(tiles)
        counts = -(-tiles // share)
        ends = np.cumsum(counts)
        firsts, total = ends - counts, int(ends[-1])
        array[0] = share
        array[self._first : self._first + len(tiles)] = firsts
        array[self._requests : self._requests + total] = np.repeat(np.arange(len(tiles)), counts)
        array[self._requests + total : self._splits] = NO_REQUEST
        array[self._splits : self._splits + total] = np.arange(total) - np.repeat(firsts, counts)

    def view_plan(self, there: Tensor, num_requests: int) -> SplitPlan:
        """Return the plan of the first `num_requests` requests, as views of `there`
        `[num_words]`."""
        items = self._planner.num_items(num_requests)
        return SplitPlan(
            there[:1],
            there[self._first : self._first + num_requests],
            there[self._requests : self._requests + items],
            there[self._splits : self._splits + items],
        )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
