# SPDX-License-Identifier: Apache-2.0
"""The settings of the tiers below vLLM: read from the JSON that vLLM is given, and written for it.

The names are those of the engine's flags without `--kv-offload-`, with underscores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...tiers.errors import TierConfigError
from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import setting
from ...tiers.settings.values import ConfigError
from ...tiers.testing.faulty_store import Drill, parse_drill
from ..chunks.chunk_settings import Host, OwnSettings, Settings

MODULE = "stratakv.connector.vllm"
SPEC, TIER, CONNECTOR = "StrataSpec", "StrataTier", "StrataConnector"
# Where the settings stand among vLLM's own of the connector, for StrataSpec.
SECTION = "stratakv"

LOADS = ("auto", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(OwnSettings):
    """Those that other hosts lack."""

    load: str = setting(
        "auto", readers.one_of(*LOADS),
        "load what a tier has where that is quicker than computing (auto), or always", "NAME",
    )  # fmt: skip
    write_through: bool = setting(
        True, readers.switch,
        "write to the ssd at once, since vLLM may be killed at a stop, and not before an eviction",
    )  # fmt: skip
    faults: str = setting(
        "", readers.text, "a drill: faults of the tiers below cpu, on purpose", "LIST"
    )


HOST = Host("vLLM", VllmSettings)
OPTIONS = HOST.options


def read_settings(given: Mapping[str, Any]) -> Settings[VllmSettings]:
    """The settings in a JSON object of vLLM's configuration. Raises ConfigError, which names what
    is wrong, for what is unknown or cannot work."""
    settings = HOST.read(given)
    drill_of(settings)
    return settings


def drill_of(settings: Settings[VllmSettings]) -> Drill | None:
    """The faults to inject; None where none were asked for. Raises ConfigError."""
    faults = settings.own.faults
    if not faults:
        return None
    names = ["ssd"] * (settings.ssd.path is not None) + ["remote"] * bool(settings.own.servers)
    try:
        return parse_drill(faults, names)
    except TierConfigError as error:
        raise ConfigError(f"faults {format_value(faults)}: {error}") from error


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
