# SPDX-License-Identifier: Apache-2.0
"""StrataTier: a secondary tier of vLLM's TieringOffloadingSpec, in its scheduler's process.

    lookup            whether to load a chunk from a tier      from records in memory, at once
    submit_load       promote chunks into vLLM's region        a job, done by a thread
    submit_store      take chunks that vLLM has just stored    a job, done by a thread
    get_finished_jobs report the jobs that the thread has done

Chunks whose load failed are misses for a while, so that vLLM computes them."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from ...tiers.settings.values import ConfigError
from ..costs.rates import PrefillRate
from . import tier_metrics as metrics
from . import versions
from .build import build_tiers
from .host_model import names_of_tier
from .identity import LAYOUTS, ChunkIdentity
from .settings import HOST
from .tier_lookups import Found

log = logging.getLogger(__name__)

_RESULTS = {
    Found.HIT: LookupResult.HIT,
    Found.MISS: LookupResult.MISS,
    Found.RETRY: LookupResult.RETRY,
}
# The time for copies at shutdown, in addition to the setting `read_seconds`.
DRAIN_SECONDS = 5.0

MAX_STEPS = 64  # the most steps remembered until vLLM stores their chunks


class StrataTier(SecondaryTierManager):
    """The slab, the SSD and the cache servers below vLLM's region. `given` are the settings of
    settings.py. Raises ConfigError or TierConfigError for settings that cannot work."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            **versions.tier_arguments(backpressure_detector),
        )
        self._spec = offloading_spec
        settings = HOST.read(given)
        rows = np.asarray(primary_kv_view).view(np.uint8)
        identity = identity_of(offloading_spec, rows.shape[1], settings.revision, settings.salt)
        self._chunk_tokens = chunk_tokens(offloading_spec)
        self._tiers = build_tiers(settings, identity, rows, self._chunk_tokens)
        self._settings = settings
        self._meter = PrefillMeter(self._tiers.prefill)
        self._metrics = metrics.TierMetrics(self._tiers)
        self._jobs: dict[int, tuple[bool, dict[bytes, bytes]]] = {}  # is a load, our key → vLLM's
        self._has_checked_seed = False
        self._process_id = os.getpid()
        atexit.register(self.shutdown)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return a hit if a tier has the chunk and loading it is quicker than computing it."""
        transfers = self._tiers.transfers
        if transfers.is_broken:
            return LookupResult.MISS
        if not self._has_checked_seed:
            self._check_seed()
        with transfers.lock:
            return _RESULTS[self._tiers.lookups.find_chunk(key, req_context)]

    def submit_load(self, job_metadata: Any) -> None:
        tier_keys = self._register_job(job_metadata, is_load=True)
        with self._tiers.transfers.lock:
            self._tiers.lookups.loading(list(tier_keys), job_metadata.req_context)
        self._tiers.transfers.load(job_metadata.job_id, list(tier_keys), job_metadata.chunk_ids)

    def submit_store(self, job_metadata: Any) -> None:
        tier_keys = self._register_job(job_metadata, is_load=False)
        context = job_metadata.req_context
        positions = versions.key_positions(context)
        ends = [positions[key] for key in job_metadata.keys if key in positions]
        self._meter.measure_stored(context.req_id, ends, self._chunk_tokens)
        with self._tiers.transfers.lock:
            self._tiers.lookups.clear_failures(list(tier_keys))
        self._tiers.transfers.store(job_metadata.job_id, list(tier_keys), job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[Any]:
        results = []
        for ended in self._tiers.transfers.take_ended():
            is_load, tier_keys = self._jobs.pop(ended.job_id)
            loaded = [host for key, host in tier_keys.items() if key not in ended.missing]
            results.append(
                versions.job_result(
                    ended.job_id,
                    success=not ended.missing,
                    loaded=loaded if is_load and ended.missing else None,
                    seconds=ended.seconds,
                    num_bytes=ended.num_bytes,
                )
            )
        return results

    def has_pending_work(self) -> bool:
        """Whether vLLM must run steps so that a job is reported. Write-backs need no steps."""
        return bool(self._jobs)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return the default context, by which vLLM offers chunks once they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Release the room in vLLM's region that was reserved for the request."""
        with self._tiers.transfers.lock:
            self._tiers.lookups.let_go([req_context.req_id])

    def on_schedule_end(self, context: Any) -> None:
        self._meter.scheduled(context.new_req_ids)
        with self._tiers.transfers.lock:
            self._tiers.lookups.let_go(context.new_req_ids)

    def drain_jobs(self) -> None:
        """Wait, for a bounded time, until no job reads or writes vLLM's region."""
        self._tiers.transfers.wait_for_jobs(self._settings.read_seconds + DRAIN_SECONDS)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metrics.definitions()

    def get_stats(self) -> Any:
        """Return the growth of the tiers' counters since the last report, and the tiers' gauges."""
        return self._metrics.build_stats()

    def shutdown(self) -> None:
        """Write unwritten chunks, and release all. Idempotent. No effect in a forked process."""
        atexit.unregister(self.shutdown)
        if self._process_id != os.getpid():
            return
        self._tiers.transfers.close(self._settings.shutdown_seconds)
        release = getattr(self._spec, "release_region", None)  # vLLM's own spec has no such method
        if release is not None:
            release()

    def _register_job(self, job: Any, *, is_load: bool) -> dict[bytes, bytes]:
        """Register a job. Return its keys in order: StrataKV's key → vLLM's key."""
        lookups = self._tiers.lookups
        with self._tiers.transfers.lock:
            tier_keys = {lookups.key_of(key, job.req_context): key for key in job.keys}
        self._jobs[job.job_id] = is_load, tier_keys
        return tier_keys

    def _check_seed(self) -> None:
        self._has_checked_seed = True
        if versions.hash_seed_is_random():
            log.warning(
                "vLLM hashes blocks with a random seed, so that they are not found again after a "
                "restart, or from another engine; use --prefix-caching-hash-algo sha256, or set "
                "PYTHONHASHSEED to the same number everywhere"
            )


