# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tiers' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .rig import WAIT_SECONDS, Rig


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    options = dict(getattr(request, "param", {}))
    rig = Rig(options.pop("num_slots", 16), **options)
    yield rig
    rig.store.release()
    assert rig.hierarchy.flush(WAIT_SECONDS)
    rig.check_idle()
    assert rig.hierarchy.close(WAIT_SECONDS)
