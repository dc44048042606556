# SPDX-License-Identifier: Apache-2.0
"""`SCHEMA`: the options of engine and server, which environment variables and files may set."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.option import Option
from .engine_config import EngineConfig
from .engine_options import OPTIONS
from .server_options import SERVER_OPTIONS, ServerConfig

MODEL = "model"  # the only option that is a positional argument, and not a flag
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


def variable_of(name: str) -> str:
    """Return the environment variable of an option, such as STRATAKV_BLOCK_SIZE."""
    return VARIABLE_PREFIX + name.upper()


def value_in(name: str, engine: EngineConfig, server: ServerConfig) -> Any:
    option = SCHEMA[name]
    if option.section == "server":
        return getattr(server, option.field)
    return attrgetter(option.path)(engine)
