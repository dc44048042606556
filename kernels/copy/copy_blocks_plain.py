# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks in plain torch: the reference for the Triton kernel, used where Triton cannot.

The plain copies wait for the device, because the host reads the ids. A few blocks are copied at a
time, to keep the temporary copy small."""

from __future__ import annotations

import torch

from ..kernel_choice import KernelRefused

BYTES_AT_ONCE = 64 << 20


def move_blocks_plain(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
) -> None:
    """Set `target[target_ids[i]] = source[source_ids[i]]` for rows of words; ids of None mean 0, 1,
    2…

    Raises KernelRefused for ids outside the tensors, for a target given twice, and, if source and
    target are one tensor, for a block that is both source and target. If KernelRefused is raised,
    no block has been copied."""
    given = source_ids if source_ids is not None else target_ids
    count = target.shape[0] if given is None else given.numel()
    from_ids = range(count) if source_ids is None else source_ids.tolist()
    to_ids = range(count) if target_ids is None else target_ids.tolist()
    moves = [pair for pair in zip(from_ids, to_ids, strict=True) if -1 not in pair]
    _check_range("source", [source_id for source_id, _ in moves], source.shape[0])
    _check_range("target", [target_id for _, target_id in moves], target.shape[0])
    _check_order(moves, within_one=source.data_ptr() == target.data_ptr())
    step = max(1, BYTES_AT_ONCE // (source.shape[1] * source.element_size()))
    for first in range(0, len(moves), step):
        from_rows, to_rows = zip(*moves[first : first + step], strict=True)
        rows = source[torch.tensor(from_rows, device=source.device)]
        target[torch.tensor(to_rows, device=target.device)] = rows.to(target.device)


def _check_range(side: str, ids: list[int], num_blocks: int) -> None:
    wrong = [block_id for block_id in ids if not 0 <= block_id < num_blocks]
    if wrong:
        raise KernelRefused(f"expected {side} ids from 0 to {num_blocks - 1} or -1, got {wrong[0]}")


def _check_order(moves: list[tuple[int, int]], *, within_one: bool) -> None:
    """Raise KernelRefused if the order of the copies would change the result."""
    targets: set[int] = set()
    for _, target_id in moves:
        if target_id in targets:
            raise KernelRefused(f"expected every target once, got block {target_id} twice")
        targets.add(target_id)
    both = [source_id for source_id, _ in moves if source_id in targets] if within_one else []
    if both:
        raise KernelRefused(f"expected no block to be read and written, got block {both[0]}")
