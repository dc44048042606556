# SPDX-License-Identifier: Apache-2.0
"""`stratakv ping ADDRESS`: measures how fast a cache server answers, and shows the transport.

The command times round trips of two calls and, if the tenant has a block layout, of a lookup and a
load of one missing block, over the connection that an engine on this machine would use. The command
changes nothing at the server. Exit codes: 0 the server is SERVING, 1 otherwise."""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from ....tiers.settings import readers
from ....tiers.settings.format import format_name, one_line
from ....tiers.settings.values import ConfigError
from .cache_client import (
    CALL_SECONDS,
    EXIT_NO_ANSWER,
    CacheClient,
    NoAnswer,
    add_client_arguments,
    client_of,
)

DESCRIPTION = "Ask whether a cache server answers, how fast, and how blocks would move."

_SERVING = "SERVING"
_KINDS = {
    "memory": "shared memory",
    "socket": "the data connection",
    "streams": "gRPC streams",
}
_MOST_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--count", metavar="N", default=5, help="round trips of each kind (5)")
    parser.add_argument(
        "--interval", metavar="SECONDS", default=0.1, help="between two of them (0.1)"
    )


def run(args: argparse.Namespace) -> int:
    count = readers.integer_within(1, 1000)("--count", args.count)
    interval = readers.number("--interval", args.interval)
    if not 0 <= interval <= _MOST_SECONDS:
        raise ConfigError(f"--interval takes seconds from 0 to {_MOST_SECONDS:g}, not {interval}")
    try:
        with client_of(args) as client:
            found = _ask(client, count, interval)
    except NoAnswer as error:
        print(f"stratakv ping: {one_line(str(error))}", file=sys.stderr)
        return EXIT_NO_ANSWER
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0 if found["status"] == _SERVING else EXIT_NO_ANSWER


def _ask(client: CacheClient, count: int, interval: float) -> dict[str, Any]:
    """Return all values that `run` prints, from the server's answers. Raises NoAnswer."""
    from ....proto.v1 import cache_service_pb2 as messages

    status = client.health()  # the first call also opens the connection
    described = client.call_method("describe", messages.DescribeRequest())
    trips = {
        "health": _trips(client.health, count, interval),
        "describe": _trips(
            lambda: client.call_method("describe", messages.DescribeRequest()), count, interval
        ),
    }
    found = {
        "address": str(client.address),
        "status": status,
        "tenant": described.tenant,
        "version": described.server_version,
        "boot_id": described.boot_id.hex(),
        "round_trips_ms": trips,
        "blocks": None,
        "note": "",
    }
    if not described.HasField("layout"):
        found["note"] = "no engine has attached yet, so there are no blocks to ask for"
        return found
    try:
        trips["lookup"] = _trips(
            lambda: client.call_method("lookup", messages.LookupRequest()), count, interval
        )
        kind, trips["blocks"] = _ask_for_block(client, described.layout, count, interval)
        found["blocks"] = kind
    except NoAnswer as error:
        found["note"] = one_line(str(error))
    return found


def _ask_for_block(
    client: CacheClient, layout_message: Any, count: int, interval: float
) -> tuple[str, dict[str, float]]:
    """Return the kind of connection, and the times of loads that find no block. Raises NoAnswer."""
    from ....tiers.block import DIGEST_BYTES, pack_key
    from ....tiers.errors import TierError
    from ....tiers.remote.remote_settings import RemoteSettings
    from ....tiers.remote.server_link import ServerLink
    from ....tiers.wire.frames import WireError
    from ....tiers.wire.protobuf_messages import read_layout
    from ....tiers.wire.sockets import ConnectionLost

    try:
        layout = read_layout(layout_message)
        settings = RemoteSettings(
            credentials=client.credentials, attach_seconds=CALL_SECONDS, stores=False
        )
        link = ServerLink(client.address, layout, settings)
        try:
            link.wait_up(CALL_SECONDS)
            connection = link.connect(time.monotonic() + CALL_SECONDS)
            buffer = memoryview(bytearray(layout.page_bytes))
            key = pack_key(secrets.token_bytes(DIGEST_BYTES))
            try:
                trips = _trips(
                    lambda: connection.load([key], [buffer], time.monotonic() + CALL_SECONDS),
                    count,
                    interval,
                )
            finally:
                connection.close()
        finally:
            link.close()
    except (TierError, ConnectionLost, WireError) as error:
        raise NoAnswer(f"blocks cannot be asked for: {error}") from error
    return connection.kind, trips


def _trips(ask: Callable[[], object], count: int, interval: float) -> dict[str, float]:
    """Return the minimum, median and maximum milliseconds of `count` calls of `ask`."""
    times = []
    for number in range(count):
        if number:
            time.sleep(interval)
        began = time.perf_counter()
        ask()
        times.append(1e3 * (time.perf_counter() - began))
    return {"min": min(times), "median": statistics.median(times), "max": max(times)}


def _print(found: dict[str, Any]) -> None:
    print(
        f"{found['address']}: {found['status']}, version {format_name(found['version'])}, tenant "
        f"{format_name(found['tenant'])}"
    )
    print(f"{'round trip':<12}{'min':>9}{'median':>9}{'max':>9} ms")
    for name, trip in found["round_trips_ms"].items():
        numbers = "".join(f"{trip[each]:>9.3f}" for each in ("min", "median", "max"))
        print(f"{name:<12}{numbers}")
    if found["blocks"] is not None:
        print(f"blocks move through {_KINDS[found['blocks']]}")
    if found["note"]:
        print(f"note: {found['note']}")
