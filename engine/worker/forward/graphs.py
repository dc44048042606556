# SPDX-License-Identifier: Apache-2.0
"""Decode steps recorded once for each batch size that is worth it, and run again from the record.

A decode step is hundreds of small launches whose Python takes longer than the device does. Recorded
over buffers that stay, they are one launch. A batch runs in the smallest recorded size that holds
it, filled up with nobody's rows. Knows nothing of what a step computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from ..runtime.device_runtime import DeviceRuntime, Work

# Filling up costs a share of the step: half at worst in small batches, where a step reads the
# weights anyway, and a sixteenth in large ones.
_FIRST_SIZES = (1, 2, 4)
_FINE, _FINE_UP_TO = 8, 128
_COARSE, _COARSE_UP_TO = 16, 512
# Each record takes memory and a part of the start; larger batches are bound by arithmetic.
MAX_RECORDED = _COARSE_UP_TO


def batch_buckets(max_requests: int) -> tuple[int, ...]:
    """The sizes to record, ascending, for batches of up to `max_requests`."""
    sizes = [
        *_FIRST_SIZES,
        *range(_FINE, _FINE_UP_TO, _FINE),
        *range(_FINE_UP_TO, _COARSE_UP_TO + 1, _COARSE),
    ]
    largest = min(max_requests, MAX_RECORDED)
    return (*[size for size in sizes if size < largest], largest)


def bucket_for(num_requests: int, buckets: Sequence[int]) -> int | None:
    """The smallest of ascending `buckets` that holds a batch; None where it is too large."""
    index = bisect_left(buckets, num_requests)
    return buckets[index] if index < len(buckets) else None


class DecodeGraphs:
    """The records of one model over one set of buffers."""

    def __init__(
        self, runtime: DeviceRuntime, work_of: Callable[[int], Work], buckets: Sequence[int]
    ) -> None:
        """`work_of(bucket)` is a decode step of that many rows over the buffers; it must read
        nothing else that changes, for a record would keep what that was."""
        self._runtime = runtime
        self._work_of = work_of
        self._buckets = tuple(buckets)
        self._recorded: dict[int, Work] = {}

    def record_all(self, prepare: Callable[[int], None], progress: Callable[[str], None]) -> None:
        """Record every size; `prepare(bucket)` makes the buffers safe to run on. The largest comes
        first, so that the smaller ones find room in the memory that it took."""
        for bucket in reversed(self._buckets):
            prepare(bucket)
            self._recorded[bucket] = self._runtime.record(self._work_of(bucket))
        progress(f"recorded decode steps of {len(self._buckets)} batch sizes")

    def find(self, num_requests: int) -> tuple[int, Work] | None:
        """The size to fill the buffers up to and the recorded step; None where there is none."""
        bucket = bucket_for(num_requests, self._buckets)
        if bucket is None or bucket not in self._recorded:
            return None
        return bucket, self._recorded[bucket]
