# SPDX-License-Identifier: Apache-2.0
"""Looks at an LMDB file for damage: `python scan.py FOLDER`, run in a process of its own.

LMDB trusts its file. A page that is missing, zeroed or out of bounds ends the process that reads
or writes it, so this looks first: at the structure of every page in use and of the list of free
pages by hand, then, in case something was overlooked, with LMDB itself. Payload bytes (keys and
values) are not judged; records are verified when they are read.

Exit status 0: sound. 1: damaged, the reason on standard output. Killed by a signal: damaged.
Imports nothing of ours, so that it starts fast and wherever it lies.

Page: pgno u64, pad u16, flags u16, lower u16, upper u16, offsets of nodes u16 each, ... nodes.
Node: low u16, high u16, flags u16, key size u16, key, data. In a leaf low|high is the data size;
in a branch low|high|flags is the child's page number.
"""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_TAIL = struct.Struct("<QQ")
_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_BRANCH, _LEAF, _OVERFLOW, _META_FLAG = 1, 2, 4, 8
_BIG, _SUBTREE = 1, 2
_EMPTY = 2**64 - 1
_MAX_DEPTH = 32  # LMDB's own limit


class Damage(Exception):
    """What is wrong, in a few words."""


class Tree(NamedTuple):
    """The root record of one B-tree."""

    page_size: int  # only in the first tree of a meta page
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class Meta(NamedTuple):
    """One of the two pages that a file begins with."""

    free: Tree
    main: Tree
    last_page: int
    transaction: int


