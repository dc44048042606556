# SPDX-License-Identifier: Apache-2.0
"""The engine's settings in the worker's words: where to compute, checked against the machine.

A GPU is looked for only where one is asked for. Knows nothing of how anything is computed.
"""

from __future__ import annotations

import logging

import torch

from ...tiers.block import BlockLayout
from ..config import DEFAULT_GPU_SHARE, EngineConfig
from ..worker.cuda_probe import choose_gpu, probe_cuda
from ..worker.kv_pool import num_blocks_in
from ..worker.placement import Placement

logger = logging.getLogger(__name__)


def placement_of(config: EngineConfig) -> Placement:
    """Raises ConfigError where the device cannot be computed on."""
    model, cache = config.model, config.cache
    placement = Placement(
        device=torch.device(model.device),
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


def blocks_asked_for(config: EngineConfig, layout: BlockLayout) -> int | None:
    """The size of the pool where the settings say it; None: what a GPU's memory has left."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.memory_bytes is None and config.model.device != "cpu":
        return None
    return num_blocks_in(layout, cache.pool_bytes)


def _say_what_is_for_gpus(config: EngineConfig) -> None:
    for flag, is_given in (
        ("--gpu-memory-utilization", config.cache.gpu_memory_utilization != DEFAULT_GPU_SHARE),
        ("--strict-kernels", config.model.strict_kernels),
        ("--enforce-eager", config.model.enforce_eager),
    ):
        if is_given:
            logger.warning("%s has no effect on the CPU; it is for --device cuda", flag)
