# SPDX-License-Identifier: Apache-2.0
"""StrataConnector, a KV connector of vLLM. vLLM makes one connector in its scheduler and one in
each worker, and calls all connectors in every step. The class passes each call to its
`SchedulerRole` or `WorkerRole`. docs/vllm.md describes the configuration.

    scheduler   get_num_new_matched_tokens → update_state_after_alloc → build_connector_meta
    worker      handle_preemptions → (forward pass) → get_transfer_results → report
    scheduler   update_connector_output

Every load is asynchronous: the request waits in vLLM's scheduler and delays no other request. If a
load brought only its first blocks, or no block, the connector reports the ids of the missing
blocks, and vLLM computes these blocks. vLLM can use the ids only with one cache group; with several
groups a load brings all its blocks or fails. The worker of each rank reports the end of its part of
a load; the request continues when all ranks have reported."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from .. import versions
from .opening import check_engine, open_scheduler_role, settings_in
from .pages import plan_pages
from .scheduler_role import SchedulerRole
from .stats import StatsSource, StrataPromMetrics, StrataStats
from .steps import StepPlan, StepReport
from .worker_role import WorkerRole

log = logging.getLogger(__name__)

# All layers of a block are one contiguous page, so that a GPU copies few large pieces.
GPU_LAYOUT = "BLHNC"


@dataclass(slots=True)
class StrataMetadata(KVConnectorMetadata):
    """The scheduler's decisions for a step, sent to the worker."""

    plan: StepPlan


@dataclass(slots=True)
class StrataWorkerMetadata(KVConnectorWorkerMetadata):
    """The worker's report of a step, sent to the scheduler."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, StrataWorkerMetadata):
            self.report.merge(other.report)
        return self


class StrataConnector(KVConnectorBase_V1, SupportsHMA):
    """A KV connector between vLLM's KV cache and StrataKV's tiers. Raises ConfigError or
    TierConfigError for unusable settings; later calls do not raise."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._stats = StatsSource()
        self._process_id = os.getpid()
        if role is KVConnectorRole.SCHEDULER:
            # vLLM reads the policy after it has made the connector, and then computes requests
            # whose blocks were lost instead of failing them.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduler = open_scheduler_role(vllm_config, kv_cache_config)
            atexit.register(self.shutdown)
        else:
            settings_in(vllm_config)
            self._worker = WorkerRole(plan_pages(kv_cache_config), vllm_config.parallel_config.rank)

    # Calls of both roles

    def shutdown(self) -> None:
        """Write unwritten blocks, and release all. Idempotent. No effect in a forked process."""
        atexit.unregister(self.shutdown)
        if self._process_id != os.getpid():
            return
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    def get_kv_connector_stats(self) -> StrataStats | None:
        """Return the tiers' statistics; None if no report is due."""
        if self._scheduler is None or not self._stats.is_due:
            return None
        try:
            return self._stats.make(self._scheduler.stats())
        except Exception:
            log.exception("statistics of the tiers are missing")
            return None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: vLLM would free its memory during copies. Called since vLLM 0.33."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return GPU_LAYOUT; None on vLLM's CPU build, which has a single layout."""
        return None if versions.is_cpu_build() else GPU_LAYOUT

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StrataStats:
        return StrataStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StrataPromMetrics:
        return StrataPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Calls in vLLM's scheduler

    @property
    def _role_in_scheduler(self) -> SchedulerRole:
        assert self._scheduler is not None, "vLLM's worker has no scheduler role"
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Register vLLM's block pool. The base class calls this from `bind_kv_cache_manager`."""
        self._role_in_scheduler.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._role_in_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Call `SchedulerRole.matched`; vLLM's own cache has `num_computed_tokens`."""
        return self._role_in_scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Begin the load of a request, if any; `blocks` are all blocks of the request."""
        if num_external_tokens:
            block_ids = blocks.get_block_ids()
            self._role_in_scheduler.allocated(request, block_ids, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return all groups' ids, so that vLLM clears no new blocks. Called since vLLM 0.32."""
        return tuple(range(self._role_in_scheduler.num_groups))

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Count the external tokens by vLLM's CacheHitSource. Called since vLLM 0.32."""
        num_near, tiers = self._role_in_scheduler.hits_of(request.request_id)
        return versions.hit_sources(num_near, num_external_tokens, tiers)

    def build_connector_meta(self, scheduler_output: Any) -> StrataMetadata:
        return StrataMetadata(self._role_in_scheduler.build_step_plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, StrataWorkerMetadata):
            self._role_in_scheduler.apply_step_report(metadata.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Drop a request that has ended. Return False, so that vLLM may free its blocks. A freed
        block can be copied until it is overwritten; `PoolWatch` reports evicted blocks before."""
        return False, self._role_in_scheduler.end_request(request)

    def take_events(self) -> Iterable[Any]:
        return self._role_in_scheduler.take_events()

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must run steps without requests, so that blocks are stored or reported."""
        return self._role_in_scheduler.has_pending_work()

    def reset_cache(self) -> bool | None:
        return self._role_in_scheduler.reset()

    # Calls in vLLM's worker

    @property
    def _role_in_worker(self) -> WorkerRole:
        assert self._worker is not None, "vLLM's scheduler has no worker role"
        return self._worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Register vLLM's tensors, by layer name. Raises ConfigError for an unknown layout."""
        self._role_in_worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step, before it overwrites any block."""
        if isinstance(kv_connector_metadata, StrataMetadata):
            self._role_in_worker.begin_step(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Return at once: loads have begun already, and no forward pass waits for a load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: loads have begun already."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Return at once: a block is stored with all its layers, after the step that fills it."""

    def wait_for_save(self) -> None:
        """Return at once: stores have begun already."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the ended loads. Stores are not reported, because no request waits for a store."""
        results = self._role_in_worker.results()
        return KVConnectorTransferResults(
            finished_recving=results.finished, failed_recving=results.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that the loads of the last `get_transfer_results` did not fill."""
        return self._role_in_worker.invalid_blocks()

    def build_connector_worker_meta(self) -> StrataWorkerMetadata:
        return StrataWorkerMetadata(self._role_in_worker.report())
