# SPDX-License-Identifier: Apache-2.0
"""The engine's offload settings in the connector's words, and in words for people."""

from __future__ import annotations

from ...connector.build import OffloadSettings, SsdSettings
from ...connector.economics import Choice
from ..config import OffloadConfig, show_size


def offload_settings(offload: OffloadConfig) -> OffloadSettings:
    """What the connector is built from."""
    ssd = None
    if "ssd" in offload.tiers and offload.ssd_path is not None:
        ssd = SsdSettings(
            path=offload.ssd_path,
            capacity_bytes=offload.ssd_bytes,
            durability=offload.ssd_durability,
            codec=offload.ssd_codec,
            admission=offload.ssd_admission,
            daily_bytes=offload.ssd_daily_bytes,
            exclusive=offload.ssd_exclusive,
            io_threads=offload.io_threads,
        )
    return OffloadSettings(
        cpu_bytes=offload.cpu_bytes,
        huge_pages=offload.cpu_huge_pages,
        policy=offload.policy,
        load=Choice(offload.load),
        ssd=ssd,
        others=offload.other_tiers,
        other_options=offload.tier_options,
    )


def describe_tiers(offload: OffloadConfig) -> str:
    """What the tiers are about to take, so that nobody wonders where the disk's space went."""
    parts = [f"cpu, {show_size(offload.cpu_bytes)} of memory"]
    if "ssd" in offload.tiers:
        parts.append(f"ssd, {show_size(offload.ssd_bytes)} in {offload.ssd_path}")
    return "; ".join([*parts, *offload.other_tiers])
