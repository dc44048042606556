# SPDX-License-Identifier: Apache-2.0
"""Which batch sizes are recorded and which of them a batch runs in."""

from __future__ import annotations

import pytest
import torch

from stratakv.engine.worker.forward.kernel_forward import (
    MAX_RECORDED,
    StepGraphs,
    batch_buckets,
    bucket_for,
)

from .recording_runtime import RecordingRuntime


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 16, 100, 256, 512, 513, 65536])
def test_buckets_cover_every_batch_without_much_padding(largest):
    buckets = batch_buckets(largest)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == min(largest, MAX_RECORDED)
    assert len(buckets) <= 44
    for size in range(1, buckets[-1] + 1):
        bucket = bucket_for(size, buckets)
        assert bucket is not None and size <= bucket <= size + 15
        assert bucket <= 2 * size
        assert all(smaller < size for smaller in buckets if smaller < bucket)


def test_larger_batches_are_launched():
    assert bucket_for(MAX_RECORDED + 1, batch_buckets(65536)) is None
    assert bucket_for(4, batch_buckets(3)) is None


def test_records_keep_their_buffers_and_run_anew():
    runtime = RecordingRuntime()
    buffer = torch.zeros(8)
    prepared: list[int] = []

    graphs = StepGraphs(runtime, lambda bucket: lambda: buffer[:bucket] + 1, (1, 2, 4, 8))
    assert graphs.find_recorded(1) is None, "nothing is recorded yet"
    assert graphs.record_all(prepared.append) == 4
    assert prepared == [8, 4, 2, 1]
    found = graphs.find_recorded(3)
    assert found is not None
    bucket, work = found
    buffer[:3] = torch.tensor([5.0, 6.0, 7.0])
    first = work()
    assert bucket == 4 and first.tolist() == [6.0, 7.0, 8.0, 1.0]
    buffer.zero_()
    assert work() is first and first.tolist() == [1.0] * 4
    assert graphs.find_recorded(9) is None
