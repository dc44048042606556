# SPDX-License-Identifier: Apache-2.0
"""StrataSpec: vLLM's tiering spec with StrataTier below its region, and a worker for CPU builds.

vLLM's own manager stays in use, and on a GPU also vLLM's own copies between KV cache and region.
The settings are under "stratakv" in `kv_connector_extra_config`."""

from __future__ import annotations

import atexit
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from ...tiers.settings.format import format_value
from ...tiers.settings.sizes import show_size
from ...tiers.settings.values import ConfigError
from . import region, versions
from .settings import HOST, MODULE, SECTION, TIER
from .worker import CpuWorker


class StrataSpec(TieringOffloadingSpec):
    """vLLM's tiering spec, with StrataTier as a tier. Raises ConfigError for unusable settings."""

    # Set by vLLM.
    secondary_tier_configs: list[dict[str, Any]]
    _engine_id: str
    _manager: Any
    _worker: Any

    def __init__(self, config: Any) -> None:
        versions.host_version()
        if versions.uses_adapters():
            raise ConfigError(
                "vLLM does not tell StrataSpec which adapter (LoRA) a request has, and its block "
                "hash has the adapter's name and path and not its content; use StrataConnector "
                "(stratakv config vllm --connector), or leave --enable-lora out"
            )
        if config.canonical_layout and versions.is_cpu_build():
            raise ConfigError(
                "canonical_layout needs copies that vLLM makes on GPUs only; leave it out"
            )
        super().__init__(config)
        self.secondary_tier_configs = [*self.secondary_tier_configs, tier_config(self.extra_config)]
        if not self.num_chunks:
            raise ConfigError(
                f"cpu_bytes_to_use holds no chunk of {show_size(self.kv_bytes_per_chunk)}; give "
                "vLLM's region at least some hundred of them"
            )
        self._hold = region.Hold(self._engine_id)
        atexit.register(self._hold.abandon)
        self._engine_id = region.marked(self._engine_id)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        from .tier import StrataTier

        definitions: dict[str, Any] = super().build_metric_definitions(extra_config)
        return definitions | StrataTier.build_metric_definitions(tier_config(extra_config))

    def get_manager(self) -> Any:
        if self._manager is None:
            region.sweep()
        return super().get_manager()

    def get_worker(self, kv_caches: Any) -> Any:
        """Return vLLM's own worker on a GPU, or a CpuWorker on vLLM's CPU build."""
        if not versions.is_cpu_build():
            return super().get_worker(kv_caches)
        if self._worker is None:
            self._worker = self._cpu_worker(kv_caches)
        return self._worker

    def release_region(self) -> None:
        """Release vLLM's region when the engine stops in this process. Idempotent."""
        atexit.unregister(self._hold.abandon)
        self._hold.release_lock()

    def _cpu_worker(self, kv_caches: Any) -> CpuWorker:
        shared = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return CpuWorker(
                kv_caches,
                shared,
                blocks_per_chunk=self.blocks_per_chunk,
                rank_bytes=self.cpu_page_size_per_worker,
                released=self.release_region,
            )
        except BaseException:
            shared.cleanup()
            raise


def tier_config(extra_config: Any) -> dict[str, Any]:
    """Return StrataTier's entry in vLLM's list of secondary tiers. Raises ConfigError."""
    given = extra_config.get(SECTION, {})
    if not isinstance(given, dict):
        raise ConfigError(f"{SECTION} takes an object of settings, not {format_value(given)}")
    HOST.read(given)
    return {"type": TIER, "module_path": MODULE, **given}
