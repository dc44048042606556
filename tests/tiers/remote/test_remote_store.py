# SPDX-License-Identifier: Apache-2.0
"""The tier on cache servers: its promise, on every path, and over every fault of a server."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.contract import (
    check_store_contract,
    fetch,
    filled_buffers,
    make_buffers,
    make_keys,
    payload_of,
    put,
)
from stratakv.tiers.errors import TierBusy, TierConfigError, TierError
from stratakv.tiers.remote.credentials import Credentials
from stratakv.tiers.remote.membership import ServerAddress, parse_address
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import RemoteStore, open_remote

from ..cache_server.rig import (
    LAYOUT,
    WAIT_SECONDS,
    running_server,
    server_process,
    tenant,
    token_of,
)

HIT, MISS, PENDING = Answer.HIT, Answer.MISS, Answer.PENDING
# How blocks move: what the server offers, what the client takes.
PATHS: dict[str, tuple[dict[str, Any], bool]] = {
    "memory": ({}, True),
    "socket": ({}, False),
    "streams": ({"data_port": None}, False),
}


@contextmanager
def opened(
    *ports: int, layout: BlockLayout = LAYOUT, wait: bool = True, **settings: Any
) -> Iterator[RemoteStore]:
    """A client of the servers at these ports, whose look-ups have time on a busy machine."""
    addresses = [ServerAddress("127.0.0.1", port) for port in ports]
    settings = {"lookup_seconds": WAIT_SECONDS, **settings}
    store = open_remote(addresses, layout, RemoteSettings(**settings))
    try:
        assert not wait or store.wait_up(WAIT_SECONDS)
        yield store
    finally:
        store.close(WAIT_SECONDS)


def ask(store: RemoteStore, keys: Sequence[bytes]) -> list[Answer]:
    """What the store knows after it has asked."""
    future = store.prefetch_lookup(keys)
    if future is not None:
        future.result(WAIT_SECONDS)
    return store.lookup(keys)


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("path", PATHS)
def test_it_keeps_the_promise_of_a_store(path: str) -> None:
    offered, shares_memory = PATHS[path]
    with running_server(**offered) as server:
        addresses = [ServerAddress("127.0.0.1", server.port)]
        settings = RemoteSettings(shares_memory=shares_memory, lookup_seconds=WAIT_SECONDS)
        store = open_remote(addresses, LAYOUT, settings)
        assert store.wait_up(WAIT_SECONDS)
        check_store_contract(store)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tag_key", [None, b"t" * 32], ids=["plain", "keyed"])
def test_blocks_of_another_namespace_are_misses(path: str, tag_key: bytes | None) -> None:
    """Their keys are the same, as those of two models are where digests carry no identity."""
    offered, shares_memory = PATHS[path]
    options = {"shares_memory": shares_memory, "tag_key": tag_key}
    with (
        running_server(**offered) as server,
        opened(server.port, namespace=b"one model", **options) as one,
        opened(server.port, namespace=b"one model", **options) as same,
        opened(server.port, namespace=b"another", **options) as other,
        opened(server.port, **options) as none,
    ):
        keys = make_keys(4)
        payloads = [payload_of(key, LAYOUT) for key in keys]
        for stranger in (other, none):
            assert put(one, keys) == [True] * 4
            assert fetch(same, keys) == payloads
            assert ask(stranger, keys) == [HIT] * 4
            assert fetch(stranger, keys) == [None] * 4
            wait_for(lambda: server.tenant_store().stats()["cpu"].blocks == 0)
        # What is nobody's else they store anew.
        assert put(other, keys) == [True] * 4
        assert fetch(other, keys) == payloads


def test_it_keeps_the_promise_over_several_servers() -> None:
    with running_server() as one, running_server() as two, running_server() as three:
        servers = (one, two, three)
        addresses = [ServerAddress("127.0.0.1", server.port) for server in servers]
        store = open_remote(addresses, LAYOUT)
        assert store.wait_up(WAIT_SECONDS)
        check_store_contract(store)
        # Few blocks at addresses that differ from run to run: one server may have got none.
        stored = [server.tenant_store().stats()["cpu"].stored_blocks for server in servers]
        assert len(stored) - stored.count(0) >= 2


@pytest.mark.parametrize("path", PATHS)
def test_blocks_of_several_pieces_come_back(path: str) -> None:
    large = BlockLayout(20, 16, 8, 128, "float32")
    offered, shares_memory = PATHS[path]
    with (
        running_server(cpu_bytes=16 * large.slot_bytes, **offered) as server,
        opened(server.port, layout=large, shares_memory=shares_memory) as store,
    ):
        keys = make_keys(6)
        assert put(store, keys) == [True] * 6
        assert fetch(store, keys) == [payload_of(key, large) for key in keys]


def test_what_one_client_stored_another_finds_at_once() -> None:
    with running_server() as server, opened(server.port) as one, opened(server.port) as other:
        for number in range(50):
            keys = make_keys(4, str(number))
            assert put(one, keys) == [True] * 4
            assert ask(other, keys) == [HIT] * 4
            assert None not in fetch(other, keys)


def test_a_look_up_answers_from_memory_and_asking_is_one_call() -> None:
    with running_server() as server, opened(server.port) as one, opened(server.port) as other:
        keys = make_keys(8)
        put(one, keys[:5])
        assert other.lookup(keys) == [MISS] * 8
        future = other.prefetch_lookup(keys)
        assert future is not None
        assert set(other.lookup(keys)) <= {PENDING, HIT, MISS}
        future.result(WAIT_SECONDS)
        assert other.lookup(keys) == [HIT] * 5 + [MISS] * 3
        assert other.prefetch_lookup(keys) is None  # it has just been answered


def test_a_block_that_was_evicted_is_a_miss_and_is_believed_no_more() -> None:
    with running_server(cpu_bytes=8 * LAYOUT.slot_bytes) as server, opened(server.port) as store:
        keys = make_keys(8)
        put(store, keys)
        put(store, make_keys(8, "others"))
        assert store.lookup(keys) == [HIT] * 8
        assert fetch(store, keys) == [None] * 8
        assert store.lookup(keys) == [MISS] * 8


def test_a_server_that_is_down_at_the_start_is_used_when_it_comes() -> None:
    with server_process(start=False) as server, opened(server.port, wait=False) as store:
        keys = make_keys(2)
        assert store.lookup(keys) == [MISS] * 2
        assert store.prefetch_lookup(keys) is None
        with pytest.raises(TierError, match="cannot be reached"):
            fetch(store, keys)
        server.start()
        assert store.wait_up(WAIT_SECONDS)
        assert put(store, keys) == [True] * 2


@pytest.mark.parametrize("path", ["memory", "socket"])
def test_a_server_that_was_killed_loses_its_blocks_and_nothing_else(path: str) -> None:
    with (
        server_process() as server,
        opened(server.port, shares_memory=path == "memory") as store,
    ):
        keys = make_keys(8)
        put(store, keys)
        server.kill()
        with pytest.raises(TierError):
            fetch(store, keys)
        server.start()
        wait_for(lambda: store.wait_up(0.1))
        # What was believed of it went with it.
        assert store.lookup(keys) == [MISS] * 8
        assert put(store, keys) == [True] * 8
        assert fetch(store, keys) == [payload_of(key, LAYOUT) for key in keys]


def test_a_restart_that_nobody_noticed_is_noticed_by_the_next_answer() -> None:
    with server_process() as server, opened(server.port) as store:
        keys = make_keys(8)
        put(store, keys)
        server.kill()
        server.start()
        assert store.lookup(keys) == [HIT] * 8  # nobody has asked yet
        wait_for(lambda: _tried(store, keys) == [None] * 8)
        wait_for(lambda: store.lookup(keys) == [MISS] * 8)
        wait_for(lambda: store.wait_up(0.1))
        assert put(store, keys) == [True] * 8


def _tried(store: RemoteStore, keys: Sequence[bytes]) -> list[bytes | None] | None:
    try:
        return fetch(store, keys)
    except TierError:
        return None


@pytest.mark.parametrize("path", ["memory", "socket"])
def test_a_server_that_hangs_costs_the_deadline_and_no_more(path: str) -> None:
    with (
        server_process() as server,
        opened(
            server.port,
            shares_memory=path == "memory",
            load_seconds=0.2,
            store_seconds=0.2,
            lookup_seconds=0.1,
        ) as store,
    ):
        keys = make_keys(8)
        put(store, keys)
        server.stop()
        for _ in range(5):
            for call, most in (
                (lambda: store.load(keys, make_buffers(8, LAYOUT)), 0.2),
                (lambda: store.store(keys, filled_buffers(keys, LAYOUT)), 0.2),
                (lambda: store.prefetch_lookup(make_keys(4, "unknown")), 0.1),
            ):
                began = time.monotonic()
                future: Future[Any] | None = call()
                if future is not None:
                    with pytest.raises(TierError):
                        future.result(WAIT_SECONDS)
                assert time.monotonic() - began < most + 5.0  # it would have no end
        server.go_on()
        wait_for(lambda: store.wait_up(0.1) and _tried(store, keys) is not None)
        assert fetch(store, keys) == [payload_of(key, LAYOUT) for key in keys]


def test_one_server_of_two_takes_only_its_own_blocks_with_it() -> None:
    with (
        running_server() as one,
        server_process() as two,
        opened(one.port, two.port) as store,
    ):
        keys = make_keys(32)
        put(store, keys)
        two.kill()
        found = _tried(store, keys)
        assert found is not None
        assert 0 < found.count(None) < 32
        assert all(
            block in (None, payload_of(key, LAYOUT)) for key, block in zip(keys, found, strict=True)
        )


def test_another_layout_is_refused_with_both(caplog: pytest.LogCaptureFixture) -> None:
    other = BlockLayout(2, 16, 1, 32, "float32")
    with running_server() as server, opened(server.port), caplog.at_level(logging.WARNING):
        with opened(server.port, layout=other, wait=False) as store:
            wait_for(lambda: store.stats().errors.get("layout"))
            assert store.lookup(make_keys(1)) == [MISS]
        (line,) = [r.message for r in caplog.records if "is not used" in r.message]
        assert "num_layers" in line
        assert "tried again, later every 30 s" in line


def test_a_token_that_the_server_does_not_know_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("not-" + token_of("a"))
    path.chmod(0o600)
    with running_server([tenant("a")]) as server:
        credentials = Credentials(token_file=path)
        with opened(server.port, wait=False, credentials=credentials) as store:
            wait_for(lambda: store.stats().errors.get("unauthenticated"))
            assert not store.wait_up(0)
        path.write_text(token_of("a") + "\n")
        with opened(server.port, credentials=credentials) as store:
            assert put(store, make_keys(1)) == [True]
    assert not [record for record in caplog.records if token_of("a") in record.getMessage()]


def test_files_that_cannot_be_used_are_told_at_once(tmp_path: Path) -> None:
    address = parse_address("grpc://127.0.0.1:1")
    for credentials, message in (
        (Credentials(token_file=tmp_path / "none"), "the token in .*none cannot be read"),
        (Credentials(ca_file=tmp_path / "none"), "the file in .*none cannot be read"),
    ):
        with pytest.raises(TierConfigError, match=message):
            open_remote([address], LAYOUT, RemoteSettings(credentials=credentials))
    with pytest.raises(TierConfigError, match="two files, the certificate and its key"):
        Credentials(cert_file=tmp_path / "cert")


def test_a_token_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("a token")
    path.chmod(0o644)
    Credentials(token_file=path).check_files()
    assert "can be read by other users" in caplog.text


def test_more_than_may_wait_is_refused() -> None:
    size = LAYOUT.page_bytes
    # What was taken waits for as long as the server hangs, however slow this machine is.
    with (
        server_process() as server,
        opened(server.port, queue_bytes=4 * size, store_seconds=WAIT_SECONDS) as store,
    ):
        put(store, make_keys(1))
        server.stop()
        keys = make_keys(4, "n")
        held = store.store(keys, filled_buffers(keys, LAYOUT))
        with pytest.raises(TierBusy, match="bytes wait"):
            store.store(keys, filled_buffers(keys, LAYOUT))
        server.go_on()
        assert held.result(WAIT_SECONDS) == [Stored.KEPT] * 4
        # And there is room again.
        assert put(store, make_keys(4, "later")) == [True] * 4


def test_a_lost_connection_is_opened_again_without_a_word() -> None:
    with running_server(limits=_short()) as server, opened(server.port) as store:
        keys = make_keys(4)
        put(store, keys)
        time.sleep(0.4)  # the server has ended idle connections by now
        assert None not in fetch(store, keys)
        assert put(store, make_keys(4, "n")) == [True] * 4
        assert store.stats().errors == {"not_ready": store.stats().errors.get("not_ready")}


def _short() -> Any:
    from stratakv.tiers.wire.limits import Limits

    return Limits(idle_seconds=0.2)
