# SPDX-License-Identifier: Apache-2.0
"""Checks of cache servers: a server must be reachable, accept the credentials, and allow the tenant
to store chunks of another engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....tiers.errors import TierConfigError
from ....tiers.remote.credentials import Credentials
from ....tiers.remote.membership import ServerAddress
from ....tiers.settings.format import format_name
from ....tiers.settings.sizes import rough_size
from ....tiers.settings.values import ConfigError
from ....tiers.tier_settings import TierSettings
from ..tiers.cache_client import CacheClient, NoAnswer
from .base import Finding, ok, problem, warning

FLAG = "--remote-"


def check_servers(tiers: TierSettings) -> Iterator[Finding]:
    """Check each cache server, and whether the tenant may store chunks on the server."""
    try:
        credentials = tiers.remote.credentials()
    except TierConfigError as error:
        yield problem("cache servers", str(error), "give both, or neither")
        return
    for address in tiers.cache_servers:
        yield from _check_server(address, credentials, is_required=tiers.require_tiers)


def _check_server(
    address: ServerAddress, credentials: Credentials, *, is_required: bool
) -> Iterator[Finding]:
    from ....proto.v1 import cache_service_pb2 as messages

    what = "cache server"
    try:
        with CacheClient(address, credentials, flag=FLAG) as client:
            status = client.health()
            described = client.call_method("describe", messages.DescribeRequest())
    except (ConfigError, TierConfigError) as error:
        yield problem(what, str(error), "give files that can be read")
        return
    except NoAnswer as error:
        if not error.is_down:
            yield problem(what, str(error), "mend that, or leave the server out")
        elif is_required:
            yield problem(what, str(error), "start it, or leave out --require-tiers")
        else:
            yield warning(what, str(error), "start it; until then the engine runs without it")
        return
    shown = (
        f"{address} {status}, version {format_name(described.server_version)}, tenant "
        f"{format_name(described.tenant)} with {rough_size(described.capacity_bytes)}"
    )
    if described.HasField("layout") and not _is_of_chunks(described.layout):
        yield problem(
            what, f"{shown} has blocks of {_show(described.layout)}, not chunks of another engine",
            "give each model, and each way to split it, a tenant of its own",
        )  # fmt: skip
    elif status != "SERVING":
        yield warning(what, shown, "it is about to stop; start it again")
    else:
        yield ok(what, shown)


def _is_of_chunks(layout: Any) -> bool:
    """Return whether blocks are chunks of another engine, for StrataKV only a row of bytes."""
    return (layout.num_layers, layout.block_size_tokens, layout.num_kv_heads) == (1, 1, 1)


def _show(layout: Any) -> str:
    return (
        f"{layout.num_layers} layers, {layout.num_kv_heads} KV heads, {layout.block_size_tokens} "
        "tokens"
    )
