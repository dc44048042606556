# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks in Triton: a fixed number of programs copy the chunks of all blocks.

One kernel makes all kinds of copies, which differ only in whether source and target are selected by
ids. The number of programs, not the number of blocks, determines the kernel's share of the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .copy_blocks_launch import CHUNK_WORDS, NUM_WARPS


@triton.jit
def move_blocks_kernel(  # type: ignore[no-untyped-def]
    source,
    target,
    source_ids,
    target_ids,
    entries,
    words,
    source_blocks,
    target_blocks,
    source_stride,
    target_stride,
    CHUNK: tl.constexpr,
):
    """Copy blocks. Grid: (programs,). With n programs, each program copies every n-th chunk."""
    chunks = tl.cdiv(words, CHUNK)
    for item in range(tl.program_id(0), entries * chunks, tl.num_programs(0)):
        entry = (item // chunks).to(tl.int64)
        source_id = entry
        target_id = entry
        if source_ids is not None:
            source_id = tl.load(source_ids + entry)
        if target_ids is not None:
            target_id = tl.load(target_ids + entry)
        word = (item % chunks) * CHUNK + tl.arange(0, CHUNK)
        valid = (source_id >= 0) & (source_id < source_blocks)
        valid = valid & (target_id >= 0) & (target_id < target_blocks)
        mask = word < tl.where(valid, words, 0)
        moved = tl.load(source + source_id * source_stride + word, mask=mask)
        tl.store(target + target_id * target_stride + word, moved, mask=mask)


def move_blocks_triton(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    device: torch.device,
    max_programs: int,
) -> None:
    """Copy rows like `move_blocks_plain`, without its checks. `device` must be able to access the
    memory of `source` and `target`."""
    given = source_ids if source_ids is not None else target_ids
    entries = target.shape[0] if given is None else given.numel()
    words = source.shape[1]
    grid = (min(max_programs, entries * triton.cdiv(words, CHUNK_WORDS)),)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        move_blocks_kernel[grid](
            source,
            target,
            source_ids,
            target_ids,
            entries,
            words,
            source.shape[0],
            target.shape[0],
            source.stride(0),
            target.stride(0),
            CHUNK=CHUNK_WORDS,
            num_warps=NUM_WARPS,
        )
