# SPDX-License-Identifier: Apache-2.0
"""The faults behind the pinned seeds, each in a few plain lines."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from stratakv.tiers.admission import AdmissionFilter
from stratakv.tiers.block import pack_key
from stratakv.tiers.hierarchy import Hierarchy
from stratakv.tiers.memory import MemoryStore

from ..connector.order_checker import RecordingDevice
from ..connector.order_walk import LAYOUT, Role, Walk
from ..simulation.small_slab import small_slab


def test_652341014_a_refused_store_ahead_of_need(caplog: pytest.LogCaptureFixture) -> None:
    """It stayed among those that a pass need not wait for."""
    caplog.set_level(logging.CRITICAL)
    walk = Walk(1, RecordingDevice(lambda _count: 0, fails=lambda: "refuse"))
    walk.step([Role.COLD])
    walk.end()
    walk.close()


class Refusing(AdmissionFilter):
    """Finds nothing worth writing."""

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [False] * len(keys)


def test_203883_a_refused_block_that_is_in_another_store_only() -> None:
    """It was marked for writing although the slab did not have it."""
    wanted, others = pack_key(b"w" * 32), [pack_key(bytes([i]) * 32) for i in range(2)]
    slab = small_slab(LAYOUT, 2)
    ssd = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    net = MemoryStore(LAYOUT, 100 * LAYOUT.page_bytes, name="net")
    net.is_shared = True
    hierarchy = Hierarchy(
        slab, [ssd, net], wakeup=lambda: None, watermark=1.0, admission=Refusing()
    )
    for keys in ([wanted], others):
        hierarchy.end_store(hierarchy.begin_store(keys), ok=True)
        for _ in range(3):
            hierarchy.poll()
    held = hierarchy.begin_load(others)
    assert hierarchy.find([wanted]).tiers == ["net"]
    hierarchy.end_load(hierarchy.begin_load([wanted]))  # there is no room for it
    for write_back in hierarchy._write_backs._all:
        assert wanted not in write_back._dirty
    hierarchy.end_load(held)
    assert hierarchy.close(1.0)
