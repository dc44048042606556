# SPDX-License-Identifier: Apache-2.0
"""The engine's settings of tiers, from the flat names that its flags have."""

from __future__ import annotations

from typing import Any

from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.tiers.tier_settings import CpuSettings, SsdSettings


def offload_config(**flat: Any) -> OffloadConfig:
    """`cpu_bytes` is that of the flag --kv-offload-cpu-bytes, and so on."""
    parts: dict[str, dict[str, Any]] = {"cpu": {}, "ssd": {}}
    own: dict[str, Any] = {}
    for name, value in flat.items():
        tier, _, field = name.partition("_")
        if name in ("policy", "io_threads"):
            parts["cpu" if name == "policy" else "ssd"][name] = value
        elif tier in parts:
            parts[tier]["capacity_bytes" if field == "bytes" else field] = value
        else:
            own[name] = value
    return OffloadConfig(cpu=CpuSettings(**parts["cpu"]), ssd=SsdSettings(**parts["ssd"]), **own)
