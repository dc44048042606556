# SPDX-License-Identifier: Apache-2.0
"""The worker's block tables: which block holds which tokens of which row of the batch.

The table lives in host memory; on a CPU that is where the attention reads it too. A device keeps a
copy, and is sent what changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..batch.batch_update import IntArray
from ..cache.kv_block import BlockIds

BlockArray = npt.NDArray[np.int32]

_NO_PLACES: IntArray = np.zeros(0, np.int64)
_NO_BLOCKS: BlockArray = np.zeros(0, np.int32)


class BlockTable:
    """Rows of block ids of one cache group."""

    def __init__(self, max_rows: int, max_blocks_per_row: int, block_size: int) -> None:
        """`block_size` is in tokens."""
        self.block_size = block_size
        # Zero is the null block, so entries past a row's end can be read without harm.
        self.array: BlockArray = np.zeros((max_rows, max_blocks_per_row), np.int32)
        self.num_blocks: BlockArray = np.zeros(max_rows, np.int32)
        self._changed: dict[int, int] = {}  # row → its first entry that changed

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Add blocks at the end of a row."""
        if len(block_ids) == 0:
            return
        ids = np.asarray(block_ids, np.int32)
        start = int(self.num_blocks[row])
        end = start + len(ids)
        if end > self.array.shape[1]:
            raise ValueError(f"row {row} takes {self.array.shape[1]} blocks, and {end} are given")
        self.array[row, start:end] = ids
        self.num_blocks[row] = end
        self._changed[row] = min(start, self._changed.get(row, start))

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        """Replace a row."""
        self.num_blocks[row] = self._changed[row] = 0
        self.append_row(block_ids, row)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another one; the source keeps its entries until it is reused."""
        count = self.num_blocks[source]
        self.array[target, :count] = self.array[source, :count]
        self.num_blocks[target] = count
        self._changed[target] = 0

    def take_changes(self) -> tuple[IntArray, IntArray, BlockArray]:
        """The entries that changed since the last call: row, place in the row, and block. For
        whoever keeps a copy; what lies behind a row's end may differ there."""
        rows, places, blocks = [_NO_PLACES], [_NO_PLACES], [_NO_BLOCKS]
        for row, start in self._changed.items():
            end = int(self.num_blocks[row])
            rows.append(np.full(end - start, row))
            places.append(np.arange(start, end))
            blocks.append(self.array[row, start:end])
        self._changed = {}
        return np.concatenate(rows), np.concatenate(places), np.concatenate(blocks)

    def row(self, row: int) -> BlockArray:
        """A view of a row's blocks."""
        return self.array[row, : self.num_blocks[row]]

    def block_ids(self, row: int) -> list[int]:
        """A copy of a row's blocks, as a list."""
        ids: list[int] = self.row(row).tolist()
        return ids

    def slot_mapping(self, rows: npt.NDArray[np.integer], positions: IntArray) -> IntArray:
        """The slot (block * block_size + offset) of each position of each row, int64. The positions
        must lie within the blocks of their row."""
        size = self.block_size
        starts: IntArray = self.array[rows, positions // size].astype(np.int64) * size
        return starts + positions % size


class MultiGroupBlockTable:
    """One table for each cache group; rows change in all of them at once."""

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self.tables = tuple(tables)
        self.no_blocks: BlockIds = tuple([] for _ in self.tables)

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

    def block_ids(self, row: int) -> BlockIds:
        """A row's blocks in each group."""
        return tuple([table.block_ids(row) for table in self.tables])

    def slot_mapping(self, rows: npt.NDArray[np.integer], positions: IntArray) -> list[IntArray]:
        """The slots in each group."""
        return [table.slot_mapping(rows, positions) for table in self.tables]
