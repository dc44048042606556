# SPDX-License-Identifier: Apache-2.0
"""Memory of a KV pool on the CPU.

A page of new memory costs the system about as much as reading it four times, so a pool of many
gigabytes took seconds before its engine began. What the system gives is zeros from its first touch
on: a thread takes the pages while the engine starts and runs, and changes nothing in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.huge_pages import HUGE_PAGE_BYTES, ask_for_huge_pages
from ...kernels.cpu.library import CpuLibrary, cpu_library
from ...tiers.settings.values import MIB

AT_ONCE_BYTES = 128 * MIB
# Of a larger pool: what the first requests write before the thread has gone far.
_FIRST_BYTES = 32 * MIB
_LOWEST_PRIORITY = 19


def zeroed_memory(num_bytes: int) -> Tensor:
    """`[num_bytes]` uint8 zeros, in huge pages where the system has some. Of more than
    AT_ONCE_BYTES the first pages are there at once. The others are taken by a thread of the lowest
    priority, which ends when that is done or the memory is gone; without the compiled library, or
    where no thread can be had, each comes when it is first used. Raises OSError or RuntimeError
    where the memory cannot be had."""
    if num_bytes <= AT_ONCE_BYTES:  # by malloc, which may have pages of an earlier pool
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        ask_for_huge_pages(memory)
        return memory.zero_()
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=private)
    except OverflowError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    lent = np.frombuffer(mapped, np.uint8)  # lives as long as any tensor over this memory
    ends = ctypes.c_int64(0)
    weakref.finalize(lent, setattr, ends, "value", 1)
    whole = torch.from_numpy(lent)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    memory = whole[start : start + num_bytes]
    ask_for_huge_pages(memory)
    memory[:_FIRST_BYTES].zero_()
    library = cpu_library()
    if isinstance(library, CpuLibrary):
        arguments = (library, mapped, memory.data_ptr(), num_bytes, ends)
        name = "pool-pages"
        taker = threading.Thread(target=_take_pages, args=arguments, name=name, daemon=True)
        with contextlib.suppress(RuntimeError):  # that there is no thread is no lack of memory
            taker.start()
    return memory


def _take_pages(
    library: CpuLibrary, mapped: mmap.mmap, address: int, num_bytes: int, ends: ctypes.c_int64
) -> None:
    """`mapped` is kept meanwhile, or the memory could be another's."""
    with contextlib.suppress(OSError):  # a sandbox may refuse it: the pages are wanted all the same
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    library.take_pages(address, num_bytes, ctypes.byref(ends))
