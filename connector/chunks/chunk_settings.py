# SPDX-License-Identifier: Apache-2.0
"""The settings of tiers below another project's engine, read from that engine's JSON object.

A setting's name is StrataKV's flag without `--kv-offload-`, with underscores. Each `Host` has
`HostSettings` or a subclass with more fields, and its own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...tiers.errors import TierConfigError
from ...tiers.hierarchy.hierarchy_options import READ_SECONDS
from ...tiers.remote.membership import ServerAddress, parse_address
from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import Option, build_settings, options_of, setting
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ...tiers.tier_settings import (
    CpuSettings,
    RemoteTierSettings,
    SsdSettings,
    TierSettings,
)

_seconds = readers.seconds_up_to(600.0)

_TIER_OPTIONS: Mapping[str, Option] = {
    **options_of(CpuSettings, "cpu", "cpu_"),
    **options_of(SsdSettings, "ssd", "ssd_"),
    **options_of(RemoteTierSettings, "remote", "remote_"),
}


def _servers(called: str, value: Any) -> tuple[ServerAddress, ...]:
    given = value.split(",") if isinstance(value, str) else value
    kinds = str | ServerAddress
    if not isinstance(given, list | tuple) or not all(isinstance(each, kinds) for each in given):
        raise ConfigError(f"{called} takes addresses of cache servers, not {format_value(value)}")
    try:
        servers = tuple(parse_address(str(each)) for each in given if each)
    except TierConfigError as error:
        raise ConfigError(f"{called}: {error}") from error
    if len({server.tls for server in servers}) > 1:
        raise ConfigError(f"{called} mixes servers with and without TLS; use one of the two")
    return servers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings(TierSettings):
    """The settings of tiers below any host."""

    cache_servers: tuple[ServerAddress, ...] = setting(
        (), _servers, "addresses of the cache servers, which are one tier together", "LIST",
        name="servers",
    )  # fmt: skip
    revision: str | None = setting(
        None, readers.text, "keeps chunks of otherwise equal models apart", "TEXT"
    )
    salt: str | None = setting(None, readers.text, "keeps chunks with another salt apart", "TEXT")
    require_tiers: bool = setting(False, readers.switch, "refuse to start while a tier is down")
    read_seconds: float = setting(
        READ_SECONDS, _seconds, "how long the tiers may take to bring the chunks of a load", "N"
    )
    shutdown_seconds: float = setting(
        5.0, _seconds, "how long a stop may take to write chunks down", "N"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings(HostSettings):
    """Settings of a host that waits for results, with time limits. A chunk that was reported as
    stored is written to a store at once, and is not evicted before."""

    watermark: float = 1.0
    keeps_unwritten: bool = True
    lookup_seconds: float = setting(
        1.0, _seconds, "how long a look-up may wait for cache servers", "N"
    )
    store_seconds: float = setting(
        5.0, _seconds, "how long a store may wait for the disk before it is refused", "N"
    )


Settings = TypeVar("Settings", bound=HostSettings)


@dataclass(frozen=True, slots=True)
class Host(Generic[Settings]):
    """An engine above the tiers: its settings and their defaults. With `needs_store` the host has
    its own memory for chunks, so the tiers must include SSD or cache servers."""

    name: str
    kind: type[Settings]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs_store: bool = False

    @property
    def options(self) -> Mapping[str, Option]:
        return {**_TIER_OPTIONS, **options_of(self.kind, "")}

    def read(self, given: Mapping[str, Any]) -> Settings:
        """Return the settings in a host's JSON object. Raises ConfigError, naming the setting."""
        options = self.options
        for name in given:
            if name not in options:
                near = did_you_mean(name, options) or f"; there are {', '.join(options)}"
                raise ConfigError(
                    f"StrataKV has no setting {format_value(name)} for {self.name}{near}"
                )
        given = {name: value for name, value in given.items() if value is not None}
        values: dict[str, dict[str, Any]] = {}
        for name, value in {**self.defaults, **given}.items():
            option = options[name]
            read = option.read(name, value)
            option.check_value(name, read)
            values.setdefault(option.section, {})[option.field] = read
        settings = build_settings(self.kind, values)
        self._check_host_settings(settings, given)
        return settings

    def _check_host_settings(self, settings: Settings, given: Mapping[str, Any]) -> None:
        if not settings.has_ssd and any(name.startswith("ssd_") for name in given):
            raise ConfigError("settings of the ssd tier have no effect without ssd_path; give it")
        if self.needs_store and not settings.has_ssd and not settings.cache_servers:
            raise ConfigError(
                f"StrataKV below {self.name} needs a place for chunks: give ssd_path (a "
                "directory), servers (addresses of cache servers), or both"
            )
        if settings.ssd.rounds:
            raise ConfigError(
                f"ssd_codec {settings.ssd.codec} needs to know where rows of numbers lie, which "
                f"{self.name} decides; use lossless or none"
            )
        try:
            _ = settings.drill
        except TierConfigError as error:
            raise ConfigError(f"faults {format_value(settings.faults)}: {error}") from error


MAX_LAYOUTS, MAX_CHUNK_BYTES = 16, 2**40


def lmcache_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of LMCache's `--l2-adapter`. Raises ConfigError for refused settings."""
    ours = {name: value for name, value in given.items() if name not in ("layouts", "chunk_bytes")}
    chunk_host("LMCache").read(ours)
    return {
        "type": "plugin",
        "module_path": "stratakv.connector.lmcache",
        "class_name": "StrataL2Adapter",
        "adapter_params": dict(given),
    }


def sglang_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of SGLang's `--hicache-storage-backend-extra-config` for its back end
    `dynamic`, with these settings. Raises ConfigError."""
    chunk_host("SGLang").read(given)
    return {
        "backend_name": "stratakv",
        "interface_v1": 1,
        "module_path": "stratakv.connector.sglang",
        "class_name": "StrataHiCacheStorage",
        **given,
    }


def chunk_host(name: str) -> Host[ChunkSettings]:
    """Return the `Host` of an engine that passes a chunk to the tiers once, when it lacks room. By
    default the tiers admit every chunk, because the host has already chosen the chunk."""
    defaults = {"cpu_bytes": "1GiB", "cpu_policy": "lru", "ssd_admission": "all"}
    return Host(name, ChunkSettings, defaults, needs_store=True)
