# SPDX-License-Identifier: Apache-2.0
"""Checks an engine's settings against the model's config.json and weight file headers, and sizes
the pool.

The module imports no torch and starts nothing. Each front end calls `check_model` before it starts
an engine, because importing torch takes seconds. The core repeats the checks with the GPU's
memory."""

from __future__ import annotations

from pathlib import Path

from ....tiers.settings.values import ConfigError
from ....tiers.slab.host_memory import available_memory_bytes
from ...cache.group_spec import num_state_slots, plan_groups, state_bytes
from ...config.engine_config import DEFAULT_POOL_BYTES, EngineConfig
from ...config.engine_options import has_tier
from ...config.speculative_config import EAGLE
from ...models.checkpoint.fingerprint import check_headers
from ...models.checkpoint.stored_tensors import StoredTensors
from ...models.checkpoint.tensor_shapes import expected_tensors, name_of
from ...models.dtypes import choose_dtype, kv_dtype_name
from ...models.eagle.eagle_spec import check_fusion, check_head, is_eagle_head, load_eagle_spec
from ...models.model_source import ModelSource
from ...models.model_spec import ModelSpec, resolve_max_model_len
from ...models.spec.spec_parser import load_model_spec
from ...models.vision.vision_shapes import weight_shapes
from ...models.vocabulary_match import check_vocabulary
from ...plan.memory_plan import activation_bytes, weight_bytes
from ...worker.pool_demand import PoolDemand, check_pool_size, num_blocks_in
from ...worker.runtime.pool_sizing import HostMemory, host_pool_blocks, longest_context


def check_model(config: EngineConfig) -> None:
    """Raise ConfigError for settings that the core would refuse after importing torch."""
    model = config.model
    spec = load_model_spec(model.path)
    context = resolve_max_model_len(spec, model.max_model_len)
    check_backend(config)
    if model.enable_return_routed_experts and spec.experts is None:
        raise ConfigError(
            f"--enable-return-routed-experts is for mixtures of experts, and {model.path} has none "
            f"({spec.architecture}); drop it"
        )
    device = model.device.partition(":")[0]
    draft = find_draft(config, spec)
    dtype = choose_dtype(model.dtype, device, spec.stored_dtype).name
    demand = demand_of(config, spec, dtype, draft)
    num_blocks = blocks_of_pool(config, spec, demand, draft)
    if num_blocks is not None:
        if model.max_model_len is None:
            context = longest_context(demand, num_blocks, context)
        check_pool_size(demand, num_blocks, context, on_host=device == "cpu")
    if model.load_format != "dummy":
        check_weights(model.path, spec)
        if draft is not None:
            if draft.spec.is_eagle:
                check_fusion(draft.path)
            check_weights(draft.path, draft.spec)


def find_draft(config: EngineConfig, spec: ModelSpec) -> ModelSource | None:
    """Return the draft model or EAGLE head of the settings; None without one. Raise ConfigError if
    it cannot be read or does not fit the model."""
    path = config.speculative.model
    if path is None:
        return None
    if config.speculative.method == EAGLE:
        head = ModelSource(path, load_eagle_spec(path))
        check_head(ModelSource(config.model.path, spec), head)
        return head
    if is_eagle_head(path):
        raise ConfigError(
            f"{path} is an EAGLE head, no whole model; give --speculative-method eagle, or leave "
            "the method out"
        )
    draft = ModelSource(path, load_model_spec(path))
    if draft.spec.state is not None:
        raise ConfigError(
            f"the draft model {path} has layers that carry a state, which cannot lie in the blocks "
            "of another model; take a draft model whose layers all attend"
        )
    check_vocabulary(ModelSource(config.model.path, spec), draft)
    return draft


def check_weights(path: Path, spec: ModelSpec) -> None:
    """Raise ConfigError if weight files are truncated, or have other tensors than the model
    needs."""
    check_headers(path)
    with StoredTensors(path, name_of(spec)) as stored:
        stored.check_expected(expected_tensors(spec, stored.tensor_names))


def check_backend(config: EngineConfig) -> None:
    """Raise ConfigError if the package for structured outputs is not installed."""
    backend = config.structured_outputs_backend
    if backend == "auto":
        return
    from ...structured.backends import why_missing

    if why := why_missing(backend):
        raise ConfigError(f"--structured-outputs-backend {backend}: {why}")


def demand_of(
    config: EngineConfig, spec: ModelSpec, dtype: str, draft: ModelSource | None = None
) -> PoolDemand:
    """Return the pool pages that requests need in an engine whose models compute in `dtype`."""
    sizes = config.cache.block_size, kv_dtype_name(config.cache.kv_cache_dtype, dtype)
    groups = plan_groups(
        spec.layout(*sizes),
        config.cache.num_groups,
        spec.layer_attention,
        None if draft is None else draft.spec.draft_layout(*sizes, dtype),
        state_bytes(spec.state, dtype),
    )
    return PoolDemand(groups, config.scheduler.most_step_tokens)


def _running_state_bytes(config: EngineConfig, demand: PoolDemand) -> int:
    """Return the bytes of the states of all requests that may run at once."""
    most_drafts = config.speculative.most_drafts(has_states=True)
    slots = num_state_slots(config.scheduler.max_num_seqs, most_drafts)
    return slots * demand.groups.checkpoint_bytes


def blocks_of_pool(
    config: EngineConfig, spec: ModelSpec, demand: PoolDemand, draft: ModelSource | None = None
) -> int | None:
    """Return the number of blocks in the pool: the setting, or as many as fit into the host's free
    memory. Return None for a GPU, whose free memory is known only after the weights are loaded.
    Raises ConfigError if there is no room."""
    cache, model, offload = config.cache, config.model, config.offload
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.memory_bytes is not None:
        return num_blocks_in(demand.block_bytes, cache.memory_bytes)
    if model.device != "cpu":
        return None
    available = available_memory_bytes()
    if available is None:
        return num_blocks_in(demand.block_bytes, DEFAULT_POOL_BYTES)
    dtype = choose_dtype(model.dtype, stored=spec.stored_dtype).name
    of_draft = 0 if draft is None else weight_bytes(expected_tensors(draft.spec), dtype)
    memory = HostMemory(
        available_bytes=available,
        weight_bytes=weight_bytes(weight_shapes(spec), dtype) + of_draft,
        step_bytes=activation_bytes(spec, dtype),
        tier_bytes=offload.cpu.capacity_bytes if has_tier(offload.tiers, "cpu") else 0,
        state_bytes=_running_state_bytes(config, demand),
    )
    context = resolve_max_model_len(spec, model.max_model_len)
    return host_pool_blocks(
        memory,
        demand,
        context,
        config.scheduler.max_num_seqs,
        is_asked=model.max_model_len is not None,
    )
