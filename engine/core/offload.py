# SPDX-License-Identifier: Apache-2.0
"""The engine's tiers: opened as its settings say, and described in words for people."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...connector.base import KVConnectorScheduler, KVConnectorWorker
from ...connector.build import OffloadSettings, RemoteTier, SsdSettings, build_offload
from ...connector.economics import Choice
from ...tiers.block import BlockLayout
from ...tiers.errors import TierConfigError, TierDown
from ...tiers.mac_key import read_mac_key
from ...tiers.remote.credentials import Credentials
from ...tiers.settings.values import ConfigError, show_size
from ..offload_config import OffloadConfig

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

_PROGRESS_STEPS = 10


def open_tiers(
    offload: OffloadConfig,
    layout: BlockLayout,
    namespace: bytes,
    progress: Progress,
    *,
    device: str = "cpu",
) -> tuple[KVConnectorScheduler, KVConnectorWorker]:
    """The two sides of the connector over the tiers that the settings name, for a pool on `device`.
    Raises ConfigError, and nothing stays open then. `progress` hears what this is busy with."""
    progress(f"preparing the tiers: {describe_tiers(offload)}")
    drill = offload.drill
    if drill is not None:
        logger.warning(
            "faults are injected on purpose into %s (--kv-offload-faults %s); this is a drill",
            " and ".join(drill.plans),
            offload.faults,
        )
    try:
        return build_offload(
            layout,
            offload_settings(offload, device),
            namespace=namespace,
            progress=_steps_of(progress, "memory of the cpu tier"),
            wrap_store=None if drill is None else drill.wrap,
        )
    except TierDown as error:
        required = "; --require-tiers was given" if offload.require_tiers else ""
        raise ConfigError(f"{error}{required}") from error
    except TierConfigError as error:
        raise ConfigError(str(error)) from error


def offload_settings(offload: OffloadConfig, device: str = "cpu") -> OffloadSettings:
    """What the connector is built from. Raises TierConfigError for a key file that is none."""
    ssd = None
    if "ssd" in offload.tiers and offload.ssd_path is not None:
        key_file = offload.ssd_mac_key_file
        ssd = SsdSettings(
            path=offload.ssd_path,
            capacity_bytes=offload.ssd_bytes,
            durability=offload.ssd_durability,
            codec=offload.ssd_codec,
            policy=offload.ssd_policy,
            admission=offload.ssd_admission,
            daily_bytes=offload.ssd_daily_bytes,
            exclusive=offload.ssd_exclusive,
            io_threads=offload.io_threads,
            mac_key=None
            if key_file is None
            else read_mac_key(key_file, "--kv-offload-ssd-mac-key-file", offload.ssd_path),
        )
    remote = None
    if offload.cache_servers:
        remote = RemoteTier(
            offload.cache_servers,
            Credentials(
                token_file=offload.remote_token_file,
                ca_file=offload.remote_ca_file,
                cert_file=offload.remote_cert_file,
                key_file=offload.remote_key_file,
                server_name=offload.remote_server_name,
            ),
            tag_key=None
            if offload.remote_tag_key_file is None
            else read_mac_key(offload.remote_tag_key_file, "--kv-offload-remote-tag-key-file"),
        )
    return OffloadSettings(
        cpu_bytes=offload.cpu_bytes,
        huge_pages=offload.cpu_huge_pages,
        policy=offload.policy,
        load=Choice(offload.load),
        ssd=ssd,
        remote=remote,
        require=offload.require_tiers,
        others=offload.other_tiers,
        other_options=offload.tier_options,
        device=device,
    )


def describe_tiers(offload: OffloadConfig) -> str:
    """What the tiers are about to take, so that nobody wonders where the disk's space went."""
    parts = [f"cpu, {show_size(offload.cpu_bytes)} of memory"]
    if "ssd" in offload.tiers:
        parts.append(f"ssd, {show_size(offload.ssd_bytes)} in {offload.ssd_path}")
    return "; ".join([*parts, *offload.other_tiers, *map(str, offload.cache_servers)])


def _steps_of(progress: Progress, what: str) -> Callable[[int, int], None]:
    """Bytes done and in all, told as a few lines and no more."""
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        step = done * _PROGRESS_STEPS // max(total, 1)
        if step > told:
            told = step
            progress(f"{what}: {100 * step // _PROGRESS_STEPS} %")

    return tell
