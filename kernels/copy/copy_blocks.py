# SPDX-License-Identifier: Apache-2.0
"""Copies of the bytes of whole blocks within a pool, or between a pool and a buffer.

A pool or a buffer is any tensor with blocks as its first dimension. Each block of a pool is
contiguous, with any stride between blocks. Bytes are not converted, so any dtype is allowed, and
the two tensors of a call only need blocks of the same size in bytes. For large blocks to or from
the CPU, the copy engine (`copy_engine.py`) is faster. The kernels are for copies within a device,
and for pieces that are too small for the copy engine.

        copy_blocks     pool[targets[i]] = pool[sources[i]]
        gather_blocks        out[i]      = pool[block_ids[i]]
        scatter_blocks  pool[block_ids[i]] = data[i]
        transfer_blocks target[target_ids[i]] = source[source_ids[i]], of two tensors

Block ids are contiguous int64 on the pool's device. An entry with a block id of -1 copies nothing,
so a list of fixed length may have unused entries. The copies of a call run in no fixed order, so a
call must not write a block twice, and must not both read and write a block. The plain kernel reads
the ids, and raises KernelRefused for a block that is written twice, or read and written, and for
ids beyond the pool. The Triton kernel, which cannot report errors, skips ids beyond the pool."""

from __future__ import annotations

import torch

from ..kernel_choice import AUTO, TRITON, KernelRefused, choose_kernel
from .copy_blocks_launch import MAX_PROGRAMS
from .copy_blocks_plain import move_blocks_plain

MAX_BLOCK_BYTES = 2**31 - 1
# Blocks are copied in the first, widest word that divides sizes and addresses.
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_blocks(
    pool: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    *,
    max_programs: int = MAX_PROGRAMS,
    kernel: str = AUTO,
    strict: bool = False,
) -> None:
    """Copy block `sources[i]` of `pool` to block `targets[i]`, for each i.

    `max_programs` limits the share of the GPU that the copy uses; a copy with 12 programs does not
    slow decode down. Raises KernelRefused for arguments that do not fit together."""
    _move(pool, pool, sources, targets, pool.device, max_programs, kernel, strict)


def gather_blocks(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    *,
    max_programs: int = MAX_PROGRAMS,
    kernel: str = AUTO,
    strict: bool = False,
) -> None:
    """Copy block `block_ids[i]` of `pool` to `out[i]`, for each i.

    `out` must not share memory with the pool. `out` is on the pool's device or in page-locked CPU
    memory; for other memory only the plain kernel works. The Triton kernel writes to page-locked
    memory directly, so the bytes are complete when the stream has run the copy, not when this
    function returns."""
    _move(pool, out, block_ids, None, pool.device, max_programs, kernel, strict)


def scatter_blocks(
    data: torch.Tensor,
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    max_programs: int = MAX_PROGRAMS,
    kernel: str = AUTO,
    strict: bool = False,
) -> None:
    """Copy `data[i]` to block `block_ids[i]` of `pool`, for each i. `data` must be in the memory of
    the pool's device or, for the Triton kernel, page-locked."""
    _move(data, pool, None, block_ids, pool.device, max_programs, kernel, strict)