class PageScan:
    """Walks the newest snapshot of one file; raises Damage at the first thing that is wrong."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = _page_size(data)
        self._meta = newest_meta(data, self._size)
        if (self._meta.last_page + 1) * self._size > len(data):
            raise Damage(f"the file has {len(data)} bytes and page {self._meta.last_page} in use")
        self._seen = bytearray(self._meta.last_page + 1)
        self._seen[0] = self._seen[1] = 1

    def check(self) -> None:
        """Every tree, then the free pages, which no tree may use."""
        self._check_tree(self._meta.main, free_list=False)
        free_values = self._check_tree(self._meta.free, free_list=True)
        for start, size in free_values:
            count = self._number(start)
            if size != 8 * (count + 1):
                raise Damage("a list of free pages has a wrong length")
            for page in struct.unpack_from(f"<{count}Q", self._data, start + 8):
                self._claim(page)

    def _check_tree(self, tree: Tree, *, free_list: bool) -> list[tuple[int, int]]:
        """Offsets and sizes of all values, of a free list; of another tree nothing."""
        if tree.root == _EMPTY:
            if tree.entries or tree.depth:
                raise Damage("a tree without a root claims to have entries")
            return []
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise Damage(f"a tree of depth {tree.depth}")
        level, entries, values = [tree.root], 0, []
        for depth in range(tree.depth, 0, -1):
            below: list[int] = []
            for page in level:
                if depth > 1:
                    below += self._check_branch(page)
                else:
                    found = self._check_leaf(page)
                    entries += len(found)
                    if free_list:
                        values += found
            level = below
        if entries != tree.entries:
            raise Damage(f"a tree has {entries} entries instead of {tree.entries}")
        return values

    def _check_branch(self, page: int) -> list[int]:
        base, offsets = self._check_page(page, _BRANCH)
        children = []
        for offset in offsets:
            low, high, flags, key_size = _NODE.unpack_from(self._data, base + offset)
            if offset + _NODE.size + key_size > self._size:
                raise Damage(f"a node of page {page} runs over its end")
            children.append(low | high << 16 | flags << 32)
        if len(children) < 2:
            raise Damage(f"branch page {page} has {len(children)} children")
        return children

    def _check_leaf(self, page: int) -> list[tuple[int, int]]:
        """Offset and size of each value."""
        base, offsets = self._check_page(page, _LEAF)
        values = []
        for offset in offsets:
            low, high, flags, key_size = _NODE.unpack_from(self._data, base + offset)
            start, size = offset + _NODE.size + key_size, low | high << 16
            stored = 8 if flags & _BIG else size
            if start + stored > self._size or not key_size:
                raise Damage(f"a node of page {page} runs over its end")
            if flags & ~(_BIG | _SUBTREE):
                raise Damage(f"a node of page {page} has flags {flags:#x}")
            if flags & _BIG:
                values.append((self._check_overflow(self._number(base + start), size), size))
                continue
            values.append((base + start, size))
            if flags & _SUBTREE:
                if size != _TREE.size:
                    raise Damage(f"a tree record of page {page} has {size} bytes")
                subtree = Tree(*_TREE.unpack_from(self._data, base + start))
                self._check_tree(subtree, free_list=False)
        return values

    def _check_page(self, page: int, kind: int) -> tuple[int, tuple[int, ...]]:
        """Where the page begins, and the offsets of its nodes, all within the page."""
        self._claim(page)
        base = page * self._size
        number, _pad, flags, lower, upper = _PAGE.unpack_from(self._data, base)
        if number != page or flags != kind:
            raise Damage(f"page {page} says number {number}, flags {flags:#x}")
        if not (_PAGE.size < lower <= upper <= self._size) or lower % 2:
            raise Damage(f"page {page} has bounds {lower} and {upper}")
        count = (lower - _PAGE.size) // 2
        offsets = struct.unpack_from(f"<{count}H", self._data, base + _PAGE.size)
        if min(offsets) < upper or max(offsets) + _NODE.size > self._size:
            raise Damage(f"page {page} points outside of itself")
        return base, offsets

    def _check_overflow(self, page: int, size: int) -> int:
        """Claim the pages of a large value; where its bytes begin."""
        if page > self._meta.last_page:
            raise Damage(f"page {page} is beyond the last page")
        base = page * self._size
        number, _pad, flags = struct.unpack_from("<QHH", self._data, base)
        (count,) = struct.unpack_from("<I", self._data, base + 12)
        if number != page or flags != _OVERFLOW or count * self._size < size + _PAGE.size:
            raise Damage(f"page {page} does not hold the {size} bytes it should")
        if page + count > self._meta.last_page + 1:
            raise Damage(f"page {page} runs over the last page")
        for each in range(page, page + count):
            self._claim(each)
        return base + _PAGE.size

    def _claim(self, page: int) -> None:
        if not 2 <= page <= self._meta.last_page:
            raise Damage(f"page {page} is outside of the file's pages")
        if self._seen[page]:
            raise Damage(f"page {page} is used twice")
        self._seen[page] = 1

    def _number(self, offset: int) -> int:
        (number,) = struct.unpack_from("<Q", self._data, offset)
        return int(number)


def _page_size(data: mmap.mmap) -> int:
    if len(data) < 512:
        raise Damage(f"the file has {len(data)} bytes")
    size = Tree(*_TREE.unpack_from(data, _PAGE.size + _META.size)).page_size
    if not 512 <= size <= 65536 or size & (size - 1) or 2 * size > len(data):
        raise Damage(f"a page size of {size}")
    return size


def newest_meta(data: mmap.mmap, page_size: int) -> Meta:
    """The meta page of the last commit; LMDB wants both of them valid."""
    metas = []
    for page in (0, 1):
        base = page * page_size
        number, _pad, flags, _lower, _upper = _PAGE.unpack_from(data, base)
        magic, version, _address, _map = _META.unpack_from(data, base + _PAGE.size)
        if (number, flags, magic, version) != (page, _META_FLAG, _MAGIC, _DATA_VERSION):
            raise Damage(f"meta page {page} is not one")
        start = base + _PAGE.size + _META.size
        trees = [Tree(*_TREE.unpack_from(data, start + i * _TREE.size)) for i in (0, 1)]
        last, transaction = _TAIL.unpack_from(data, start + 2 * _TREE.size)
        metas.append(Meta(trees[0], trees[1], last, transaction))
    return max(metas, key=lambda meta: meta.transaction)


def read_with_lmdb(folder: Path) -> None:
    """Read every row the way the store will."""
    try:
        import lmdb
    except ImportError:
        return  # found by the store in a way that this process does not know; the scan has to do
    try:
        with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=2, create=False) as env:
            with env.begin() as txn, txn.cursor() as cursor:
                names = [bytes(name) for name in cursor.iternext(values=False)]
            for name in names:
                table = env.open_db(name, create=False)
                with env.begin(db=table) as txn, txn.cursor() as cursor:
                    for _row in cursor:
                        pass
    except lmdb.Error as error:
        raise Damage(str(error)) from error


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    try:
        with (
            (folder / "data.mdb").open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            PageScan(data).check()
        read_with_lmdb(folder)
    except (Damage, OSError, ValueError, struct.error, RecursionError) as error:
        print(error)  # noqa: T201 - read by the process that asked
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
