# SPDX-License-Identifier: Apache-2.0
"""KvPool: the KV pool, one tensor that is allocated once and in which every block is contiguous.

Block 0 is the null block, to which unused entries of block tables and padding refer. The null block
is never written, so it always has zeros."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.cpu.huge_pages import HUGE_PAGE_BYTES, ask_for_huge_pages
from ...kernels.cpu.library import CpuLibrary, cpu_library
from ...tiers.block import BlockLayout
from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import MIB, ConfigError
from ..cache.group_spec import CacheGroups, LayerPlace
from ..models.checkpoint.checkpoint import CPU
from ..models.dtypes import pool_dtype
from .pool_demand import SHARE_FLAG, check_memory

AT_ONCE_BYTES = 128 * MIB
# The bytes of a larger pool that are allocated at once, for the first requests.
_FIRST_BYTES = 32 * MIB
_LOWEST_PRIORITY = 19


class ModelPages(NamedTuple):
    """The pages of a pool, in the shape that the attention of one model reads."""

    tensor: Tensor  # `[blocks, places, 2 (K, V), block_size, num_kv_heads, head_dim]`, contiguous
    layout: BlockLayout  # of a block of `tensor`
    places: Sequence[LayerPlace]  # for each layer of the model
    entries_per_block: int  # table entries for each block of the pool


class KvPool:
    """The memory of the KV pool as tensors. `tensor` is `[num_blocks, num_layers, 2 (K, V),
    block_size, num_kv_heads, head_dim]`, contiguous, zeroed. `kernel_tensor` is the same memory,
    divided into the blocks that attention reads, which may be smaller; `kernel_layout` describes
    these blocks."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        device: torch.device = CPU,
        kernel_block_size: int | None = None,
    ) -> None:
        """`kernel_block_size` must divide the block size. Raises ConfigError if the system cannot
        allocate the memory."""
        if num_blocks < 2:
            raise ConfigError(
                f"the KV pool needs at least 2 blocks (one is the null block), not {num_blocks}"
            )
        # The memory is checked again, since the tiers may have taken some: with too large a pool
        # the system would kill the process later, without an error.
        if device.type == "cpu":
            check_memory(layout.page_bytes, num_blocks)
        self.layout = layout
        self.num_blocks = num_blocks
        shape, dtype = (num_blocks, *block_shape(layout)), pool_dtype(layout.kv_dtype)
        try:
            if device.type == "cpu":
                memory = zeroed_memory(math.prod(shape) * dtype.itemsize)
                self.tensor = memory.view(dtype).view(shape)
            else:
                self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, OSError) as error:  # torch or the system lacks memory
            flags = "--kv-cache-memory-bytes"
            if device.type != "cpu":
                flags += f", --num-blocks or {SHARE_FLAG}"
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks ({rough_size(num_blocks * layout.page_bytes)}) "
                f"does not fit into {_memory_of(device)}; lower {flags}"
            ) from error
        # Block table entries for each block of the pool.
        self.entries_per_block = layout.block_size // (kernel_block_size or layout.block_size)
        self.kernel_layout = replace(layout, block_size=kernel_block_size or layout.block_size)
        self.kernel_tensor = self.tensor.view(-1, *block_shape(self.kernel_layout))

    def pages_of(self, groups: CacheGroups) -> ModelPages:
        """Return the pages in the shape that the model with these cache groups reads."""
        return ModelPages(
            self.kernel_tensor, self.kernel_layout, groups.places(), self.entries_per_block
        )

    def pages_of_draft(self, groups: CacheGroups) -> ModelPages:
        """Return the pages in the shape that the draft model reads. Raises ValueError if there is
        no draft model."""
        if groups.draft is None:
            raise ValueError("these cache groups have no layers of a draft model")
        layout = replace(groups.draft.layout, block_size=self.kernel_layout.block_size)
        tensor = self.kernel_tensor.view(-1, *block_shape(layout))
        return ModelPages(tensor, layout, groups.draft.places, self.entries_per_block)


def block_shape(layout: BlockLayout) -> tuple[int, ...]:
    return layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim


def _memory_of(device: torch.device) -> str:
    return "memory" if device.type == "cpu" else f"the memory of {device}"


def zeroed_memory(num_bytes: int) -> Tensor:
    """Allocate `[num_bytes]` uint8 zeros, in huge pages if the system has some. If `num_bytes`
    exceeds AT_ONCE_BYTES, only the first pages are allocated at once. A thread with the lowest
    priority touches the remaining pages, so that the system allocates them, and ends with the last
    page or when the memory is freed. Without the compiled library or the thread, the system
    allocates each page at its first use. Raises OSError or RuntimeError if the system cannot
    allocate the memory."""
    if num_bytes <= AT_ONCE_BYTES:  # by malloc, which may reuse the pages of an earlier pool
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
        with contextlib.suppress(RuntimeError):  # the memory also works without the thread
            taker.start()
    return memory


def _take_pages(
    library: CpuLibrary, mapped: mmap.mmap, address: int, num_bytes: int, ends: ctypes.c_int64
) -> None:
    """Make the system allocate the pages of a mapping. The argument `mapped` keeps the mapping in
    memory until this function returns."""
    with contextlib.suppress(OSError):  # a sandbox may refuse the priority; take the pages anyway
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    library.take_pages(address, num_bytes, ctypes.byref(ends))
