# SPDX-License-Identifier: Apache-2.0
"""Checks an LMDB file for damage and reads it. Runs as its own process: `main([FOLDER, *PATHS])`.

LMDB hardly checks its file: a page that is missing, zeroed or out of bounds can kill the process
that reads or writes it. So this process first checks the structure of every page in use and of the
list of free pages, and then reads the file with LMDB, to find damage that the check missed. Rows
are checked only for length and order; the store verifies a record when it reads the record.

Rows are written to standard output, in batches, while the pages are checked. The parent process can
use the rows at once, but only exit status 0 means that the rows are undamaged:
    batch = number of rows u32 little-endian | the slots, 4 bytes each | the values, 64 bytes each
The last batch is empty. The empty batch is written before LMDB reads the file, so that the parent
can process all rows meanwhile. Exit status 0: the file is undamaged, and every row was written. 1:
the file is damaged; standard error has the reason. 2: memory or file descriptors ran short; the
file may be undamaged. If SIGBUS or a similar signal kills the process, the file is damaged too.
PATHS become `sys.path`, so that the Python package `lmdb` is found. Every opening of a store waits
for this process to start, so it imports no module of this project and few others.

Page: pgno u64, pad u16, flags u16, lower u16, upper u16, offsets of nodes u16 each, ... nodes.
Node: low u16, high u16, flags u16, key size u16, key, data. In a leaf low|high is the data size;
in a branch low|high|flags is the child's page number."""

from __future__ import annotations

import errno
import mmap
import struct
import sys
from array import array
from collections import namedtuple
from operator import lt

TYPE_CHECKING = False  # True for type checkers
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import BinaryIO

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
_INTEGER_KEYS = 8  # a flag that only the tree of free pages has
_ROWS = b"slots"  # name of the tree of rows
_SLOT_BYTES, _VALUE_BYTES = 4, 64
_ROW = struct.Struct(f"{_NODE.size + _SLOT_BYTES}x{_VALUE_BYTES}s")  # unpacks a node to its value
_ROW_HEAD = _NODE.pack(_VALUE_BYTES, 0, 0, _SLOT_BYTES)
_BATCH = 16384
_LARGEST_PAGE = 65536

UNABLE = 2
_SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)


class Damage(Exception):
    """The file is damaged; the message describes the damage."""


class Tree(
    namedtuple(
        "Tree",
        "page_size flags depth branch_pages leaf_pages overflow_pages entries root",
    )
):
    """The root record of an LMDB B-tree. `page_size` is set only in a meta page's first tree."""

    __slots__ = ()


class Meta(namedtuple("Meta", "free main last_page transaction")):
    """A meta page (page 0 or 1): the roots of two trees, the last page in use, the transaction."""

    __slots__ = ()


class RowStream:
    """A writer of rows in batches. Rows must be added in the order of their slots."""

    def __init__(self, out: BinaryIO) -> None:
        self.count = 0  # rows written so far
        self._out = out
        self._slots = array("I")
        self._values: list[bytes] = []
        self._last = -1

    def add(self, slots: array[int], values: Sequence[bytes]) -> None:
        self._slots += slots
        self._values += values
        if len(self._slots) >= _BATCH:
            self.write_pending()

    def write_pending(self) -> None:
        """Write the collected rows. Raises Damage for rows that are not in the order of slots."""
        slots, values = self._slots, self._values
        if not slots:
            return
        numbers = slots.tolist()
        if not all(map(lt, [self._last, *numbers], numbers)):
            raise Damage("the rows are not in the order of their slots")
        self._swap(slots)
        self._out.write(struct.pack("<I", len(slots)))
        self._out.write(slots)
        self._out.write(b"".join(values))
        self._out.flush()
        self.count += len(slots)
        self._last = numbers[-1]
        self._slots, self._values = array("I"), []

    def write_terminator(self) -> None:
        self._out.write(bytes(4))
        self._out.flush()

    @staticmethod
    def _swap(slots: array[int]) -> None:
        if sys.byteorder == "little":  # slots are big-endian
            slots.byteswap()

    @classmethod
    def slots_of(cls, raw: bytes | bytearray) -> array[int]:
        """Convert slot numbers from the big-endian bytes of the file."""
        slots = array("I", raw)
        cls._swap(slots)
        return slots


