# SPDX-License-Identifier: Apache-2.0
"""Calls as tests make them: one that must fail, a look-up, keys in a row."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.contract import make_keys
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.rpc import Stub

from .rig import WAIT_SECONDS


def refused(call: Any, *arguments: Any, **options: Any) -> tuple[Any, str, str]:
    """Code, reason and message of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        list(call(*arguments, timeout=WAIT_SECONDS, **options))
    error: Any = raised.value
    reason = dict(error.trailing_metadata() or ()).get("stratakv-reason", "")
    return error.code(), reason, error.details()


def packed(count: int, name: str = "block") -> bytes:
    return b"".join(make_keys(count, name))


def lookup(stub: Stub, keys: bytes) -> tuple[int, list[State]]:
    response = stub.lookup(messages.LookupRequest(keys=keys), timeout=WAIT_SECONDS)
    return response.prefix, [State(state) for state in response.states]
