# SPDX-License-Identifier: Apache-2.0
"""`stratakv describe ADDRESS`: prints a cache server's version and limits, and the tenant's data.

The command changes nothing at the server. Exit codes: 0 the server answered, 1 no answer."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ....tiers.settings.format import format_name, one_line
from ....tiers.settings.sizes import show_size
from .cache_client import EXIT_NO_ANSWER, CacheClient, NoAnswer, add_client_arguments, client_of

DESCRIPTION = "Say what a cache server is, what it allows, and what the tenant has there."

_LIMITS = ("max_keys", "max_blocks", "max_piece_bytes", "max_lease_ms")
_LAYOUT = (
    "layout_version", "num_layers", "block_size_tokens", "num_kv_heads", "head_dim", "kv_dtype",
)  # fmt: skip
_TIER = (
    "name", "capacity_bytes", "used_bytes", "blocks", "hits", "misses", "stored_blocks",
    "loaded_blocks", "evicted_blocks",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_client_arguments(parser)


def run(args: argparse.Namespace) -> int:
    try:
        with client_of(args) as client:
            found = _ask(client)
    except NoAnswer as error:
        print(f"stratakv describe: {one_line(str(error))}", file=sys.stderr)
        return EXIT_NO_ANSWER
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0


def _ask(client: CacheClient) -> dict[str, Any]:
    """Return all values that `run` prints, from the server's answers. Raises NoAnswer."""
    from ....proto.v1 import cache_service_pb2 as messages

    described = client.call_method("describe", messages.DescribeRequest())
    found: dict[str, Any] = {
        "address": str(client.address),
        "version": described.server_version,
        "boot_id": described.boot_id.hex(),
        "tenant": described.tenant,
        "limits": {name: getattr(described, name) for name in _LIMITS},
        "capacity_bytes": described.capacity_bytes,
        "layout": None,
        "tiers": [],
    }
    if not described.HasField("layout"):
        return found
    found["layout"] = {name: getattr(described.layout, name) for name in _LAYOUT}
    stats = client.call_method("stats", messages.StatsRequest())
    found["tiers"] = [{name: getattr(tier, name) for name in _TIER} for tier in stats.tiers]
    found |= {"leases": stats.leases, "corrupt_blocks": stats.corrupt_blocks}
    return found


def _print(found: dict[str, Any]) -> None:
    print(
        f"{found['address']}: version {format_name(found['version'])}, boot id {found['boot_id']}"
    )
    print(f"tenant     {format_name(found['tenant'])}")
    print("limits     " + ", ".join(f"{name} {value}" for name, value in found["limits"].items()))
    if found["layout"] is None:
        print("layout     none: no engine has attached yet")
        return
    parts = (f"{name} {format_name(str(value))}" for name, value in found["layout"].items())
    print("layout     " + ", ".join(parts))
    print(f"capacity   {show_size(found['capacity_bytes'])}")
    for tier in found["tiers"]:
        print(f"tier {format_name(tier['name']):<6}{_of_tier(tier)}")
    print(f"leases     {found['leases']}")
    print(f"corrupt    {found['corrupt_blocks']} blocks refused")


def _of_tier(tier: dict[str, Any]) -> str:
    sizes = f"{show_size(tier['used_bytes'])} of {show_size(tier['capacity_bytes'])}"
    rest = ", ".join(f"{name} {tier[name]}" for name in _TIER[3:])
    return f"{sizes}, {rest}"
