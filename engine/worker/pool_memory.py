# SPDX-License-Identifier: Apache-2.0
"""Memory of a KV pool on the CPU.

A page of new memory costs the system about as much as reading it four times, so a pool of many
gigabytes took seconds before its engine began. What the system gives is zeros from its first touch
on: a thread takes the pages while the engine starts and runs, and changes nothing in them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

import torch
from torch import Tensor

from ...kernels.cpu.huge_pages import HUGE_PAGE_BYTES, ask_for_huge_pages
from ...tiers.settings.values import MIB

AT_ONCE_BYTES = 128 * MIB  # as much is there in some hundredths of a second
_PIECE_BYTES = 16 * MIB
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_LOWEST_PRIORITY = 19


def zeroed_memory(num_bytes: int) -> Tensor:
    """`[num_bytes]` uint8 zeros, in huge pages where the system has some. Of more than
    AT_ONCE_BYTES the pages are taken by a thread that ends when that is done, or the memory is
    gone. Raises OSError or RuntimeError where the memory cannot be had."""
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=private)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    memory = whole[start : start + num_bytes]
    ask_for_huge_pages(memory)
    if num_bytes <= AT_ONCE_BYTES:
        return memory.zero_()
    arguments = (weakref.ref(mapped), memory.data_ptr(), num_bytes)
    threading.Thread(
        target=_take_pages, args=arguments, name="stratakv-pool-pages", daemon=True
    ).start()
    return memory


def _take_pages(mapped: weakref.ref[mmap.mmap], address: int, num_bytes: int) -> None:
    """Piece by piece; an older kernel gives each page when it is first used."""
    madvise = ctypes.CDLL(None).madvise  # without the GIL, which the module's keeps
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    for offset in range(0, num_bytes, _PIECE_BYTES):
        held = mapped()  # or the memory could be another's meanwhile
        if held is None:
            return
        size = ctypes.c_size_t(min(_PIECE_BYTES, num_bytes - offset))
        if madvise(ctypes.c_void_p(address + offset), size, _MADV_POPULATE_WRITE):
            return
        del held
