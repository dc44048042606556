# SPDX-License-Identifier: Apache-2.0
"""How much one run of `stratakv bench service` does, and what it promises of each ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..harness.comparison import Gate
from ..tiers.scale import MIB

SIZES: Mapping[str, int] = {"256KiB": 256 * 1024, "2MiB": 2 * MIB}
LOOK_UP_KEYS = (1024, 4096)  # of one call


class Case(NamedTuple):
    """One row: `transport` moves blocks as `verb` says, `limit` the same without a service."""

    name: str
    transport: str
    verb: str
    limit: str
    least: float | None = None  # of the ratio with one client; more are reported only


CASES = (
    Case("shm_batch", "shm", "load", "copy", 0.7),
    Case("shm_store", "shm", "store", "copy"),
    Case("tier_load", "tier", "load", "copy"),
    Case("tier_store", "tier", "store", "copy"),
    Case("data_load", "data", "load", "raw", 0.8),
    Case("data_store", "data", "store", "raw", 0.7),
    Case("grpc_stream", "grpc", "load", "raw", 0.25),
    Case("grpc_stream_store", "grpc", "store", "raw"),
    Case("data_load_tls", "tls", "load", "raw_tls", 0.5),
    Case("redis_get", "redis", "load", "raw"),
    Case("redis_set", "redis", "store", "raw"),
    Case("mooncake_read", "mooncake", "load", "raw"),
    Case("mooncake_write", "mooncake", "store", "raw"),
)
LIMITS: Mapping[str, str] = {"copy": "memcpy", "raw": "TCP", "raw_tls": "TLS"}


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in bytes, of all clients together, and numbers of rounds."""

    footprint_bytes: int  # of each client, and again at the other end; at least this
    copied_bytes: int  # in one round of a memory copy
    sent_bytes: int  # in one round of anything else
    rounds: int  # even, so that either side is the first one as often
    clients: Sequence[int]
    look_ups: int  # calls


FULL = Scale(
    footprint_bytes=64 * MIB,
    copied_bytes=1024 * MIB,
    sent_bytes=384 * MIB,
    rounds=12,
    clients=(1, 4),
    look_ups=200,
)
QUICK = Scale(
    footprint_bytes=32 * MIB,
    copied_bytes=64 * MIB,
    sent_bytes=32 * MIB,
    rounds=2,
    clients=(1,),
    look_ups=20,
)


def row_name(case: str, size: str, clients: int) -> str:
    """The name of a ratio."""
    return f"{case}_{size}" + (f"_{clients}" if clients > 1 else "")


def look_up_name(keys: int) -> str:
    """The name of a rate of look-ups."""
    return f"lookup_{keys}_keys_per_second"


def _gates() -> dict[str, Gate]:
    gates = {look_up_name(LOOK_UP_KEYS[0]): Gate(least=500_000)}
    for case in CASES:
        if case.least is not None:
            gates |= {row_name(case.name, size, 1): Gate(least=case.least) for size in SIZES}
    return gates


GATES: Mapping[str, Gate] = _gates()
