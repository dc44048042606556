# SPDX-License-Identifier: Apache-2.0
"""The engine's settings in the worker's words: where to compute, checked against the machine.

A GPU is looked for only where one is asked for.
"""

from __future__ import annotations

import logging

import torch

from ...tiers.host_memory import available_memory_bytes
from ..config import DEFAULT_GPU_SHARE, DEFAULT_POOL_BYTES, EngineConfig
from ..models.checkpoint.weights import expected_tensors
from ..models.dtypes import choose_dtype
from ..models.spec import ModelSpec, resolve_max_model_len
from ..offload_config import has_tier
from ..plan import activation_bytes, weight_bytes
from ..worker.kv_pool import PoolDemand, num_blocks_in
from ..worker.runtime.cuda_probe import choose_gpu, probe_cuda
from ..worker.runtime.device_config import Placement, with_index
from ..worker.runtime.pool_sizing import HostMemory, host_pool_blocks

logger = logging.getLogger(__name__)


def placement_of(config: EngineConfig) -> Placement:
    """Raises ConfigError where the device cannot be computed on."""
    model, cache = config.model, config.cache
    placement = Placement(
        device=with_index(torch.device(model.device)),
        kv_cache_dtype=cache.kv_cache_dtype,
        attention_backend=model.attention_backend,
        strict_kernels=model.strict_kernels,
        record_decodes=not model.enforce_eager,
        compile_elementwise=model.compilation == "elementwise",
        random_weights=model.load_format == "dummy",
        memory_share=cache.gpu_memory_utilization,
    )
    if placement.device.type == "cpu":
        _say_what_is_for_gpus(config)
        return placement
    gpu = choose_gpu(placement, probe_cuda())
    logger.info("computing on %s (%s)", placement.device, gpu.name)
    return placement


def dtype_for(config: EngineConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """The type to compute the model in; the reason goes to the log."""
    chosen = choose_dtype(config.model.dtype, device.type, spec.stored_dtype)
    logger.info("computing in %s: %s", chosen.name, chosen.reason)
    return chosen.dtype


def blocks_of_pool(config: EngineConfig, spec: ModelSpec, demand: PoolDemand) -> int | None:
    """The size of the pool: what the settings say, or what the host's free memory has room for.
    None: what a GPU's memory has left, which is known after the weights are loaded. Raises
    ConfigError where there is no room."""
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
    memory = HostMemory(
        available_bytes=available,
        weight_bytes=weight_bytes(expected_tensors(spec), dtype),
        step_bytes=activation_bytes(spec, dtype),
        tier_bytes=offload.cpu.capacity_bytes if has_tier(offload.tiers, "cpu") else 0,
    )
    context = resolve_max_model_len(spec, model.max_model_len)
    return host_pool_blocks(
        memory,
        demand,
        context,
        config.scheduler.max_num_seqs,
        is_asked=model.max_model_len is not None,
    )


def _say_what_is_for_gpus(config: EngineConfig) -> None:
    for flag, is_given in (
        ("--gpu-memory-utilization", config.cache.gpu_memory_utilization != DEFAULT_GPU_SHARE),
        ("--strict-kernels", config.model.strict_kernels),
        ("--enforce-eager", config.model.enforce_eager),
    ):
        if is_given:
            logger.warning("%s has no effect on the CPU; it is for --device cuda", flag)
