# SPDX-License-Identifier: Apache-2.0
"""A slab of a few slots that is made in microseconds: the real one, on memory not faulted in.

Tests that make tens of thousands of slabs need it; everything but the making is the product's.
"""

from __future__ import annotations

import mmap
import os
from unittest import mock

from stratakv.tiers.block import BlockLayout
from stratakv.tiers.policies.base import EvictionPolicy
from stratakv.tiers.slab import cpu_slab as cpu
from stratakv.tiers.slab.cpu_slab import CpuSlab


class _Memory:
    """What SharedMemory is to a slab, page by page as they are touched."""

    is_huge = False

    def __init__(self, name: str, size: int, **_options: object) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.map = mmap.mmap(self.fd, size)


def small_slab(
    layout: BlockLayout, num_slots: int, policy: EvictionPolicy | None = None
) -> CpuSlab:
    """A CpuSlab of `num_slots`."""
    with mock.patch.object(cpu, "SharedMemory", _Memory):
        return CpuSlab(layout, num_slots * layout.slot_bytes, policy=policy)
