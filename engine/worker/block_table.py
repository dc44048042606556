# SPDX-License-Identifier: Apache-2.0
"""The worker's block tables: which block holds which tokens of which row of the batch.

The table lives in host memory; on a CPU that is where the attention reads it too.

Context parallelism spreads a request over several ranks: every block of the table then stands for
as many blocks' worth of positions, dealt out to the ranks in runs, and the slot of a position that
another rank holds is -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..batch.batch_update import IntArray
from ..cache.kv_block import BlockIds

BlockArray = npt.NDArray[np.int32]

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """This worker's place among those that share a request's positions."""

    rank: int = 0
    size: int = 1
    interleave: int = 1  # positions in a run

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.interleave < 1:
            raise ValueError(f"{self} needs 0 <= rank < size and an interleave of at least 1")


class BlockTable:
    """Rows of block ids of one cache group.

    Where kernels want smaller blocks than the pool allocates, an allocated block `b` stands in the
    table as the kernel blocks `b*n … b*n + n-1`, and slots count in kernel blocks.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks_per_row: int,
        block_size: int,
        *,
        kernel_block_size: int | None = None,
        parallel: ContextParallel | None = None,
    ) -> None:
        """Sizes in tokens; `max_blocks_per_row` counts allocated blocks."""
        self.block_size = kernel_block_size or block_size
        if block_size % self.block_size:
            raise ValueError(
                f"the kernel block size {kernel_block_size} must divide the block size {block_size}"
            )
        self._split = block_size // self.block_size
        self._parallel = parallel or ContextParallel()
        # Zero is the null block, so entries past a row's end can be read without harm.
        self.array: BlockArray = np.zeros((max_rows, max_blocks_per_row * self._split), np.int32)
        self.num_blocks: BlockArray = np.zeros(max_rows, np.int32)

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Add blocks at the end of a row."""
        if len(block_ids) == 0:
            return
        ids = np.asarray(block_ids, np.int32)
        if self._split > 1:
            ids = split_blocks(ids, self._split)
        start = int(self.num_blocks[row])
        end = start + len(ids)
        if end > self.array.shape[1]:
            raise ValueError(f"row {row} takes {self.array.shape[1]} blocks, and {end} are given")
        self.array[row, start:end] = ids
        self.num_blocks[row] = end

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        """Replace a row."""
        self.num_blocks[row] = 0
        self.append_row(block_ids, row)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another one; the source keeps its entries until it is reused."""
        count = self.num_blocks[source]
        self.array[target, :count] = self.array[source, :count]
        self.num_blocks[target] = count

    def swap_row(self, first: int, second: int) -> None:
        """Exchange two rows."""
        pair, other = [first, second], [second, first]
        self.num_blocks[pair] = self.num_blocks[other]
        self.array[pair] = self.array[other]

    def row(self, row: int) -> BlockArray:
        """A view of a row's blocks."""
        return self.array[row, : self.num_blocks[row]]

    def block_ids(self, row: int) -> list[int]:
        """A row's blocks as they were given to it."""
        ids: list[int] = (self.row(row)[:: self._split] // self._split).tolist()
        return ids

    def slot_mapping(self, rows: npt.NDArray[np.integer], positions: IntArray) -> IntArray:
        """The slot (block * block_size + offset) of each position of each row, int64, -1 where
        another rank holds it. The positions must lie within the blocks of their row."""
        size, ranks, run = self.block_size, self._parallel.size, self._parallel.interleave
        if ranks == 1:
            starts: IntArray = self.array[rows, positions // size].astype(np.int64) * size
            return starts + positions % size
        within = positions % (size * ranks)
        blocks = self.array[rows, positions // (size * ranks)].astype(np.int64)
        offsets = within // (ranks * run) * run + within % run
        mine = within // run % ranks == self._parallel.rank
        return np.where(mine, blocks * size + offsets, NO_SLOT)


class MultiGroupBlockTable:
    """One table for each cache group; rows change in all of them at once."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)

    def __getitem__(self, group: int) -> BlockTable:
        return self.tables[group]

    def append_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.append_row(ids, row)

    def add_row(self, block_ids: Sequence[Sequence[int]], row: int) -> None:
        for table, ids in zip(self.tables, block_ids, strict=True):
            table.add_row(ids, row)

    def move_row(self, source: int, target: int) -> None:
        for table in self.tables:
            table.move_row(source, target)

    def swap_row(self, first: int, second: int) -> None:
        for table in self.tables:
            table.swap_row(first, second)

    def block_ids(self, row: int) -> BlockIds:
        """A row's blocks in each group."""
        return tuple([table.block_ids(row) for table in self.tables])

    def slot_mapping(self, rows: npt.NDArray[np.integer], positions: IntArray) -> list[IntArray]:
        """The slots in each group."""
        return [table.slot_mapping(rows, positions) for table in self.tables]


def split_blocks(block_ids: BlockArray, parts: int) -> BlockArray:
    """Kernel blocks of allocated blocks: with two parts, [0, 1, 2] becomes [0, 1, 2, 3, 4, 5]."""
    inner = np.arange(parts, dtype=np.int32)
    return (block_ids[:, None] * np.int32(parts) + inner).reshape(-1)