class PageScan:
    """A check of a file's newest snapshot, which adds its rows to `rows`. Raises Damage."""

    def __init__(self, data: mmap.mmap, rows: RowStream) -> None:
        self._data = data
        self._rows = rows
        self._appended: dict[int, tuple[int, ...]] = {}  # see `_take_rows`
        self._size = _page_size(data)
        self._meta = newest_meta(data, self._size)
        if (self._meta.last_page + 1) * self._size > len(data):
            raise Damage(f"the file has {len(data)} bytes and page {self._meta.last_page} in use")
        self._seen = bytearray(self._meta.last_page + 1)
        self._seen[0] = self._seen[1] = 1

    def check_all_pages(self) -> None:
        """Check every tree, then the free pages, which no tree may use."""
        self._check_tree(self._meta.main)
        for start, size in self._check_tree(self._meta.free, free_list=True):
            count = self._number(start)
            if size != 8 * (count + 1):
                raise Damage("a list of free pages has a wrong length")
            for page in struct.unpack_from(f"<{count}Q", self._data, start + 8):
                self._claim(page)
        self._rows.write_pending()

    def _check_tree(
        self, tree: Tree, *, free_list: bool = False, has_rows: bool = False
    ) -> list[tuple[int, int]]:
        """Check a tree. Return the values' offsets and sizes for the free list, else `[]`."""
        if tree.root == _EMPTY:
            if tree.entries or tree.depth:
                raise Damage("a tree without a root claims to have entries")
            return []
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise Damage(f"a tree of depth {tree.depth}")
        if tree.flags != (_INTEGER_KEYS if free_list else 0):
            raise Damage(f"a tree has flags {tree.flags:#x}")
        level, entries, values = [tree.root], 0, []
        for depth in range(tree.depth, 0, -1):
            below: list[int] = []
            for page in level:
                if depth > 1:
                    below += self._check_branch(page)
                elif has_rows:
                    entries += self._take_rows(page)
                else:
                    count, found = self._check_leaf(page)
                    entries += count
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

    def _check_leaf(self, page: int) -> tuple[int, list[tuple[int, int]]]:
        """Check a leaf page. Return the number of its nodes, and each value's offset and size."""
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
                name = self._data[base + start - key_size : base + start]
                self._check_tree(subtree, has_rows=name == _ROWS)
        return len(offsets), values

    def _take_rows(self, page: int) -> int:
        """Check a leaf page of rows, which are nodes of equal size side by side. Add the rows to
        the stream and return their number. Each byte position is compared for all rows of a page
        with one operation, because a Python loop over a million nodes takes too long."""
        base, offsets = self._check_page(page, _LEAF)
        count, first, size = len(offsets), min(offsets), _ROW.size
        if first + count * size != self._size:
            raise Damage(f"page {page} holds more or less than its rows")
        nodes = self._data[base + first : base + self._size]
        for place, byte in enumerate(_ROW_HEAD):
            if nodes[place::size].count(byte) != count:
                raise Damage("a row has a wrong length")
        raw = bytearray(_SLOT_BYTES * count)
        for place in range(_SLOT_BYTES):
            raw[place::_SLOT_BYTES] = nodes[len(_ROW_HEAD) + place :: size]
        slots = RowStream.slots_of(raw)
        values = [value for (value,) in _ROW.iter_unpack(nodes)]
        appended = self._appended.get(first)  # offsets in a page to which rows were only appended
        if appended is None:
            appended = tuple(range(self._size - size, first - 1, -size))
            self._appended[first] = appended
        if offsets == appended:
            self._rows.add(slots[::-1], values[::-1])
            return count
        order = [(offset - first) // size for offset in offsets]
        if offsets != tuple(first + place * size for place in order):
            raise Damage(f"a row of page {page} begins within another")
        self._rows.add(array("I", [slots[i] for i in order]), [values[i] for i in order])
        return count

    def _check_page(self, page: int, kind: int) -> tuple[int, tuple[int, ...]]:
        """Check a page's header. Return the page's offset, and its nodes' offsets in the page."""
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
        """Check the overflow pages of a large value, mark them used. Return the value's offset."""
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


def _page_size(data: mmap.mmap | bytes) -> int:
    if len(data) < 512:
        raise Damage(f"the file has {len(data)} bytes")
    size = int(Tree(*_TREE.unpack_from(data, _PAGE.size + _META.size)).page_size)
    if not 512 <= size <= 65536 or size & (size - 1) or 2 * size > len(data):
        raise Damage(f"a page size of {size}")
    return size


def newest_meta(data: mmap.mmap | bytes, page_size: int) -> Meta:
    """Return the meta page of the last commit. Both meta pages must be valid, as LMDB requires."""
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


def count_rows(read: Callable[[int, int], bytes]) -> int:
    """Return the number of rows in the newest snapshot. A few pages are read with `read(size,
    offset)` and hardly checked, so a damaged file may give a wrong number. Raises Damage,
    ValueError, struct.error."""
    head = read(2 * _LARGEST_PAGE, 0)
    size = _page_size(head)
    root = newest_meta(head, size).main.root
    if root == _EMPTY:
        return 0
    page = read(size, root * size)
    _number, _pad, flags, lower, _upper = _PAGE.unpack_from(page)
    if flags != _LEAF or not _PAGE.size <= lower <= size:
        raise Damage(f"the root page {root} is no leaf")
    for offset in struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", page, _PAGE.size):
        _low, _high, flags, key_size = _NODE.unpack_from(page, offset)
        start = offset + _NODE.size
        if flags & _SUBTREE and page[start : start + key_size] == _ROWS:
            return int(Tree(*_TREE.unpack_from(page, start + key_size)).entries)
    return 0


def read_with_lmdb(folder: str, num_rows: int) -> None:
    """Read the whole file with LMDB. Raises Damage if LMDB finds another number of rows."""
    import lmdb  # found only after `main` has set `sys.path`

    try:
        with lmdb.open(folder, readonly=True, lock=False, max_dbs=2, create=False) as env:
            with env.begin() as txn, txn.cursor() as cursor:
                names = [bytes(name) for name in cursor.iternext(values=False)]
            counts = dict.fromkeys([_ROWS], 0)
            for name in names:
                table = env.open_db(name, create=False)
                with env.begin(db=table) as txn, txn.cursor() as cursor:
                    counts[name] = sum(map(len, cursor.iternext(keys=False)))
    except lmdb.Error as error:
        raise Damage(str(error)) from error
    if counts[_ROWS] != num_rows * _VALUE_BYTES:
        raise Damage(f"LMDB finds {counts[_ROWS]} bytes in {num_rows} rows")


def main(arguments: list[str]) -> int:
    folder, sys.path[:] = arguments[0], arguments[1:]
    try:
        with (
            open(f"{folder}/data.mdb", "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            rows = RowStream(sys.stdout.buffer)
            PageScan(data, rows).check_all_pages()
        rows.write_terminator()
        read_with_lmdb(folder, rows.count)
    except (OSError, MemoryError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - read by the process that asked
        return UNABLE if getattr(error, "errno", errno.ENOMEM) in _SHORTAGES else 1
    except (Damage, ValueError, struct.error, RecursionError) as error:
        print(error, file=sys.stderr)  # noqa: T201 - read by the process that asked
        return 1
    return 0
