# SPDX-License-Identifier: Apache-2.0
"""The settings of the tiers below vLLM: read from the JSON that vLLM is given, and written for it.

The names are those of the engine's flags without `--kv-offload-`, with underscores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...tiers.errors import TierConfigError
from ...tiers.fault_injection.store import Drill, parse_drill
from ...tiers.remote.address import ServerAddress, parse_address
from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import Option, options_of, setting
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ...tiers.tier_settings import CpuSettings, RemoteTierSettings, SsdSettings, TierSettings

MODULE = "stratakv.connector.vllm"
SPEC, TIER, CONNECTOR = "StrataSpec", "StrataTier", "StrataConnector"
# Where the settings stand among vLLM's own of the connector, for StrataSpec.
SECTION = "stratakv"

LOADS = ("auto", "always")
MAX_SECONDS = 600.0


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


def _seconds(called: str, value: Any) -> float:
    number = readers.number(called, value)
    if not 0 < number <= MAX_SECONDS:
        raise ConfigError(
            f"{called} takes seconds above 0 and at most {MAX_SECONDS:g}, not {format_value(value)}"
        )
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    """Those beside the tiers' own."""

    servers: tuple[ServerAddress, ...] = setting(
        (), _servers, "addresses of the cache servers, which are one tier together", "LIST"
    )
    load: str = setting(
        "auto", readers.one_of(*LOADS),
        "load what a tier has where that is quicker than computing (auto), or always", "NAME",
    )  # fmt: skip
    write_through: bool = setting(
        True, readers.switch,
        "write to the ssd at once, since vLLM may be killed at a stop, and not before an eviction",
    )  # fmt: skip
    revision: str | None = setting(
        None, readers.text, "keeps blocks of otherwise equal models apart", "TEXT"
    )
    salt: str | None = setting(
        None, readers.text, "keeps blocks of whoever has another salt apart", "TEXT"
    )
    require: bool = setting(
        False, readers.switch, "refuse to start while a tier is down", name="require_tiers"
    )
    read_seconds: float = setting(
        5.0, _seconds, "how long a tier may take to bring blocks before they are computed", "N"
    )
    shutdown_seconds: float = setting(
        5.0, _seconds, "how long a stop may take to write blocks down", "N"
    )
    faults: str = setting(
        "", readers.text, "a drill: faults of the tiers below cpu, on purpose", "LIST"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of them. `ssd` has no effect without a path."""

    own: OwnSettings
    cpu: CpuSettings
    ssd: SsdSettings
    remote: RemoteTierSettings

    def tiers(self) -> TierSettings:
        """What the tiers are built from."""
        return TierSettings(
            cpu=self.cpu,
            ssd=None if self.ssd.path is None else self.ssd,
            remote=self.remote,
            addresses=self.own.servers,
            require=self.own.require,
        )

    def drill(self) -> Drill | None:
        """The faults to inject; None where none were asked for. Raises ConfigError."""
        if not self.own.faults:
            return None
        names = ["ssd"] * (self.ssd.path is not None) + ["remote"] * bool(self.own.servers)
        try:
            return parse_drill(self.own.faults, names)
        except TierConfigError as error:
            raise ConfigError(f"faults {format_value(self.own.faults)}: {error}") from error


OPTIONS: Mapping[str, Option] = {
    **options_of(CpuSettings, "cpu", "cpu_"),
    **options_of(SsdSettings, "ssd", "ssd_"),
    **options_of(RemoteTierSettings, "remote", "remote_"),
    **options_of(OwnSettings, "own"),
}
_SECTIONS = {
    "own": OwnSettings,
    "cpu": CpuSettings,
    "ssd": SsdSettings,
    "remote": RemoteTierSettings,
}


def read_settings(given: Mapping[str, Any]) -> Settings:
    """The settings in a JSON object of vLLM's configuration. Raises ConfigError, which names what
    is wrong, for what is unknown or cannot work."""
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None:
            near = did_you_mean(name, OPTIONS) or f"; there are {', '.join(OPTIONS)}"
            raise ConfigError(f"StrataKV has no setting {format_value(name)} for vLLM{near}")
        if value is None:
            continue
        read = option.read(name, value)
        option.check(name, read)
        values[option.section][option.field] = read
    made = {name: kind(**values[name]) for name, kind in _SECTIONS.items()}
    settings = Settings(**made)
    if settings.ssd.path is None and values["ssd"]:
        raise ConfigError("settings of the ssd tier have no effect without ssd_path; give it")
    if settings.ssd.codec == "fp8":
        raise ConfigError(
            "ssd_codec fp8 needs to know where rows of numbers lie, which vLLM decides; use "
            "lossless or none"
        )
    settings.drill()
    return settings


def transfer_config(region_bytes: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `--kv-transfer-config` of vLLM takes: a region of so many bytes, and these settings.
    Raises ConfigError for what vLLM would be refused for at its start."""
    read_settings(given)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        # What vLLM does where a load of its own fails; below its region nothing does.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": SPEC,
            "spec_module_path": MODULE,
            "cpu_bytes_to_use": region_bytes,
            SECTION: dict(given),
        },
    }


def connector_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for StrataConnector, which has no region of vLLM's."""
    read_settings(given)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {SECTION: dict(given)},
    }
