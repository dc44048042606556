# SPDX-License-Identifier: Apache-2.0
"""Every seed that has found a bug, played again. README.md says how one gets in here."""

from __future__ import annotations

import logging
import random
from collections import Counter

import pytest

from ..connector.test_order import walk_at_random
from ..simulation.world import World

# What the seed found, and where that was mended.
ORDERS = {
    652341014: "a store ahead of need that the device refused stayed in `OffloadWorker._ahead`",
}
SIMULATIONS = {
    203883: "a block that the admission filter had refused and the slab had evicted was marked for "
    "writing by `Hierarchy.begin_load`, which then could not bring it back",
    83: "E1: a copy ahead of need of a block that gave NaN went on while it was overwritten; "
    "`BlockPool` tells of every name that it drops",
    42: "E2: a NaN block in a tier failed every later request with its prefix; "
    "`Scheduler` has the tiers forget the chain",
    3: "E3: copies that `OffloadWorker.start_step` could not begin were never reported",
    4: "E4: a batch update that broke off left the batch as it was; `StepBatch` fills it anew",
    24: "E6: a request that was preempted while it loaded from the back never loaded again; "
    "`LoadReport.is_cancelled` tells the two apart",
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("seed", ORDERS)
def test_order(seed: int) -> None:
    walk_at_random(random.Random(seed), Counter())


@pytest.mark.parametrize("seed", SIMULATIONS)
def test_simulation(seed: int) -> None:
    World(seed).live()
