# SPDX-License-Identifier: Apache-2.0
"""Resolves the engine's settings to a device and number types, and checks them on this machine.

The module looks for a GPU only if the settings name one."""

from __future__ import annotations

import logging

import torch

from ...config.engine_config import DEFAULT_GPU_SHARE, EngineConfig
from ...models.dtypes import choose_dtype
from ...models.model_spec import ModelSpec
from ...worker.runtime.cuda_probe import choose_gpu, probe_cuda
from ...worker.runtime.placement import Placement, with_index

logger = logging.getLogger(__name__)


def placement_of(config: EngineConfig) -> Placement:
    """Return the device to compute on. Raise ConfigError if the device cannot be used."""
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
    """Return the number type in which the model computes, and log the reason."""
    chosen = choose_dtype(config.model.dtype, device.type, spec.stored_dtype)
    logger.info("computing in %s: %s", chosen.name, chosen.reason)
    return chosen.dtype


def _say_what_is_for_gpus(config: EngineConfig) -> None:
    for flag, is_given in (
        ("--gpu-memory-utilization", config.cache.gpu_memory_utilization != DEFAULT_GPU_SHARE),
        ("--strict-kernels", config.model.strict_kernels),
        ("--enforce-eager", config.model.enforce_eager),
    ):
        if is_given:
            logger.warning("%s has no effect on the CPU; it is for --device cuda", flag)
