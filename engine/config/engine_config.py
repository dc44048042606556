# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine: a few frozen value objects with units in their names.

`cli/` builds these. Each object checks itself and raises ConfigError with what was expected, what
came and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...tiers.settings.format import format_value
from ...tiers.settings.values import (
    GIB,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_THREADS,
    MAX_TOKENS,
    MAX_WAITING,
    ConfigError,
    check_device,
    one_of,
    size_within,
    within,
)
from .offload_config import OffloadConfig

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "gather", "kernels", "triton", "sdpa", "fa3")
_GPU_BACKENDS = ("triton", "sdpa", "fa3")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
COMPILATIONS = ("none", "elementwise")
EXECUTORS = ("uni", "mp")  # the model runner in the core's process, or in one of its own
# What an engine is for where others share its cache. prefill: it answers when others can load the
# prompt's blocks; decode: others have computed its prompts.
ROLES = ("both", "prefill", "decode")
# What keeps an answer to a schema or a grammar (`structured/backends.py`).
STRUCTURED_OUTPUTS_BACKENDS = ("auto", "xgrammar", "guidance")
POOLINGS = LAST, MEAN = ("last", "mean")
RESERVES = ("none", "prompt", "full")
BLOCK_HASHES = ("sha256", "sha256_cbor")
# On the CPU: the pool that every model gets where the memory is there.
DEFAULT_POOL_BYTES = 1 * GIB
DEFAULT_GPU_SHARE = 0.9
MAX_BLOCK_SIZE = 256
MAX_GROUPS = 4096  # of as many layers as a model may have


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, and how it is computed."""

    path: Path  # a Hugging Face directory
    served_name: str
    # Revision in the Hub's repository; also separates the cached blocks of otherwise equal models.
    revision: str = ""
    dtype: str = "auto"  # the checkpoint's, where the device is quick in it
    max_model_len: int | None = None  # None: what the model allows and the pool holds
    device: str = "cpu"  # or cuda, or one of several GPUs: cuda:1
    attention_backend: str = "auto"
    strict_kernels: bool = False  # refuse what is slow on a GPU
    enforce_eager: bool = False  # record no decode steps
    compilation: str = "none"
    load_format: str = "auto"  # dummy: random weights, for benchmarks
    # What the model writes around a thought; empty: looked for in the tokenizer, none: nothing.
    reasoning_start: str = ""
    reasoning_end: str = ""
    pooling: str = LAST  # which hidden states of a prompt are its embedding

    def __post_init__(self) -> None:
        one_of("--dtype", self.dtype, DTYPES)
        check_device("--device", self.device)
        one_of("--attention-backend", self.attention_backend, ATTENTION_BACKENDS)
        one_of("--compilation", self.compilation, COMPILATIONS)
        one_of("--load-format", self.load_format, LOAD_FORMATS)
        one_of("--pooling", self.pooling, POOLINGS)
        if self.attention_backend == "gather" and self.device != "cpu":
            raise ConfigError(
                f"--attention-backend gather computes on the CPU and --device is {self.device}; "
                "drop it"
            )
        if self.attention_backend in _GPU_BACKENDS and self.device == "cpu":
            raise ConfigError(
                f"--attention-backend {self.attention_backend} computes on a GPU and --device is "
                "cpu; drop it or give --device cuda"
            )
        if self.max_model_len is not None:
            # One token to read and one to answer with.
            within("--max-model-len", self.max_model_len, 2, MAX_TOKENS)
        self._check_marks()

    def _check_marks(self) -> None:
        start, end = self.reasoning_start, self.reasoning_end
        if "none" in (start, end):
            return
        if bool(start) != bool(end):
            given, missing = ("start", "end") if start else ("end", "start")
            raise ConfigError(
                f"--reasoning-{given} is given and --reasoning-{missing} is not; a thought stands "
                f"between two marks: add --reasoning-{missing} or drop --reasoning-{given}"
            )
        if start and (start in end or end in start):
            raise ConfigError(
                f"--reasoning-start {format_value(start)} and --reasoning-end {format_value(end)} "
                "contain one another, so they cannot be told apart; give marks such as <think> and "
                "</think>"
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool. `num_blocks` wins over `memory_bytes` where both are given; with neither it is
    sized from the free memory (`worker/runtime/pool_sizing.py`)."""

    block_size: int = 16  # tokens
    memory_bytes: int | None = None
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"  # that of the computation
    gpu_memory_utilization: float = DEFAULT_GPU_SHARE  # weights, steps and the pool together
    enable_prefix_caching: bool = True
    block_hash: str = "sha256"
    watermark: float = 0.01  # fraction of blocks kept free when admitting requests
    # The layers are split into so many groups with block tables of their own, where all attend
    # alike; otherwise their kinds decide (`cache/group_spec.py`). Settings count blocks over all
    # layers; a pool of several groups has a smaller one in each instead.
    num_groups: int = 1
    # Attention reads blocks of so many tokens, several of which lie one behind the other in each
    # block of the pool; None: those of the pool. Another number is another order of the bytes, so
    # engines with different ones share no blocks.
    kernel_block_size: int | None = None

    def __post_init__(self) -> None:
        size = self.block_size
        if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ConfigError(
                f"--block-size takes a power of two from 1 to {MAX_BLOCK_SIZE}, not "
                f"{format_value(size)}"
            )
        if self.num_blocks is not None:
            within("--num-blocks", self.num_blocks, 2, MAX_BLOCKS)
        if self.memory_bytes is not None:
            size_within("--kv-cache-memory-bytes", self.memory_bytes, 1)
        one_of("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "--gpu-memory-utilization takes a share above 0 and up to 1, not "
                f"{self.gpu_memory_utilization}"
            )
        one_of("--block-hash", self.block_hash, BLOCK_HASHES)
        kernel = self.kernel_block_size
        if kernel is not None and (kernel < 1 or size % kernel):
            raise ConfigError(
                f"attention reads blocks of a divisor of --block-size {size}, not of "
                f"{format_value(kernel)} tokens; take a power of two up to {size}"
            )
        within("the number of cache groups", self.num_groups, 1, MAX_GROUPS)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"the watermark is a fraction in [0, 1), not {self.watermark}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much one step may do."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0  # 0: a prompt may take the whole budget
    enable_chunked_prefill: bool = True
    max_waiting_requests: int = 4096
    # Shares of the KV pool that requests hold. The gap between them keeps a request that was just
    # let in from being sent back at once. Neither counts for the only request that runs.
    admit_below: float = 0.8
    preempt_above: float = 0.95
    policy: str = "fcfs"  # see engine/scheduler/policies.py
    # What a request has room for before it starts: no more than its first step, its prompt, or all
    # the tokens that it may come to.
    reserve: str = "none"
    # Of the blocks that may be kept for jobs (half of the pool), those for one tenant's at most.
    pin_tenant_share: float = 1.0

    def __post_init__(self) -> None:
        within("--max-num-batched-tokens", self.max_num_batched_tokens, 1, MAX_TOKENS)
        within("--max-num-seqs", self.max_num_seqs, 1, MAX_SEQS)
        threshold = self.long_prefill_token_threshold
        within("--long-prefill-token-threshold", threshold, 0, MAX_TOKENS)
        within("the number of waiting requests", self.max_waiting_requests, 1, MAX_WAITING)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} cannot give each of "
                f"--max-num-seqs {self.max_num_seqs} requests one token; raise the first or "
                "lower the second"
            )
        for flag, share in (
            ("--admit-below", self.admit_below), ("--preempt-above", self.preempt_above),
        ):  # fmt: skip
            if not 0.0 < share <= 1.0:
                raise ConfigError(f"{flag} takes a share above 0 and up to 1, not {share}")
        one_of("--reserve", self.reserve, RESERVES)
        if not 0.0 <= self.pin_tenant_share <= 1.0:
            raise ConfigError(
                f"--pin-tenant-share takes a share from 0 to 1, not {self.pin_tenant_share}"
            )
        if self.admit_below > self.preempt_above:
            raise ConfigError(
                f"--admit-below {self.admit_below} lets requests in where --preempt-above "
                f"{self.preempt_above} sends them back; raise the second or lower the first"
            )

    @property
    def most_step_tokens(self) -> int:
        """The tokens that one step computes of one request at most."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine core needs."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    tenant_secret: bytes = field(default=b"", repr=False)  # separates the blocks of tenants
    num_threads: int | None = None  # None: the physical cores
    executor: str = "uni"
    # Whether the next step is made while one is computed, where the model has its own process.
    async_scheduling: bool = True
    role: str = "both"
    logits_processors: tuple[str, ...] = ()  # module:Class, beside those that are installed
    structured_outputs_backend: str = "auto"
    step_trace: Path | None = None  # a file for a record of every step; None: none is written

    def __post_init__(self) -> None:
        backend = self.structured_outputs_backend
        one_of("--structured-outputs-backend", backend, STRUCTURED_OUTPUTS_BACKENDS)
        one_of("--distributed-executor-backend", self.executor, EXECUTORS)
        if self.offload.enabled and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "--kv-offload finds blocks by their prefix hashes, so it cannot work with "
                "--no-enable-prefix-caching; drop one of them"
            )
        one_of("--role", self.role, ROLES)
        self._check_role()
        if self.cache.kv_cache_dtype != "auto":
            self._check_kv_cache_dtype()
        if self.num_threads is not None:
            within("--num-threads", self.num_threads, 1, MAX_THREADS)

    def _check_role(self) -> None:
        """A prefill node's blocks have to be found by others, a decode node has to find them."""
        offload = self.offload
        works = {"prefill": offload.is_read_by_others, "decode": offload.reads_others}
        if works.get(self.role, True):
            return
        given = ",".join(offload.tier_names) or "nothing"
        direct = "--kv-serve HOST:9500" if self.role == "prefill" else "--kv-peers grpc://host:9500"
        raise ConfigError(
            f"--role {self.role} shares blocks with other engines, and --kv-offload "
            f"{given} names nothing that they share; add a cache server, --kv-offload "
            f"cpu,grpc://host:9400, or do without one: --kv-offload cpu {direct}"
        )

    def _check_kv_cache_dtype(self) -> None:
        name = self.cache.kv_cache_dtype
        backend = self.model.attention_backend
        if backend in ("gather", "sdpa", "fa3"):
            raise ConfigError(
                f"--attention-backend {backend} cannot read --kv-cache-dtype {name}; use kernels"
            )
        if self.offload.ssd.codec == "fp8":
            raise ConfigError(
                f"--kv-offload-ssd-codec fp8 halves blocks of 16 bits, and --kv-cache-dtype {name} "
                "makes them of 8 already; drop one of them"
            )
