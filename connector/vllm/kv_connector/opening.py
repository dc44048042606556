# SPDX-License-Identifier: Apache-2.0
"""Opens the tiers of a StrataConnector: checks vLLM's configuration, and derives the layout and the
identity of blocks from the configuration."""

from __future__ import annotations

import logging
from typing import Any

from ....tiers.settings.format import format_value
from ....tiers.settings.sizes import show_size
from ....tiers.settings.values import ConfigError
from ...build import BuiltSide, build_scheduler_side
from ...chunks.build import check_servers
from ...costs.rates import PrefillRate
from .. import versions
from ..host_model import names_of
from ..identity import LAYOUTS, ChunkIdentity, ChunkKeys, chunk_layout
from ..settings import HOST, SECTION, VllmSettings
from .adapters import Adapters, adapter_settings
from .events import TierEvents
from .groups import Columns, state_names
from .pages import PagePlan, plan_pages
from .scheduler_role import SchedulerRole

log = logging.getLogger(__name__)

# The field of the identity that separates StrataConnector's blocks from StrataSpec's chunks.
FORM = "pages"


def settings_in(vllm_config: Any) -> VllmSettings:
    """Return StrataKV's settings from vLLM's configuration. Raises ConfigError."""
    given = vllm_config.kv_transfer_config.kv_connector_extra_config.get(SECTION, {})
    if not isinstance(given, dict):
        raise ConfigError(f"{SECTION} takes an object of settings, not {format_value(given)}")
    return HOST.read(given)


def check_engine(vllm_config: Any) -> None:
    """Raise ConfigError for an unsupported vLLM version or a parallelism other than tensor."""
    versions.host_version()
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size:
        raise ConfigError(
            f"StrataConnector serves engines whose {parallel.world_size} ranks share every layer "
            f"(tensor parallelism), and this one has {parallel.tensor_parallel_size} that do; use "
            "StrataSpec (stratakv config vllm, without --connector) for pipelines and context "
            "parallelism"
        )


def open_scheduler_role(vllm_config: Any, kv_cache_config: Any) -> SchedulerRole:
    """Open the scheduler role, with its tiers. A ConfigError or TierConfigError, for settings that
    cannot work, leaves nothing open."""
    settings = settings_in(vllm_config)
    plan = plan_pages(kv_cache_config)
    columns = Columns(kv_cache_config)
    parts = columns.parts(vllm_config.parallel_config.world_size)
    identity = identity_of(vllm_config, kv_cache_config, plan, columns, settings)
    layout = chunk_layout(plan.block_bytes, identity.kv_dtype)
    root = identity.root()
    if not vllm_config.cache_config.enable_prefix_caching:
        log.warning("vLLM's prefix caching is off, so that its blocks have no keys to store")
    check_servers(settings, layout)
    if settings.faults:
        log.warning("faults are injected on purpose (%s); this is a drill", settings.faults)
    prefill = PrefillRate()
    built: BuiltSide = build_scheduler_side(
        layout,
        settings,
        namespace=identity.namespace(),
        prefill=prefill,
        parts=parts,
    )
    events = None
    if getattr(vllm_config.kv_events_config, "enable_kv_cache_events", False):
        events = TierEvents(columns, built.description.num_slots + plan.num_blocks)
    _slab, *below = built.side.tiers
    log.info(
        "StrataKV beside vLLM: %s of memory, %s; %d blocks of %s, %d tokens each, in %d cache "
        "groups on %d ranks; identity %s",
        show_size(settings.cpu.capacity_bytes),
        ", ".join(below) or "nothing below it",
        built.description.num_slots,
        show_size(layout.page_bytes),
        columns.position_tokens,
        columns.num_groups,
        len(parts.shards),
        root.hex()[:16],
    )
    return SchedulerRole(
        built,
        ChunkKeys(root),
        columns=columns,
        parts=parts,
        stores_all=settings.has_ssd and settings.write_through,
        prefill=prefill,
        shutdown_seconds=settings.shutdown_seconds,
        # Only a vLLM consumer keeps running steps from blocks that a load may still write to.
        loads=vllm_config.kv_transfer_config.is_kv_consumer,
        events=events,
        adapters=Adapters(adapter_settings(vllm_config)),
    )


def identity_of(
    vllm_config: Any,
    kv_cache_config: Any,
    plan: PagePlan,
    columns: Columns,
    settings: VllmSettings,
) -> ChunkIdentity:
    """Return the identity of this engine's blocks. Raises ConfigError for an unknown layout."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    layout = kv_cache_config.kv_cache_layout or cache.kv_cache_layout
    if layout not in LAYOUTS:
        raise ConfigError(
            f"vLLM lays its KV cache out as {layout}, which StrataKV cannot tell from others; use "
            f"one of {', '.join(LAYOUTS)}"
        )
    dtype = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    names = names_of(vllm_config, settings.revision)
    return ChunkIdentity(
        model=names.model,
        drafts=names.drafts,
        settings=names.settings,
        revision=settings.revision or "",
        salt=settings.salt or "",
        kv_dtype=str(dtype).removeprefix("torch."),
        kv_layout=f"{layout} {FORM}",
        platform=versions.platform_name(),
        host_version=".".join(map(str, versions.host_version())),
        chunk_bytes=plan.block_bytes,
        blocks_per_chunk=1,
        tokens_per_hash=columns.position_tokens,
        groups=tuple(
            (number, columns.block_tokens[number], part.layers)
            for number, group in enumerate(plan.groups)
            for part in group
        ),
        parallel=(
            parallel.world_size,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        ),
        is_replicated=False,
        is_canonical=False,
        states=state_names(kv_cache_config),
    )
