# SPDX-License-Identifier: Apache-2.0
"""Copies between the KV tensors and vLLM's region on a CPU, for which vLLM has no such copies.

Each call makes its copy itself, because on a CPU the forward pass would wait just as long for a
copying thread. No other thread writes to the memory during the copy. So a job has ended when its
call returns, and fails only if the worker's process ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from ...tiers.errors import TierConfigError


class Pages(NamedTuple):
    """The pages of one tensor, in the KV cache and in the region."""

    blocks: torch.Tensor  # [blocks, bytes]
    region: torch.Tensor  # [chunks, blocks of a chunk, bytes]


class CpuWorker(OffloadingWorker):
    """Copies between `kv_caches` and `region`, this rank's part of vLLM's region. Owns `region`.
    Raises TierConfigError if the two sizes differ."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: Any,
        *,
        blocks_per_chunk: int,
        rank_bytes: int,
        released: Callable[[], None],
    ) -> None:
        """The function `released` is called after the release of the region."""
        self._region = region
        self._released = released
        self._per_chunk = blocks_per_chunk
        self._groups = [list(refs) for refs in kv_caches.group_data_refs]
        total = sum(each.page_size_bytes for each in kv_caches.tensors) * blocks_per_chunk
        if total > rank_bytes:
            raise TierConfigError(
                f"the KV cache of this rank has {total} bytes a chunk and vLLM's region "
                f"{rank_bytes}; the ranks disagree: give all of them the same configuration"
            )
        self._pages = [self._map_pages(each) for each in kv_caches.tensors]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        self._copy(job_id, src_spec, dst_spec, to_region=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        self._copy(job_id, dst_spec, src_spec, to_region=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: all jobs have ended."""

    def shutdown(self) -> None:
        """Release the region. The worker that created its file removes the file. Idempotent."""
        self._pages = []
        region, self._region = self._region, None
        if region is not None:
            region.cleanup()
            self._released()

    def _map_pages(self, each: Any) -> Pages:
        size = each.page_size_bytes
        part = self._region.create_next_worker_view(size * self._per_chunk)
        return Pages(each.tensor.view(torch.int8).view((-1, size)), part.unflatten(1, (-1, size)))

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, to_region: bool) -> None:
        began = time.monotonic()
        num_bytes = 0
        for group, ids, places in self._by_group(blocks, chunks):
            runs = _runs(ids, places)
            for ref in self._groups[group]:
                pages, size = self._pages[ref.tensor_idx], ref.page_size_bytes
                for run in runs:
                    mine = pages.blocks[run.block : run.block + run.length, :size]
                    if run.within_chunk:
                        end = run.within + run.length
                        other = pages.region[run.chunk, run.within : end, :size]
                    else:
                        end = run.chunk + run.length
                        other = pages.region[run.chunk : end, run.within, :size]
                    if to_region:
                        other.copy_(mine)
                    else:
                        mine.copy_(other)
                num_bytes += len(ids) * size
        seconds = time.monotonic() - began
        self._ended.append(TransferResult(job_id, True, num_bytes, seconds))

    def _by_group(
        self, blocks: Any, chunks: Any
    ) -> Iterator[tuple[int, list[int], list[tuple[int, int]]]]:
        """Yield the blocks of each group, with the chunk of each block and the block's index in the
        chunk. A group's first block may lie inside the group's first chunk."""
        block_ids, chunk_ids = _as_ids(blocks.block_ids), _as_ids(chunks.block_ids)
        first_block = first_chunk = 0
        for group, count in enumerate(blocks.group_sizes):
            if not count:
                continue
            skipped = blocks.block_indices[group] % self._per_chunk
            num_chunks = -(-(skipped + count) // self._per_chunk)
            mine = chunk_ids[first_chunk : first_chunk + num_chunks]
            places = [divmod(place, self._per_chunk) for place in range(skipped, skipped + count)]
            chosen = [(mine[index], within) for index, within in places]
            yield group, block_ids[first_block : first_block + count], chosen
            first_block += count
            first_chunk += num_chunks


class _Run(NamedTuple):
    """`length` neighbouring blocks that are copied to neighbouring places of one chunk
    (`within_chunk`), or to the same place in each of several neighbouring chunks."""

    block: int
    chunk: int
    within: int
    length: int
    within_chunk: bool


def _runs(ids: Sequence[int], places: Sequence[tuple[int, int]]) -> list[_Run]:
    """Merge the blocks into few runs, because tensors indexed by lists are copied twice."""
    runs: list[_Run] = []
    for block, (chunk, within) in zip(ids, places, strict=True):
        last = runs[-1] if runs else None
        if last is not None and block == last.block + last.length:
            is_next_chunk = (chunk, within) == (last.chunk + last.length, last.within)
            is_next_place = (chunk, within) == (last.chunk, last.within + last.length)
            if is_next_chunk and (last.length == 1 or not last.within_chunk):
                runs[-1] = last._replace(length=last.length + 1, within_chunk=False)
                continue
            if is_next_place and (last.length == 1 or last.within_chunk):
                runs[-1] = last._replace(length=last.length + 1, within_chunk=True)
                continue
        runs.append(_Run(block, chunk, within, 1, within_chunk=False))
    return runs


def _as_ids(ids: Any) -> list[int]:
    return [int(each) for each in ids]