def chunk_tokens(spec: Any) -> int:
    """Return the number of tokens of a chunk; the largest number if cache groups differ."""
    block_tokens: int = max(group.tokens_per_block for group in spec.config.groups)
    return block_tokens * int(spec.blocks_per_chunk)


def identity_of(
    spec: Any, chunk_bytes: int, revision: str | None, salt: str | None
) -> ChunkIdentity:
    """Return the identity of this engine's chunks. Raises ConfigError for an unknown layout."""
    config = spec.config
    parallel = config.parallel
    layout = config.kv_cache_layout
    if layout not in LAYOUTS:
        raise ConfigError(
            f"vLLM lays its KV cache out as {layout}, which StrataKV cannot tell from others; use "
            f"one of {', '.join(LAYOUTS)}"
        )
    names = names_of_tier(config.model.name, revision)
    return ChunkIdentity(
        model=names.model,
        drafts=names.drafts,
        settings=names.settings,
        revision=revision or "",
        salt=salt or "",
        kv_dtype=config.model.dtype,
        kv_layout=layout,
        platform=versions.platform_name(),
        host_version=".".join(map(str, versions.host_version())),
        chunk_bytes=chunk_bytes,
        blocks_per_chunk=int(spec.blocks_per_chunk),
        tokens_per_hash=int(config.cache.tokens_per_hash),
        groups=tuple(
            (group.group_id, group.tokens_per_block, tuple(group.layer_names))
            for group in config.groups
        ),
        parallel=(
            parallel.world_size,
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
        ),
        is_replicated=bool(spec.replicated_layout),
        is_canonical=bool(config.canonical_layout),
    )


@dataclass(slots=True, eq=False)
class _Step:
    began: float
    requests: set[str]
    num_tokens: int = 0
    num_context_tokens: int = 0
    ended: float = 0.0


class PrefillMeter:
    """Records the times of vLLM's prefill steps in `rate`."""

    def __init__(self, rate: PrefillRate, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._steps: list[_Step] = []

    def scheduled(self, request_ids: Collection[str]) -> None:
        """Record a step and its requests that run for the first time. Called once for each step."""
        self._record_steps()
        if request_ids:
            self._steps.append(_Step(self._clock(), set(request_ids)))
            del self._steps[:-MAX_STEPS]

    def measure_stored(self, request_id: str, ends: Sequence[int], chunk_tokens: int) -> None:
        """Record that chunks of a request have been computed, up to the tokens in `ends`."""
        for step in self._steps:
            if request_id in step.requests and ends:
                step.requests.remove(request_id)
                step.ended = self._clock()
                first, last = max(0, min(ends) - chunk_tokens), max(ends)
                step.num_tokens += last - first
                step.num_context_tokens += (first + last - 1) * (last - first) // 2
                return

    def _record_steps(self) -> None:
        told = [step for step in self._steps if step.num_tokens]
        for step in told:
            seconds = step.ended - step.began
            self._rate.record_prefill(step.num_tokens, step.num_context_tokens, seconds)
            self._steps.remove(step)
