# SPDX-License-Identifier: Apache-2.0
"""Every option there is, of the engine and of the server, in one table.

`SCHEMA` is what environment and files may name. Also says what holds where nothing is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.option import Option
from ...tiers.settings.setting_layers import MODEL
from ...tiers.settings.sizes import exact_size
from ...tiers.tier_settings import REMOTE
from .engine_config import EngineConfig, ModelConfig
from .engine_options import EMBEDDED_MODEL, EMBEDDED_NAME, OPTIONS
from .offload_config import OFFLOAD_TIERS, has_tier
from .server_options import SERVER_OPTIONS, ServerConfig

MODEL_OPTION = Option(
    "model",
    "path",
    readers.model,
    "a model directory, or the id of a model on the Hub",
    "MODEL",
    "the embedded model",
)
SCHEMA: Mapping[str, Option] = {MODEL: MODEL_OPTION, **OPTIONS, **SERVER_OPTIONS}

VARIABLE_PREFIX = "STRATAKV_"
# Shown in place of a secret. Not even the length shows.
MASK = "***"
_POOL_SIZES = ("num_blocks", "kv_cache_memory_bytes")

_DEFAULT_ENGINE = EngineConfig(ModelConfig(EMBEDDED_MODEL, EMBEDDED_NAME))
_DEFAULT_SERVER = ServerConfig()


def variable_of(name: str) -> str:
    """`block_size` → `STRATAKV_BLOCK_SIZE`."""
    return VARIABLE_PREFIX + name.upper()


def value_in(name: str, engine: EngineConfig, server: ServerConfig) -> Any:
    """The value of an option in these settings."""
    option = SCHEMA[name]
    if option.section == "server":
        return getattr(server, option.field)
    return attrgetter(option.path)(engine)


def masked(name: str, value: Any) -> Any:
    """A value as a file takes it: a text, a number or a truth value; None where there is none."""
    option = SCHEMA[name]
    if option.read is readers.tiers:
        return ",".join(value) or "none"
    if value is None or value in ("", b"", {}, ()):
        return None
    if option.is_secret:
        return MASK
    if option.read is readers.tier_options:
        return ",".join(f"{t}.{o}={v}" for t, of in value.items() for o, v in of.items())
    if option.read is readers.size:
        return exact_size(value) or str(value)
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value) if isinstance(value, Path) else value


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


def default_text(name: str) -> str:
    """The default, in words or in the form that a flag takes."""
    if name in (MODEL, "served_model_name"):
        return SCHEMA[name].unset
    value = masked(name, value_in(name, _DEFAULT_ENGINE, _DEFAULT_SERVER))
    if isinstance(value, bool):
        return "on" if value else "off"
    return SCHEMA[name].unset if value is None else str(value)
