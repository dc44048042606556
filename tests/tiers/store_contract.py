# SPDX-License-Identifier: Apache-2.0
"""The contract that every store has to pass, and waiting with a deadline."""

from __future__ import annotations

import time

from stratakv.tiers.contract import SECONDS, fetch, put
from stratakv.tiers.contract import check_store_contract as check_store

__all__ = ["SECONDS", "check_store", "fetch", "put", "wait_until"]


def wait_until(condition: object, seconds: float = SECONDS) -> None:
    """Until the callable is true; fails after `seconds`."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.002)
