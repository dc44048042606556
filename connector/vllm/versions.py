# SPDX-License-Identifier: Apache-2.0
"""The supported versions of vLLM, and the differences between them.

    0.30   ReqContext has no positions of keys; a secondary tier takes no backpressure detector;
           JobResult has no transfer_bytes
    0.31   ReqContext, secondary tiers and JobResult have these
    0.32   cache_hit_source of a tier; a KV connector is asked for the sources of hits
    0.33   submit_load has `expedited`; a lock around manager and tiers

All other members of vLLM that StrataConnector overrides or reads are equal in all versions.

This module reads vLLM's objects by their attributes and imports vLLM only inside its functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..chunks.supported_versions import Supported

OLDEST, NEWEST = (0, 30), (0, 33)
SUPPORTED = Supported("vLLM", "vllm", (*OLDEST, 0), (0, NEWEST[1] + 1, 0), "0.30 to 0.33")


def host_version() -> tuple[int, int]:
    """Return vLLM's version, major and minor. Raises ConfigError for an unsupported version."""
    import vllm

    return check_version(vllm.__version__)


def check_version(text: str) -> tuple[int, int]:
    """vLLM's version from `vllm.__version__`. Raises ConfigError for an unsupported version."""
    return SUPPORTED.require_version(text)[:2]


def is_cpu_build() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def platform_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def uses_adapters() -> bool:
    """Whether vLLM serves LoRA adapters, in a call in which vLLM makes an object. The result is
    False in vLLM's scheduler, which does not expose its configuration, unlike a worker."""
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return False
    return getattr(get_current_vllm_config_or_none(), "lora_config", None) is not None


def key_positions(context: Any) -> Mapping[bytes, int]:
    """Return the known keys of a request, each with the token at which its chunk ends."""
    positions: Mapping[bytes, int] = getattr(context, "_offload_key_positions", {})
    return positions


def tier_arguments(detector: Any) -> dict[str, Any]:
    return {} if detector is None else {"backpressure_detector": detector}


def job_result(
    job_id: int, *, loaded: list[bytes] | None, success: bool, seconds: float, num_bytes: int
) -> Any:
    """Return vLLM's JobResult. `loaded` has the keys of the chunks that a failed load did bring."""
    from vllm.v1.kv_offload.tiering.base import JobResult

    more = {"transfer_bytes": num_bytes} if host_version() > OLDEST else {}
    return JobResult(
        job_id=job_id,
        success=success,
        successful_keys=tuple(loaded) if loaded else None,
        transfer_time=seconds,
        **more,
    )


def hit_sources(num_near: int, num_tokens: int, tiers: Sequence[str]) -> dict[Any, int]:
    """Return the numbers of tokens by vLLM's CacheHitSource: `num_near` of `num_tokens` come from
    memory, the other tokens from `tiers`. Only vLLM 0.32 and later use them."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    far = CacheHitSource.DISK if [*tiers] == ["ssd"] else CacheHitSource.EXTERNAL_UNSPECIFIED
    num_near = min(num_near, num_tokens)
    counts = {CacheHitSource.HOST: num_near, far: num_tokens - num_near}
    return {source: count for source, count in counts.items() if count}


def hash_seed_is_random() -> bool:
    """Whether vLLM hashes blocks with a random seed, so that keys differ between processes."""
    import os

    from vllm.v1.core import kv_cache_utils

    seed = getattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", seed)
    return seed not in (None, default) and "PYTHONHASHSEED" not in os.environ