def transfer_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    max_programs: int = MAX_PROGRAMS,
    kernel: str = AUTO,
    strict: bool = False,
) -> None:
    """Copy block `source_ids[i]` of `source` to block `target_ids[i]` of `target`, for each i.

    `source` and `target` must not share memory. Both tensors must be in memory that `gather_blocks`
    allows for `out`; the ids are on the device."""
    _move(source, target, source_ids, target_ids, source_ids.device, max_programs, kernel, strict)


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    device: torch.device,
    max_programs: int,
    kernel: str,
    strict: bool,
) -> None:
    """Copy block `source_ids[i]` of `source` to block `target_ids[i]` of `target`. For ids, None
    means 0, 1, 2…"""
    entries = _check_ids(source_ids, target_ids, device)
    for tensor, ids in ((source, source_ids), (target, target_ids)):
        _check_blocks(tensor)
        if ids is None and tensor.shape[0] != entries:
            raise KernelRefused(
                f"expected a buffer of {entries} blocks, one for each id, got {tensor.shape[0]}"
            )
    if _block_bytes(source) != _block_bytes(target):
        raise KernelRefused(
            "expected blocks of the same size on both sides, "
            f"got {_block_bytes(source)} and {_block_bytes(target)} bytes"
        )
    if max_programs < 1:
        raise KernelRefused(f"expected max_programs of 1 or more, got {max_programs}")
    reason = _reason_against(source, device) or _reason_against(target, device)
    chosen = choose_kernel(kernel, device, unsupported=reason, strict=strict)
    if not entries:
        return
    word = _widest_word(source, target)
    rows = (_as_words(source, word), _as_words(target, word))
    if chosen == TRITON:
        from .copy_blocks_triton import move_blocks_triton

        move_blocks_triton(*rows, source_ids, target_ids, device, max_programs)
    else:
        move_blocks_plain(*rows, source_ids, target_ids)


def _check_ids(
    source_ids: torch.Tensor | None, target_ids: torch.Tensor | None, device: torch.device
) -> int:
    """Check the lists of block ids, and return the number of their entries."""
    lists = [ids for ids in (source_ids, target_ids) if ids is not None]
    for ids in lists:
        if ids.dtype is not torch.int64 or ids.ndim != 1 or not ids.is_contiguous():
            raise KernelRefused(
                f"expected contiguous int64 block ids [n], got {ids.dtype} {list(ids.shape)} "
                f"with strides {ids.stride()}"
            )
        if ids.device != device:
            raise KernelRefused(
                f"expected block ids on the pool's device {device}, got {ids.device}"
            )
    counts = {ids.numel() for ids in lists}
    if len(counts) != 1:
        raise KernelRefused(
            f"expected as many targets as sources, got {[ids.numel() for ids in lists]}"
        )
    return counts.pop()


def _check_blocks(tensor: torch.Tensor) -> None:
    # The check reads strides and no block, because an empty tensor has no block.
    expected = 1
    is_contiguous = tensor.ndim >= 2
    for size, stride in reversed(list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))):
        is_contiguous &= size == 1 or stride == expected
        expected *= size
    if not is_contiguous or (tensor.shape[0] > 1 and tensor.stride(0) < expected):
        raise KernelRefused(
            "expected blocks [num_blocks, ...], each contiguous and none in another, "
            f"got {list(tensor.shape)} with strides {tensor.stride()}"
        )
    if not 0 < _block_bytes(tensor) <= MAX_BLOCK_BYTES:
        raise KernelRefused(
            f"expected blocks of 1 to {MAX_BLOCK_BYTES} bytes, got {_block_bytes(tensor)}"
        )


def _block_bytes(tensor: torch.Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _reason_against(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Return the reason why a Triton kernel on `device` cannot access `tensor`, or None."""
    if tensor.device == device or (tensor.device.type == "cpu" and tensor.is_pinned()):
        return None
    return f"it runs on {device} and cannot reach {tensor.device} memory that is not page-locked"


def _widest_word(*tensors: torch.Tensor) -> torch.dtype:
    places = 0
    for tensor in tensors:
        size = tensor.element_size()
        places |= tensor.data_ptr() | int(tensor.storage_offset()) * size
        places |= tensor.stride(0) * size | _block_bytes(tensor)
    # The lowest set bit is the largest power of two that divides all sizes and addresses.
    widest = places & -places
    return next(word for word in WORDS if word.itemsize <= widest)


def _as_words(tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Return a view of `tensor` as `[num_blocks, words of a block]`, with `word` as dtype."""
    shape = (tensor.shape[0], tensor.shape[1:].numel())
    flat = torch.as_strided(tensor, shape, (tensor.stride(0), 1), tensor.storage_offset())
    return flat.view(word)
