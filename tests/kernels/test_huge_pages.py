# SPDX-License-Identifier: Apache-2.0
"""Memory that shares huge pages: nothing is given out twice, a piece goes with its last user."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from stratakv.kernels.cpu import huge_pages
from stratakv.kernels.cpu.huge_pages import memory_in_huge_pages

MIB = 1 << 20


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SHARED", huge_pages._SharedPiece())


def test_what_several_threads_take_lies_apart() -> None:
    sizes = [1 + 37_111 * (i % 60) for i in range(240)]
    with ThreadPoolExecutor(4) as pool:
        pieces = list(pool.map(memory_in_huge_pages, sizes))
    assert [len(piece) for piece in pieces] == sizes
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + len(piece)) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_small_ones_share_a_piece_and_large_ones_do_not() -> None:
    first, second = memory_in_huge_pages(100), memory_in_huge_pages(3 * MIB)
    large, third = memory_in_huge_pages(9 * MIB), memory_in_huge_pages(7)
    assert first.data_ptr() % (2 * MIB) == large.data_ptr() % (2 * MIB) == 0
    assert second.data_ptr() == first.data_ptr() + 128
    assert third.data_ptr() == second.data_ptr() + 3 * MIB
    large[-1] = third[-1] = 1  # to its end it can be written


def test_a_piece_is_freed_with_the_last_of_it() -> None:
    first, second = memory_in_huge_pages(5 * MIB), memory_in_huge_pages(5 * MIB)
    base = first._base
    assert base is not None and second._base is base
    whole = weakref.ref(base)
    memory_in_huge_pages(7 * MIB)  # no room: another piece is begun
    del first, base
    assert whole() is not None
    del second
    assert whole() is None
