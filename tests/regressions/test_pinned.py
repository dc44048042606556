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
