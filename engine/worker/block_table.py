# SPDX-License-Identifier: Apache-2.0
"""BlockTable: the worker's block tables, which have the block ids of each row of the batch.

A table is in host memory, where attention on the CPU reads it. A GPU has a copy, to which only the
changes are sent.

Attention may read smaller blocks than those of the pool. A table then has several entries for each
block of the pool:

    blocks of 32 tokens            7        3
    entries of 16 tokens         14 15     6 7"""

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
    """The block ids of one cache group, one row for each request."""

    def __init__(
        self,
        max_rows: int,
        max_blocks_per_row: int,
        block_size: int,
        kernel_block_size: int | None = None,
    ) -> None:
        """`block_size` is the number of tokens in a block of the pool, `kernel_block_size` the
        number in an entry of the table (default: `block_size`). Raises ValueError if
        `kernel_block_size` does not divide `block_size`."""
        self.given_size = block_size  # tokens of a block
        self.block_size = kernel_block_size or block_size  # tokens of a table entry
        self._entries_per_block, rest = divmod(block_size, self.block_size)
        if rest:
            raise ValueError(
                f"blocks of {block_size} tokens cannot be read as blocks of {kernel_block_size}; "
                f"take a divisor of {block_size}"
            )
        self._split = np.arange(self._entries_per_block, dtype=np.int32)
        # Entry 0 is the null block, so entries after a row's end are safe to read.
        width = max_blocks_per_row * self._entries_per_block
        self.array: BlockArray = np.zeros((max_rows, width), np.int32)
        self.num_entries: BlockArray = np.zeros(max_rows, np.int32)
        # For each reader: row → its first changed entry.
        self._changed: dict[object, dict[int, int]] = {}

    def append_row(self, block_ids: Sequence[int], row: int) -> None:
        """Add blocks at the end of a row."""
        if len(block_ids) == 0:
            return
        ids = np.asarray(block_ids, np.int32)
        if self._entries_per_block > 1:
            ids = (ids[:, None] * self._entries_per_block + self._split).reshape(-1)
        start = int(self.num_entries[row])
        end = start + len(ids)
        if end > self.array.shape[1]:
            most, given = (n // self._entries_per_block for n in (self.array.shape[1], end))
            raise ValueError(f"row {row} takes {most} blocks, and {given} are given")
        self.array[row, start:end] = ids
        self.num_entries[row] = end
        self._note_changed(row, start)

    def add_row(self, block_ids: Sequence[int], row: int) -> None:
        self.num_entries[row] = 0
        self._note_changed(row, 0)
        self.append_row(block_ids, row)

    def replace_block(self, row: int, index: int, block_id: int) -> None:
        """Replace the block at `index` of a row."""
        start = index * self._entries_per_block
        self.array[row, start : start + self._entries_per_block] = (
            block_id * self._entries_per_block + self._split
        )
        self._note_changed(row, start)

    def move_row(self, source: int, target: int) -> None:
        """Copy a row over another row. The source keeps its entries until it is reused."""
        count = self.num_entries[source]
        self.array[target, :count] = self.array[source, :count]
        self.num_entries[target] = count
        self._note_changed(target, 0)

    def trim_row(self, row: int, num_blocks: int) -> None:
        """Drop the blocks of a row after its first `num_blocks`."""
        most = num_blocks * self._entries_per_block
        if self.num_entries[row] > most:
            self.num_entries[row] = most

    def take_changes(self, reader: object) -> tuple[IntArray, IntArray, BlockArray]:
        """Return the entries that changed since this reader's last call, or all entries at its
        first call. The three arrays are the row, the index in the row, and the block id of each
        entry. Entries after the end of a row are not returned, so the reader's copy may differ in
        them."""
        changed = self._changed.get(reader)
        if changed is None:
            changed = dict.fromkeys(np.flatnonzero(self.num_entries).tolist(), 0)
        rows, places, blocks = [_NO_PLACES], [_NO_PLACES], [_NO_BLOCKS]
        for row, start in changed.items():
            end = int(self.num_entries[row])
            rows.append(np.full(end - start, row))
            places.append(np.arange(start, end))
            blocks.append(self.array[row, start:end])
        self._changed[reader] = {}
        return np.concatenate(rows), np.concatenate(places), np.concatenate(blocks)

    def _note_changed(self, row: int, start: int) -> None:
        for changed in self._changed.values():
            changed[row] = min(start, changed.get(row, start))

    def view_row(self, row: int) -> BlockArray:
        return self.array[row, : self.num_entries[row]]

    def block_ids(self, row: int) -> list[int]:
        """Return the ids of a row's blocks in the pool's numbering."""
        step = self._entries_per_block
        ids: list[int] = (self.view_row(row)[::step] // step).tolist()
        return ids

    def slot_mapping(self, rows: npt.NDArray[np.integer], positions: IntArray) -> IntArray:
        """Return the slot (block * block_size + offset), int64, of each pair of row and position.
        Each position must lie within the blocks of its row."""
        size = self.block_size
        starts: IntArray = self.array[rows, positions // size].astype(np.int64) * size
        return starts + positions % size


class MultiGroupBlockTable:
    """The block tables of all cache groups; each change of a row applies to all of them."""

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

    def trim_row(self, row: int, num_tokens: int) -> int:
        """Drop the blocks of a row that its first `num_tokens` do not need. Return the number of
        tokens for which the remaining blocks have slots."""
        size = self.tables[0].given_size
        num_blocks = -(-num_tokens // size)
        for table in self.tables:
            table.trim_row(row, num_blocks)
        return num_blocks * size

    def block_ids(self, row: int) -> BlockIds:
        return tuple([table.block_ids(row) for table in self.tables])

    def slot_mapping(self, rows: npt.NDArray[np.integer], positions: IntArray) -> list[IntArray]:
        return [table.slot_mapping(rows, positions) for table in self.tables]
