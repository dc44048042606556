# SPDX-License-Identifier: Apache-2.0
"""Opens the engine's tiers, and describes them for the log and for engines that load its blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from ...connector.base import KVConnectorScheduler, KVConnectorWorker
from ...connector.build import (
    WorkerDescription,
    build_offload,
    build_scheduler_side,
)
from ...connector.costs.rates import PrefillRate
from ...connector.parts import Parts, StatePieces
from ...tiers.block import LAYOUT_VERSION, ROOT_VERSION, BlockLayout, Identity, tenant_salt
from ...tiers.errors import TierConfigError, TierDown
from ...tiers.mac_key import MacKey
from ...tiers.settings.sizes import show_size
from ...tiers.settings.values import MIB, ConfigError
from ..cache.group_spec import CacheGroups
from ..config.engine_config import EngineConfig
from ..config.offload_config import OffloadConfig

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

_PROGRESS_STEPS = 10
NONE = "none"
# Digest bytes to compare secrets: one byte differs in 255 of 256 cases, and confirms no guess.
_CHECK_BYTES = 1


class OpenTiers(NamedTuple):
    """The scheduler side and the worker side of a connector. If the worker side is in another
    process, `worker` is None, that process builds the worker side from `description`, and
    `note_ended` must be called with the number of copies that have ended."""

    side: KVConnectorScheduler
    worker: KVConnectorWorker | None
    description: WorkerDescription | None = None
    note_ended: Callable[[int], None] | None = None


def open_tiers(
    offload: OffloadConfig,
    layout: BlockLayout,
    namespace: bytes,
    progress: Progress,
    *,
    device: str = "cpu",
    prefill: PrefillRate | None = None,
    with_worker: bool = True,
    parts: Parts | None = None,
) -> OpenTiers:
    """Open the connector over the tiers in the settings, for a pool on `device`. `with_worker` is
    False if the worker side lives in another process. `progress` is called with lines about the
    start, `prefill` has the cost of computing, and `parts` describes the cache groups, whose pages
    have `layout`. A ConfigError leaves nothing open."""
    if parts is not None and parts.num_state_keys and offload.ssd.rounds:
        raise ConfigError(
            f"--kv-offload-ssd-codec {offload.ssd.codec} rounds K and V, and would spoil the "
            "states that layers of this model carry, whose bytes are no such numbers; take "
            "lossless, or none"
        )
    if parts is not None and parts.num_state_keys:
        num_slots, least = offload.cpu.capacity_bytes // layout.slot_bytes, parts.num_state_keys + 1
        if num_slots < least:
            raise ConfigError(
                f"--kv-offload-cpu-bytes {show_size(offload.cpu.capacity_bytes)} holds {num_slots} "
                f"blocks, and a checkpoint of this model's states takes {parts.num_state_keys} "
                f"beside one of K and V; give at least {-(-least * layout.slot_bytes // MIB)}MiB"
            )
    progress(f"preparing the tiers: {describe_tiers(offload)}")
    if (drill := offload.drill) is not None:
        logger.warning(
            "faults are injected on purpose into %s (--kv-offload-faults %s); this is a drill",
            " and ".join(drill.plans),
            offload.faults,
        )
    options: dict[str, Any] = {
        "namespace": namespace,
        "device": device,
        "progress": _steps_of(progress, "memory of the cpu tier"),
        "prefill": prefill,
        "parts": parts,
    }
    try:
        if with_worker:
            return OpenTiers(*build_offload(layout, offload, **options))
        built = build_scheduler_side(layout, offload, **options)
        return OpenTiers(built.side, None, built.description, built.side.note_ended)
    except TierDown as error:
        required = "; --require-tiers was given" if offload.require_tiers else ""
        raise ConfigError(f"{error}{required}") from error
    except TierConfigError as error:
        raise ConfigError(str(error)) from error


def parts_of(groups: CacheGroups) -> Parts:
    """Describe the pages of a block, one per cache group, and the blocks that a group reads."""
    seen = [None if each.is_full else each.first_seen for each in groups.attention]
    states = [] if groups.state is None else [StatePieces(groups.state.num_pages)]
    return Parts(groups.layout.block_size, [*seen, *states])


def describe_tiers(offload: OffloadConfig) -> str:
    """Return, for the log, the memory and disk space that the tiers will take."""
    parts = [f"cpu, {show_size(offload.cpu.capacity_bytes)} of memory"]
    if "ssd" in offload.tiers:
        parts.append(f"ssd, {show_size(offload.ssd.capacity_bytes)} in {offload.ssd.path}")
    servers = (*offload.peer_addresses, *offload.cache_servers)
    return "; ".join([*parts, *offload.other_tiers, *map(str, servers)])


def describe_identity(
    config: EngineConfig, identity: Identity, groups: CacheGroups
) -> dict[str, str]:
    """Return the settings that must be equal for two engines to find each other's blocks, and this
    engine's role and tiers. The result contains no secret. Raises ConfigError if the tag key file
    has changed or disappeared since the tiers were opened."""
    offload, cache = config.offload, config.cache
    salt = tenant_salt(config.tenant_secret, "", "")
    return {
        "fingerprint": identity.model,
        "revision": identity.revision,
        "root_version": str(ROOT_VERSION),
        "epoch": str(identity.epoch),
        "dtype": identity.dtype,
        "kv_dtype": identity.kv_dtype,
        "block_size": str(identity.block_size),
        "layout_version": str(LAYOUT_VERSION),
        "layout": groups.layout.layout_id().hex(),
        "cache_groups": str(len(groups)),
        "block_hash": cache.block_hash if cache.enable_prefix_caching else NONE,
        "tenant_secret": NONE if salt is None else salt[:_CHECK_BYTES].hex(),
        "tag_key": _tag_key_check(offload),
        "role": config.role,
        "tiers": ",".join(offload.tier_names),
    }


def _tag_key_check(offload: OffloadConfig) -> str:
    path = offload.remote.tag_key_file
    if path is None or not offload.cache_servers:
        return NONE
    try:
        return MacKey(path.read_bytes()).id[:_CHECK_BYTES].hex()
    except (OSError, TierConfigError) as error:
        raise ConfigError(
            f"--kv-offload-remote-tag-key-file {path} was exchanged while the engine was starting "
            f"({error}); start it again"
        ) from error


def _steps_of(progress: Progress, what: str) -> Callable[[int, int], None]:
    """Return a function that takes bytes done and total bytes, and reports progress in steps of a
    tenth."""
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        step = done * _PROGRESS_STEPS // max(total, 1)
        if step > told:
            told = step
            progress(f"{what}: {100 * step // _PROGRESS_STEPS} %")

    return tell
