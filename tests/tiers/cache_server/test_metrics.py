# SPDX-License-Identifier: Apache-2.0
"""What the server counts, and where it says so."""

from __future__ import annotations

import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.contract import make_keys

from ...pages import read_command_pages
from .rig import (
    LAYOUT,
    WAIT_SECONDS,
    RunningServer,
    load_blocks,
    running_server,
    store_blocks,
    tenant,
    token_of,
)


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _scrape(server: RunningServer) -> str:
    """The metrics, once the calls whose answers we have are counted."""
    deadline = time.monotonic() + WAIT_SECONDS
    while server.server._guard.running and time.monotonic() < deadline:
        time.sleep(0.002)
    status, text = _get(f"http://127.0.0.1:{server.server.metrics_port}/metrics")
    assert status == 200
    return text


def test_metrics(tmp_path: Path) -> None:
    tenants = [tenant("ann"), tenant("bob", pool="shared")]
    with running_server(tenants, metrics_port=0) as server:
        stub = server.stub(token_of("ann"))
        server.attach(stub)
        keys = make_keys(3)
        store_blocks(stub, keys)
        load_blocks(stub, keys + make_keys(1, "unknown"))
        with pytest.raises(grpc.RpcError):
            server.stub().stats(messages.StatsRequest(), timeout=WAIT_SECONDS)
        base = f"http://127.0.0.1:{server.server.metrics_port}"
        text = _scrape(server)
        size = 3 * LAYOUT.page_bytes
        for line in (
            'stratakv_cache:tier_blocks{room="tenant:ann",tier="cpu"} 3.0',
            'stratakv_cache:tier_hits_total{room="tenant:ann",tier="cpu"} 3.0',
            'stratakv_cache:calls_total{code="OK",method="Store"} 1.0',
            'stratakv_cache:calls_total{code="UNAUTHENTICATED",method="Stats"} 1.0',
            'stratakv_cache:call_seconds_count{method="Load"} 1.0',
            f'stratakv_cache:stream_received_bytes_total{{tenant="ann"}} {float(size)}',
            f'stratakv_cache:stream_sent_bytes_total{{tenant="ann"}} {float(size)}',
            'stratakv_cache:corrupt_blocks_total{room="tenant:ann"} 0.0',
            "stratakv_cache:rooms_ready 1.0",
            "stratakv_cache:calls_running 0.0",
            "stratakv_cache:data_connections 0.0",
        ):
            assert line in text.splitlines(), line
        assert re.search(r"^process_resident_memory_bytes ", text, re.MULTILINE)
        assert token_of("ann") not in text
        assert _get(f"{base}/")[0] == 404


def test_leases_that_ran_out_are_counted() -> None:
    with running_server() as server:
        stub = server.stub()
        server.attach(stub)
        [key, other] = make_keys(2)
        store_blocks(stub, [key])
        assert stub.pin(messages.PinRequest(keys=key, lease_ms=1), timeout=WAIT_SECONDS).lease
        store = server.tenant_store()
        store.restore_slots(store.abandon_store(store.begin_store([other])))
        deadline = time.monotonic() + WAIT_SECONDS
        while store.num_leases and time.monotonic() < deadline:
            time.sleep(0.01)
        lines = server.server._metrics.exposition().decode().splitlines()
        for name in ("expired_leases", "late_writers"):
            assert f'stratakv_cache:{name}_total{{room="tenant:default"}} 1.0' in lines


def test_the_table_of_metrics_is_true(tmp_path: Path) -> None:
    """Names, types and labels of docs/commands are those of a scrape."""
    rows = re.findall(
        r"^\| `(stratakv_cache:\w+)` \| (\w+) \| ([\w, ]*?) ?\|", read_command_pages(), re.MULTILINE
    )
    documented = {name: (kind, frozenset(re.findall(r"\w+", text))) for name, kind, text in rows}
    with running_server(metrics_port=0) as server:
        stub = server.stub()
        server.attach(stub)
        store_blocks(stub, make_keys(1))
        load_blocks(stub, make_keys(1))
        text = _scrape(server)
    scraped = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("stratakv_cache:") and not family.name.endswith("_created"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            scraped[family.name] = (family.type, frozenset(labels))
    assert scraped == documented


def test_calls_that_nobody_knows_make_no_new_labels() -> None:
    with running_server(metrics_port=0, reflection=True) as server, server.channel() as channel:
        for number in range(5):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/a.b/C{number}")(b"", timeout=WAIT_SECONDS)
        text = _scrape(server)
        methods = set(re.findall(r'method="(\w+)"', text))
        assert len(methods) == 13 and "other" in methods


def test_the_metrics_port_takes_nothing_but_a_small_request() -> None:
    with running_server(metrics_port=0) as server:
        address = ("127.0.0.1", server.server.metrics_port)
        for request, answer in (
            (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
            (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 200"),
            (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
            (b"junk\r\n\r\n", b"HTTP/1.1 404"),
            (b"GET /metrics " + b"x" * 20_000, b""),
        ):
            with socket.create_connection(address, timeout=WAIT_SECONDS) as sock:
                try:
                    sock.sendall(request)
                    got = sock.recv(1000)
                except ConnectionError:
                    got = b""
                assert got[: len(answer)] == answer
        # Some who say nothing keep nobody else out.
        silent = [socket.create_connection(address) for _ in range(8)]
        assert _get(f"http://127.0.0.1:{address[1]}/metrics")[0] == 200
        for sock in silent:
            sock.close()
