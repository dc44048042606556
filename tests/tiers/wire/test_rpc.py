# SPDX-License-Identifier: Apache-2.0
"""The table of calls is the descriptor's, on both sides."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2
from stratakv.tiers.cache_server.service import CacheService
from stratakv.tiers.wire.rpc import METHODS, SERVICE_NAME, Stub, make_channel

from ..cache_server.rig import running_server

PROTO = Path(cache_service_pb2.__file__).with_name("cache_service.proto")


def test_every_call_of_the_proto_file_is_in_the_table() -> None:
    calls = re.findall(
        r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\)", PROTO.read_text()
    )
    assert len(calls) == len(METHODS) == 12
    for method, (name, sends, request, receives, response) in zip(METHODS, calls, strict=True):
        assert method.name == name
        assert method.path == f"/{SERVICE_NAME}/{name}"
        assert method.request_class is getattr(cache_service_pb2, request)
        assert method.response_class is getattr(cache_service_pb2, response)
        assert (method.client_streaming, method.server_streaming) == (bool(sends), bool(receives))


def test_names_in_python() -> None:
    names = {method.name: method.attribute for method in METHODS}
    assert (names["Lookup"], names["OpenData"]) == ("lookup", "open_data")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_the_service_has_every_call(method) -> None:
    assert inspect.iscoroutinefunction(getattr(CacheService, method.attribute))


def test_a_stub_has_every_call() -> None:
    with make_channel("127.0.0.1:1") as channel:
        stub = Stub(channel)
        kinds = {method.attribute: method.kind for method in METHODS}
        for name, kind in kinds.items():
            wanted = {"unary": "Unary", "stream": "Stream"}
            first, second = kind.split("_")
            expected = f"{wanted[first]}{wanted[second]}MultiCallable"
            bases = [base.__name__ for base in type(getattr(stub, name)).__mro__]
            assert expected in bases


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_bytes_that_are_no_message_are_the_callers_fault(method) -> None:
    with (
        running_server(data_port=None, shares_memory=False) as server,
        server.channel() as channel,
    ):
        call = getattr(channel, method.kind)(method.path)  # bytes as they are
        garbage = b"\x0a\xff\xff"
        with pytest.raises(grpc.RpcError) as raised:
            list(call(iter([garbage]) if method.client_streaming else garbage, timeout=10))
        # A Store asks for a room before it looks at its first piece.
        wanted = {"Store": grpc.StatusCode.FAILED_PRECONDITION}
        expected = wanted.get(method.name, grpc.StatusCode.INVALID_ARGUMENT)
        assert raised.value.code() is expected
