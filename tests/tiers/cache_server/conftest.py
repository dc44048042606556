# SPDX-License-Identifier: Apache-2.0
"""A server that the tests of a module share, in this process: one tenant, 300 blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratakv.tiers.wire.rpc import Stub

from .rig import LAYOUT, RunningServer, running_server


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with running_server(cpu_bytes=300 * LAYOUT.slot_bytes) as server:
        server.attach(server.stub())
        yield server


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    """One with an empty room, where nothing is left pinned afterwards."""
    shared.tenant_store().clear()
    yield shared
    stats = shared.tenant_store().stats()["cpu"]
    assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)
    assert shared.server._service is not None
    assert shared.server._service.streams.bytes_in_flight == 0


@pytest.fixture
def stub(server: RunningServer) -> Stub:
    return server.stub()
