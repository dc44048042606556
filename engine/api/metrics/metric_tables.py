# SPDX-License-Identifier: Apache-2.0
"""Tables that map values in the engine core's `stats` to metrics: names, types and help texts.

Users' dashboards and autoscalers already read the names that begin with `vllm:`. `docs/metrics.md`
explains each metric in full."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

LABELS = ("model_name", "engine")  # the labels of every metric

CAUSES = ("preemption", "load_failed", "load_given_up")

_TIERING = "vllm:kv_offload_tiering_"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Shown(NamedTuple):
    name: str
    kind: Kind
    text: str


def _counter(name: str, text: str) -> Shown:
    return Shown(name, Kind.COUNTER, text)


def _gauge(name: str, text: str) -> Shown:
    return Shown(name, Kind.GAUGE, text)


def _histogram(name: str, text: str) -> Shown:
    return Shown(name, Kind.HISTOGRAM, text)


# The rows of a table: the key of a value in `stats`, and the metric that shows the value.
Table = tuple[tuple[str, Shown], ...]

UP = _gauge("stratakv:engine_up", "1 while the engine core is alive.")
AGE = _gauge("stratakv:stats_age_seconds", "Age of the core's figures.")

# Metrics of prompts that arrive in parts.
SESSIONS: Table = (
    ("num_open", _gauge("stratakv:open_sessions", "Prompts that come in parts, under way.")),
    ("num_timed_out", _counter("stratakv:sessions_timed_out", "Prompts whose next part was late.")),
)

# Metrics of the scheduler. A counter that `stats` lacks, before its first count, is shown as 0.
SCHEDULER: Table = (
    ("num_running", _gauge("vllm:num_requests_running", "Requests being computed.")),
    ("num_waiting", _gauge("vllm:num_requests_waiting", "Requests that wait or load.")),
    ("num_parked", _gauge("stratakv:num_requests_loading", "Requests whose blocks are loading.")),
    ("num_pinned", _gauge("stratakv:pinned_turns", "Turns of jobs whose blocks are kept.")),
    ("pinned_blocks", _gauge("stratakv:pinned_blocks", "Blocks that are kept for jobs.")),
    ("pins", _counter("stratakv:turns_pinned", "Turns of jobs whose blocks were kept.")),
    ("pins_expired", _counter("stratakv:pins_expired", "Kept turns that waited in vain.")),
    ("pins_given_up", _counter("stratakv:pins_given_up", "Kept turns whose room was needed.")),
    ("pins_over_quota", _counter("stratakv:pins_over_quota", "Turns beyond a tenant's share.")),
    ("pool_usage", _gauge("vllm:kv_cache_usage_perc", "Held part of the KV pool, 1 is all.")),
    ("pool_usage", _gauge("vllm:gpu_cache_usage_perc", "The same under its older name.")),
    ("num_blocks", _gauge("stratakv:pool_blocks", "Blocks of the KV pool.")),
    ("num_free_blocks", _gauge("stratakv:pool_free_blocks", "Free blocks in the pool.")),
    ("evicted_blocks", _counter("stratakv:pool_evicted_blocks", "Named blocks that were reused.")),
    ("preemptions", _counter("vllm:num_preemptions", "Requests sent back to the queue.")),
    ("steps", _counter("stratakv:steps", "Steps of the engine.")),
    ("scheduled_tokens", _counter("stratakv:scheduled_tokens", "Tokens computed.")),
    ("forks", _counter("stratakv:forks", "Answers whose prompt another answer computed.")),
    ("copied_blocks", _counter("stratakv:copied_blocks", "Shared blocks copied for a writer.")),
    (
        "state_checkpoints",
        _counter("stratakv:state_checkpoints", "Checkpoints of states that were made."),
    ),
    (
        "state_checkpoints_left_out",
        _counter("stratakv:state_checkpoints_left_out", "Those that the pool had no room for."),
    ),
    ("pictures_encoded", _counter("stratakv:pictures_encoded", "Pictures and tiles encoded.")),
    ("pictures_reused", _counter("stratakv:pictures_reused", "Those found encoded already.")),
    ("loads", _counter("stratakv:loads", "Loads from the tiers that were begun.")),
    ("loads_failed", _counter("stratakv:loads_failed", "Loads that brought nothing.")),
    ("loads_given_up", _counter("stratakv:loads_given_up", "Loads given back to make room.")),
    ("meetings", _counter("stratakv:loads_met", "Prompts computed and loaded at once that met.")),
    (
        "resumed_by_load",
        _counter("stratakv:resumed_by_load_tokens", "Tokens loaded by preempted requests."),
    ),
    (
        "prefix_queried_tokens",
        _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the KV pool."),
    ),
    (
        "cached_tokens_pool",
        _counter("vllm:prefix_cache_hits", "Prompt tokens found in the KV pool."),
    ),
)
WAITING_BY_REASON = _gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.")
LORA_REQUESTS = _gauge("stratakv:lora_requests", "Requests by their adapter and state.")
LORA_INFO = _gauge("vllm:lora_requests_info", "Adapters with requests, as labels; Unix time.")
RECOMPUTES = _counter("stratakv:recomputes", "Times a request computed tokens again.")
RECOMPUTED_TOKENS = _counter("stratakv:recomputed_tokens", "Tokens computed again.")

# Metrics of draft tokens, for an engine with speculative decoding.
SPECULATION: Table = (
    (
        "num_drafts",
        _counter("vllm:spec_decode_num_drafts", "Times drafts of a request were checked."),
    ),
    ("num_draft_tokens", _counter("vllm:spec_decode_num_draft_tokens", "Draft tokens checked.")),
    (
        "num_accepted_tokens",
        _counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    ),
    ("pauses", _counter("stratakv:speculation_pauses", "Requests whose drafts did not pay.")),
    (
        "switched_off",
        _counter("stratakv:speculation_switched_off", "Batch sizes at which drafts did not pay."),
    ),
)
ACCEPTED_BY_PLACE = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by their place."
)
SPECULATION_GAIN = _gauge(
    "stratakv:speculation_gain", "Tokens a second with drafts, against those without."
)

# Metrics of the sampled blocks of the KV pool.
POOL: Table = (
    (
        "lifetime",
        _histogram("vllm:kv_block_lifetime_seconds", "From handing a block out to its eviction."),
    ),
    (
        "idle_before_evict",
        _histogram("vllm:kv_block_idle_before_evict_seconds", "From last use to eviction."),
    ),
    ("reuse_gap", _histogram("vllm:kv_block_reuse_gap_seconds", "Between two uses of a block.")),
)

# Metrics of the engine core's steps.
CORE: Table = (
    ("iteration_tokens", _histogram("vllm:iteration_tokens_total", "Tokens of a step.")),
    (
        "request_max_tokens",
        _histogram("vllm:request_params_max_tokens", "Most tokens a request may make."),
    ),
)
PRICE = _gauge("stratakv:prefill_seconds_per_token", "Time to compute one token of a prompt.")
SAVED = _counter("stratakv:prefill_seconds_saved", "Time of computing what was found instead.")
CACHE_CONFIG = _gauge("vllm:cache_config_info", "Settings of the KV pool, as labels.")
OFFLOAD_CONFIG = _gauge("vllm:kv_offload_config_info", "Settings of the tiers, as labels.")

# Metrics of the connector, which an engine without tiers lacks.
CONNECTOR: Table = (
    ("stores", _counter("stratakv:stores", "Copy jobs from the KV pool to the tiers.")),
    ("stored_blocks", _counter("stratakv:stored_blocks", "Blocks copied out of the KV pool.")),
    ("seconds_loaded", _counter("stratakv:load_seconds_paid", "Time that requests were loading.")),
    (
        "store_wait_seconds",
        _counter("stratakv:store_wait_seconds", "Time that steps waited for stores."),
    ),
    (
        "probes",
        _counter("stratakv:load_probes", "Loads to see whether a slow tier is quick again."),
    ),
    (
        "awaiting_prefill",
        _gauge("stratakv:prefill_waiting", "Requests that wait for prompts computed elsewhere."),
    ),
    (
        "prefill_wait_seconds",
        _histogram("stratakv:prefill_wait_seconds", "How long such requests waited."),
    ),
    ("loads_in_flight", _gauge("stratakv:loads_in_flight", "Loads under way.")),
    ("stores_in_flight", _gauge("stratakv:stores_in_flight", "Stores under way.")),
    ("load_bytes", _counter("vllm:kv_offload_load_bytes", "Bytes copied to the KV pool.")),
    ("load_copy_seconds", _counter("vllm:kv_offload_load_time", "Time of these copies.")),
    ("load_sizes", _histogram("vllm:kv_offload_load_size", "Bytes of each of these copies.")),
    ("store_bytes", _counter("vllm:kv_offload_store_bytes", "Bytes copied out of the KV pool.")),
    ("store_copy_seconds", _counter("vllm:kv_offload_store_time", "Time of these copies.")),
    ("store_sizes", _histogram("vllm:kv_offload_store_size", "Bytes of each of these copies.")),
    (
        "allocation_failures",
        _counter("vllm:kv_offload_allocation_failure", "Stores the cpu tier lacked room for."),
    ),
)
# Metrics of the estimates for each tier by which the engine loads or computes a prefix.
ESTIMATES: Table = (
    ("break_even_tokens", _gauge("stratakv:break_even_tokens", "Prompts longer are loaded.")),
    (
        "bytes_per_second",
        _gauge("stratakv:tier_estimated_bytes_per_second", "What a tier is taken to give."),
    ),
    (
        "fixed_seconds",
        _gauge("stratakv:tier_estimated_fixed_seconds", "What any load is taken to cost."),
    ),
)
PREFILL_RATE = _gauge(
    "stratakv:prefill_estimated_tokens_per_second", "What computing a prompt is taken to give."
)
DECLINED = _counter("stratakv:declined_tokens", "Tokens computed although a tier had them.")
PREFILL_WAITS = _counter(
    "stratakv:prefill_waits", "Requests that waited for prompts computed elsewhere, by end."
)
FAILURES = _counter("stratakv:offload_failures", "Transfers that failed, by reason.")
BLOCKS_DROPPED = _counter("stratakv:blocks_dropped", "Blocks that every tier was told to forget.")
EXTERNAL_QUERIES = _counter(
    "vllm:external_prefix_cache_queries", "Prompt tokens looked up in the tiers below the pool."
)
EXTERNAL_HITS = _counter(
    "vllm:external_prefix_cache_hits", "Prompt tokens that came from these tiers."
)

# Metrics of requests whose prompts were computed for other engines (role prefill).
HANDOVER: Table = (
    ("num_held", _gauge("stratakv:answers_held", "Answers that wait for their blocks.")),
    ("handed_over", _counter("stratakv:handed_over", "Requests whose prompts were handed over.")),
    (
        "incomplete",
        _counter("stratakv:handed_over_incomplete", "Of these, with blocks no engine can load."),
    ),
    ("seconds", _counter("stratakv:answers_held_seconds", "For which answers were held.")),
)

# Metrics of the process that lets other engines read the CPU tier.
SERVING: Table = (
    ("serving_up", _gauge("stratakv:serving_up", "Whether other engines can read the CPU tier.")),
    ("serving_starts", _counter("stratakv:serving_starts", "Processes started to serve it.")),
    ("served_blocks", _counter("stratakv:served_blocks", "Blocks sent to other engines.")),
    ("served_bytes", _counter("stratakv:served_bytes", "Bytes sent to other engines.")),
    ("served_held_blocks", _gauge("stratakv:served_held_blocks", "Blocks held for them now.")),
)

# Metrics of each tier; the label `tier` is its name.
TIER: Table = (
    ("capacity_bytes", _gauge("stratakv:tier_capacity_bytes", "Bytes a tier may hold.")),
    ("used_bytes", _gauge("stratakv:tier_used_bytes", "Bytes a tier holds.")),
    ("capacity_blocks", _gauge("stratakv:tier_capacity_blocks", "Blocks a tier may hold.")),
    ("blocks", _gauge("stratakv:tier_blocks", "Blocks a tier holds.")),
    ("hits", _counter("stratakv:tier_hits", "Blocks to be loaded that were there.")),
    ("misses", _counter("stratakv:tier_misses", "Blocks to be loaded that were not there.")),
    ("stored_blocks", _counter("stratakv:tier_stored_blocks", "Blocks taken in.")),
    ("loaded_blocks", _counter("stratakv:tier_loaded_blocks", "Blocks given out.")),
    ("stored_bytes", _counter("stratakv:tier_stored_bytes", "Bytes taken in.")),
    ("loaded_bytes", _counter("stratakv:tier_loaded_bytes", "Bytes given out.")),
    ("evicted_blocks", _counter("stratakv:tier_evicted_blocks", "Blocks displaced by others.")),
    ("dropped_stores", _counter("stratakv:tier_dropped_stores", "Blocks refused or lost.")),
    (
        "stored_bytes_saved",
        _counter("stratakv:tier_stored_bytes_saved", "Of these, what a codec left out."),
    ),
    (
        "loaded_bytes_saved",
        _counter("stratakv:tier_loaded_bytes_saved", "Bytes given out that were not read."),
    ),
    (
        "corrupt_records_dropped",
        _counter("stratakv:corrupt_records_dropped", "Records forgotten as damaged or unreadable."),
    ),
)
# Metrics of each tier that have a second label: key in `stats`, name of the label, metric.
TIER_BY_LABEL: tuple[tuple[str, str, Shown], ...] = (
    (
        "rejected",
        "defect",
        _counter("stratakv:checksum_rejects", "Damaged records that were not served."),
    ),
    ("errors", "kind", _counter("stratakv:tier_errors", "Faults of a tier, each a miss.")),
)

# Metrics of the shares of the cpu tier's slots that transfers hold now.
CPU_USAGE = _gauge("vllm:kv_offload_cpu_cache_usage_perc", "Part held by transfers.")
CPU_READ_USAGE = _gauge("vllm:kv_offload_cpu_cache_read_usage_perc", "Part being read.")
CPU_WRITE_USAGE = _gauge("vllm:kv_offload_cpu_cache_write_usage_perc", "Part being filled.")

# Metrics of the connector whose label `tier` is position and name, such as `0:primary`, `1:ssd`.
LOOKUPS: Table = (
    ("lookup_queries", _counter(f"{_TIERING}chunk_queries", "Chunks looked up in a tier.")),
    ("lookup_hits", _counter(f"{_TIERING}chunk_hits", "Chunks that were there.")),
)
# Metrics of each store below the cpu tier, from the tier's values; the label `tier` is as `1:ssd`.
STORE: Table = (
    ("loaded_bytes", _counter(f"{_TIERING}read_bytes", "Bytes read from a tier.")),
    ("load_seconds", _counter(f"{_TIERING}read_time", "Time of these reads.")),
    ("stored_bytes", _counter(f"{_TIERING}write_bytes", "Bytes written to a tier.")),
    ("store_seconds", _counter(f"{_TIERING}write_time", "Time of these writes.")),
)
# More metrics of each store below the cpu tier, from the values of the store's traffic.
TRAFFIC: Table = (
    ("active_promotions", _gauge(f"{_TIERING}active_promotion_jobs", "Reads under way.")),
    ("active_cascades", _gauge(f"{_TIERING}active_cascade_jobs", "Writes under way.")),
    (
        "promotion_seconds",
        _histogram(f"{_TIERING}promotion_latency_seconds", "From asking for a read to its end."),
    ),
    ("promotion_failures", _counter(f"{_TIERING}promotion_job_failures", "Reads that failed.")),
    (
        "promotion_allocation_failures",
        _counter(f"{_TIERING}promotion_allocation_failures", "Reads the cpu tier had no room for."),
    ),
    ("cascade_failures", _counter(f"{_TIERING}cascade_job_failures", "Writes that failed.")),
    (
        "lost_blocks",
        _counter(f"{_TIERING}backpressure_blocks_dropped", "Blocks evicted before their write."),
    ),
    (
        "lost_stores",
        _counter(f"{_TIERING}backpressure_stores_dropped", "Evictions that lost such blocks."),
    ),
)

# Metrics of each store below the cpu tier whose label `tier` is the tier's name alone.
STORE_HEALTH: Table = (
    (
        "unadmitted_blocks",
        _counter("stratakv:tier_unadmitted_blocks", "Blocks not worth writing to a tier."),
    ),
    (
        "breaker_opened",
        _counter("stratakv:tier_breaker_opened", "Times a tier was given up for a while."),
    ),
    (
        "write_breaker_opened",
        _counter("stratakv:tier_write_breaker_opened", "Times writing to a tier was given up."),
    ),
    (
        "late_write_blocks",
        _gauge("stratakv:tier_late_write_blocks", "Blocks held by writes that are late."),
    ),
)
BREAKERS: Table = (
    ("breaker", _gauge("stratakv:tier_breaker", "1 for the state that a tier's breaker is in.")),
    (
        "write_breaker",
        _gauge("stratakv:tier_write_breaker", "The same of the breaker of a tier's writes."),
    ),
)
STORES_SKIPPED = _counter("vllm:kv_offload_stores_skipped", "Blocks not worth storing in a tier.")
