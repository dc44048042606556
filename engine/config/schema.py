# SPDX-License-Identifier: Apache-2.0
"""Every option there is, of the engine and of the server, in one table.

`SCHEMA` is what environment and files may name. Also says which options have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.option import Option
from ...tiers.tier_settings import REMOTE
from .engine_config import EngineConfig
from .engine_options import OPTIONS
from .offload_config import OFFLOAD_TIERS, has_tier
from .server_options import SERVER_OPTIONS, ServerConfig

MODEL = "model"  # the only option that is an argument and no flag
VARIABLE_PREFIX = "STRATAKV_"

MODEL_OPTION = Option(
    "model",
    "path",
    readers.model,
    "a model directory, or the id of a model on the Hub",
    "MODEL",
    "the embedded model",
)
SCHEMA: Mapping[str, Option] = {MODEL: MODEL_OPTION, **OPTIONS, **SERVER_OPTIONS}

_POOL_SIZES = ("num_blocks", "kv_cache_memory_bytes")


def variable_of(name: str) -> str:
    """`block_size` → `STRATAKV_BLOCK_SIZE`."""
    return VARIABLE_PREFIX + name.upper()


def value_in(name: str, engine: EngineConfig, server: ServerConfig) -> Any:
    """The value of an option in these settings."""
    option = SCHEMA[name]
    if option.section == "server":
        return getattr(server, option.field)
    return attrgetter(option.path)(engine)


def hides(name: str, value: Any) -> Iterator[str]:
    """The options that mean nothing once `name` has this value."""
    if name in _POOL_SIZES:
        yield from (other for other in _POOL_SIZES if other != name)
    elif name == "kv_offload":
        for tier in (*OFFLOAD_TIERS, REMOTE):
            if not has_tier(value, tier):
                yield from (other for other in OPTIONS if other.startswith(f"kv_offload_{tier}_"))


def without_effect(engine: EngineConfig) -> Iterator[str]:
    """The options that mean nothing to this engine."""
    if engine.cache.num_blocks is not None:
        yield from hides("num_blocks", engine.cache.num_blocks)
    offload = engine.offload
    yield from hides("kv_offload", offload.tiers)
    for name, value in (("kv_peers", offload.peers), ("kv_serve", offload.serve_at)):
        if not value:
            yield from (other for other in OPTIONS if other.startswith(f"{name}_"))
