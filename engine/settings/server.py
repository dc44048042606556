# SPDX-License-Identifier: Apache-2.0
"""The server's options by name, and the value object they become.

As `options.py` is for the engine. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..options import LOG_LEVELS, Option, flag_of
from . import readers

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How `stratakv serve` listens, whom it answers, and what it logs."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)  # None: no key is asked for
    generation_config: str = "auto"  # "none": the model's recommendations do not count
    enable_dev_routes: bool = False
    log_level: str = "info"
    log_json: bool = False
    log_stats: bool = True


def _generation_config(called: str, value: Any) -> str:
    """`vllm`, which is vLLM's word for its own defaults, is none too."""
    return readers.one_of("auto", "none")(called, "none" if value == "vllm" else value)


SERVER_OPTIONS: Mapping[str, Option] = {
    "host": Option("server", "host", readers.text, "address to listen on", "ADDRESS"),
    "port": Option(
        "server", "port", readers.integer_within(0, MAX_PORT), "port; 0 takes a free one", "N"
    ),
    "api_key": Option(
        "server", "api_key", readers.api_key, "ask clients for this key", "KEY", is_secret=True
    ),
    "generation_config": Option(
        "server", "generation_config", _generation_config,
        "auto: what the model's generation_config.json recommends is the default of requests",
        "WORD",
    ),
    "enable_dev_routes": Option(
        "server", "enable_dev_routes", readers.switch, "routes for tests, such as cache resets"
    ),
    "log_level": Option(
        "server", "log_level", readers.one_of(*LOG_LEVELS), ", ".join(LOG_LEVELS), "LEVEL"
    ),
    "log_json": Option("server", "log_json", readers.switch, "one JSON object for each log line"),
    "log_stats": Option(
        "server", "log_stats", readers.switch, "a line with figures every 10 s while there is work"
    ),
}  # fmt: skip


def server_config(given: Mapping[str, Any]) -> ServerConfig:
    """The server's settings from the options given; those of the engine are left alone."""
    fields = {
        option.field: option.read(flag_of(name), given[name])
        for name, option in SERVER_OPTIONS.items()
        if name in given
    }
    return ServerConfig(**fields)
