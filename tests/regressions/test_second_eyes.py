# SPDX-License-Identifier: Apache-2.0
"""Second tests for what one test alone would have found: tickets used twice, cleared blocks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.base import Answer
from stratakv.tiers.contract import make_keys
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.ssd.folder.inventory import look_at
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.ssd.store_check import check_store
from stratakv.tiers.ssd.writer import Writer
from stratakv.tiers.wire.sockets import ConnectionLost

from ..tiers.blocks import SMALL
from ..tiers.cache_server.rig import LAYOUT, WAIT_SECONDS, running_server
from ..tiers.store_contract import SECONDS, put

pytestmark = pytest.mark.regression
KEYS = make_keys(12)


def test_y15_a_ticket_opens_one_data_connection() -> None:
    """Over the wire, while the first connection is open and after it was closed."""
    with running_server() as server:
        stub = server.stub()
        server.attach(stub)
        ticket = stub.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS).ticket
        port = server.server.data_plane.port

        def open_it() -> DataConnection:
            deadline = time.monotonic() + WAIT_SECONDS
            return DataConnection.open("127.0.0.1", port, ticket, LAYOUT, deadline)

        first = open_it()
        with pytest.raises(ConnectionLost):
            open_it()
        first.close()
        with pytest.raises(ConnectionLost):
            open_it()


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store as it lies on the disk of a process that was killed once it had promised that all is
    forgotten: rows and records are still there."""
    path, copy = tmp_path / "ssd", tmp_path / "copy"
    store = SsdStore(path, SMALL, 2**20)
    assert all(put(store, KEYS))
    with monkeypatch.context() as patch:
        # Nothing is tidied up any more.
        patch.setattr(Writer, "_forget_rows_and_records", lambda _: True)
        patch.setattr(Writer, "_tidy", lambda _: None)
        store.clear()
        assert store.wait_forgotten(SECONDS)
        shutil.copytree(path, copy)
    store.close(SECONDS)
    assert look_at(copy).blocks == len(KEYS), "the rows are there"
    return copy


def test_y15_cleared_rows_stay_forgotten(killed: Path) -> None:
    store = SsdStore(killed, SMALL, 2**20)
    assert store.lookup(KEYS) == [Answer.MISS] * len(KEYS)
    store.close(SECONDS)


def test_y15_cleared_records_stay_forgotten_without_an_index(killed: Path) -> None:
    shutil.rmtree(killed / "index")
    result = check_store(killed, fix=True)
    assert (result.orphans, result.rebuilt_rows) == (0, 0)
    store = SsdStore(killed, SMALL, 2**20)
    assert store.lookup(KEYS) == [Answer.MISS] * len(KEYS)
    store.close(SECONDS)
