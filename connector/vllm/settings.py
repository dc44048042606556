# SPDX-License-Identifier: Apache-2.0
"""The settings of the tiers below vLLM, read from vLLM's JSON configuration or written into one. A
setting's name is StrataKV's flag without `--kv-offload-`, with underscores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...tiers.hierarchy.hierarchy_options import WATERMARK
from ...tiers.settings import readers
from ...tiers.settings.option import setting
from ..chunks.chunk_settings import Host, HostSettings

MODULE = "stratakv.connector.vllm"
SPEC, TIER, CONNECTOR = "StrataSpec", "StrataTier", "StrataConnector"
# The key of StrataKV's settings in vLLM's `kv_connector_extra_config`.
SECTION = "stratakv"

LOADS = ("auto", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(HostSettings):
    """The settings of tiers below vLLM. The options that are defined here exist only for vLLM."""

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
    watermark: float = field(init=False, default=WATERMARK)

    def __post_init__(self) -> None:
        if self.write_through:
            object.__setattr__(self, "watermark", 1.0)


HOST = Host("vLLM", VllmSettings)
OPTIONS = HOST.options


def transfer_config(region_bytes: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of vLLM's `--kv-transfer-config` for StrataSpec, with a region of
    `region_bytes` and these settings. Raises ConfigError for unusable settings."""
    HOST.read(given)
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        # vLLM's policy for a failed load from its region to the GPU.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": SPEC,
            "spec_module_path": MODULE,
            "cpu_bytes_to_use": region_bytes,
            SECTION: dict(given),
        },
    }


def connector_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of vLLM's `--kv-transfer-config` for StrataConnector. Raises ConfigError."""
    HOST.read(given)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {SECTION: dict(given)},
    }
