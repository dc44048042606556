# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine, as frozen dataclasses whose fields are the engine's options.

Names of fields include units, such as `memory_bytes`. Each dataclass checks its own values and
raises a ConfigError, which names the expected value, the given value and a remedy."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, field
from pathlib import Path

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import check_options, options_of, setting
from ...tiers.settings.values import (
    GIB,
    MAX_BLOCKS,
    MAX_SEQS,
    MAX_THREADS,
    MAX_TOKENS,
    MAX_WAITING,
    ConfigError,
    within,
)
from .lora_config import LoraConfig
from .offload_config import OffloadConfig
from .option_readers import model_mark, processor_names
from .speculative_config import SpeculativeConfig

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "gather", "kernels", "triton", "sdpa", "fa3")
_GPU_BACKENDS = ("triton", "sdpa", "fa3")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
COMPILATIONS = ("none", "elementwise")
EXECUTORS = ("uni", "mp")  # the model runner is in the engine core's process, or in its own process
# An engine's role among engines that share a cache. prefill: the engine answers once other engines
# can load the prompt's KV blocks; decode: other engines have computed the engine's prompts.
ROLES = ("both", "prefill", "decode")
# The backends that make an answer follow a schema or a grammar (`structured/backends.py`).
STRUCTURED_OUTPUTS_BACKENDS = ("auto", "xgrammar", "guidance")
POOLINGS = LAST, MEAN = ("last", "mean")
RESERVES = ("none", "prompt", "full")
BLOCK_HASHES = ("sha256", "sha256_cbor")
# The default size of the KV pool on the CPU, for every model, if there is enough memory.
DEFAULT_POOL_BYTES = 1 * GIB
DEFAULT_GPU_SHARE = 0.9
MAX_BLOCK_SIZE = 256
MAX_IDLE_SECONDS = 86_400.0
MAX_GROUPS = 4096  # limit of cache groups, and so of a model's layers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The settings of the model and of the model's computation."""

    path: Path  # a Hugging Face directory
    served_name: str = setting(
        MISSING, readers.text, "the name clients ask for", "NAME",
        "the directory's name, or the id", name="served_model_name",
    )  # fmt: skip
    revision: str = setting(
        "", readers.text,
        "branch, tag or commit of a model on the Hub; separates the blocks of otherwise equal "
        "models", "TEXT",
    )  # fmt: skip
    # auto: the checkpoint's data type, if the device computes fast in that type.
    dtype: str = setting("auto", readers.one_of(*DTYPES), ", ".join(DTYPES), "TYPE")
    device: str = setting(
        "cpu", readers.device, "where to compute: cpu, cuda or one GPU, cuda:1", "DEVICE"
    )
    attention_backend: str = setting(
        "auto", readers.one_of(*ATTENTION_BACKENDS),
        "gather (CPU only), kernels, triton, sdpa or fa3 (that library for long chunks), or what "
        "suits the device", "NAME",
    )  # fmt: skip
    strict_kernels: bool = setting(
        False, readers.switch, "refuse a kernel's slow twin on a GPU instead of warning"
    )
    enforce_eager: bool = setting(False, readers.switch, "record no decode steps as CUDA graphs")
    compilation: str = setting(
        "none", readers.one_of(*COMPILATIONS),
        "elementwise: norms, rotations and activations by torch.compile", "NAME",
    )  # fmt: skip
    load_format: str = setting(
        "auto", readers.one_of(*LOAD_FORMATS),
        "dummy: random weights, for which config.json is enough", "NAME",
    )  # fmt: skip
    enable_return_routed_experts: bool = setting(
        False, readers.switch,
        "tell with each answer which experts computed each token, of a model that has some",
    )  # fmt: skip
    # The lower bound leaves room for one token of a prompt and one token of an answer.
    max_model_len: int | None = setting(
        None, readers.integer, "longest prompt and output, in tokens", "N",
        "what the model allows and the pool holds", bounds=(2, MAX_TOKENS),
    )  # fmt: skip
    reasoning_start: str = setting(
        "", model_mark,
        "the text before a thought of the model, such as <think>; none: answers are not split",
        "TEXT", "found in the tokenizer",
    )  # fmt: skip
    reasoning_end: str = setting(
        "", model_mark, "the text behind a thought, such as </think>", "TEXT",
        "found in the tokenizer",
    )  # fmt: skip
    pooling: str = setting(
        LAST, readers.one_of(*POOLINGS),
        "the embedding of a prompt: the hidden state of its last token, or the mean of all", "NAME",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(options_of(ModelConfig, ""), self)
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
        self._check_marks()

    def has_name(self, name: str) -> bool:
        """Whether `name` is the served name, or the model's path in any spelling."""
        given = os.path.abspath(os.path.expanduser(name))
        return name == self.served_name or given == os.path.abspath(self.path)

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
    """The settings of the KV pool. `num_blocks` overrides `memory_bytes`; without either, the free
    memory determines the pool's size (`worker/runtime/pool_sizing.py`)."""

    block_size: int = setting(16, readers.integer, "tokens in a block", "N")
    num_blocks: int | None = setting(
        None, readers.integer, "blocks in the KV pool", "N", "from the free memory",
        bounds=(2, MAX_BLOCKS),
    )  # fmt: skip
    memory_bytes: int | None = setting(
        None, readers.size, "size of the KV pool instead", "SIZE", "from the free memory",
        name="kv_cache_memory_bytes", least_bytes=1,
    )  # fmt: skip
    gpu_memory_utilization: float = setting(
        DEFAULT_GPU_SHARE, readers.number,
        "share of a GPU's memory that weights, steps and the KV pool take", "SHARE",
    )  # fmt: skip
    kv_cache_dtype: str = setting(
        "auto", readers.one_of(*KV_CACHE_DTYPES, synonyms={"fp8": "fp8_e4m3"}),
        "number type of the KV pool: auto, as --dtype, or fp8_e4m3", "TYPE",
    )  # fmt: skip
    enable_prefix_caching: bool = setting(
        True, readers.switch, "keep and find blocks by their prefix"
    )
    block_hash: str = setting(
        "sha256", readers.one_of(*BLOCK_HASHES), ", ".join(BLOCK_HASHES), "NAME"
    )
    state_checkpoint_interval: int = setting(
        0, readers.integer,
        "tokens between checkpoints of states, where layers carry states (state space), beside "
        "those at the ends of prompts and where prompts part; 0: none", "N",
    )  # fmt: skip
    watermark: float = 0.01  # fraction of blocks that stay free when a request is admitted
    # Number of cache groups, each with its own block tables, if all layers have one kind of
    # attention; otherwise the kinds of layers determine the groups (`cache/group_spec.py`).
    # Settings count blocks over all layers, but a block of one of several groups is smaller.
    num_groups: int = 1
    # Tokens in a block that the attention kernel reads; None: `block_size`. A block of the pool
    # consists of several kernel blocks, in order. The number changes the order of a block's bytes,
    # so engines with different numbers share no blocks.
    kernel_block_size: int | None = None

    def __post_init__(self) -> None:
        size = self.block_size
        check_options(options_of(CacheConfig, ""), self)
        if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ConfigError(
                f"--block-size takes a power of two from 1 to {MAX_BLOCK_SIZE}, not "
                f"{format_value(size)}"
            )
        interval = self.state_checkpoint_interval
        if interval < 0 or interval % size:
            raise ConfigError(
                f"--state-checkpoint-interval takes a multiple of the block size ({size} tokens), "
                f"or 0 for none, not {format_value(interval)}"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "--gpu-memory-utilization takes a share above 0 and up to 1, not "
                f"{self.gpu_memory_utilization}"
            )
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
    """The settings of the scheduler: limits of a step, and the order of requests."""

    max_num_batched_tokens: int = setting(
        2048, readers.integer, "tokens in one step", "N", bounds=(1, MAX_TOKENS)
    )
    max_num_seqs: int = setting(
        256, readers.integer, "requests in one step", "N", bounds=(1, MAX_SEQS)
    )
    long_prefill_token_threshold: int = setting(
        0, readers.integer, "most tokens of one prompt in a step; 0 is the whole budget", "N",
        bounds=(0, MAX_TOKENS),
    )  # fmt: skip
    enable_chunked_prefill: bool = setting(
        True, readers.switch, "spread a prompt over several steps"
    )
    max_waiting_requests: int = 4096
    max_adapters: int = 0  # most different LoRA adapters in one step; set from LoraConfig
    pictures: bool = False  # whether prompts may have pictures; set from the model
    # `admit_below` is lower than `preempt_above`, so that a newly admitted request is not preempted
    # at once. Neither `admit_below` nor `preempt_above` applies to the only running request.
    admit_below: float = setting(
        0.8, readers.number, "let requests in while less than this share of the pool is held",
        "SHARE",
    )  # fmt: skip
    preempt_above: float = setting(
        0.95, readers.number, "send requests back while more than this share of the pool is held",
        "SHARE",
    )  # fmt: skip
    policy: str = setting(  # see engine/scheduler/policies.py
        "fcfs", readers.text,
        "who runs next: fcfs, first come, first served; priority, by the requests' `priority`, the "
        "lowest first; or a policy of another package", "NAME", name="scheduling_policy",
    )  # fmt: skip
    reserve: str = setting(  # none: an admitted request gets blocks for its first step only
        "none", readers.one_of(*RESERVES),
        "let a request in only if the pool has room for its prompt (prompt), or for all the tokens "
        "that it may come to (full), beside what those before it may still take", "WHAT",
    )  # fmt: skip
    pin_tenant_share: float = setting(  # the jobs of all tenants pin at most half of the pool
        1.0, readers.number,
        "of the blocks that continuum keeps for agents' jobs, those that it keeps for one tenant "
        "at most", "SHARE",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(options_of(SchedulerConfig, ""), self)
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
        return self.long_prefill_token_threshold or self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of the engine core."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    num_threads: int | None = setting(
        None, readers.integer, "threads that compute", "N", "the physical cores",
        bounds=(1, MAX_THREADS),
    )  # fmt: skip
    executor: str = setting(
        "uni", readers.one_of(*EXECUTORS),
        "uni: the model runs in the engine core's process; mp: in one of its own", "NAME",
        name="distributed_executor_backend",
    )  # fmt: skip
    role: str = setting(
        "both", readers.one_of(*ROLES),
        "prefill: answer when others can load the prompt's blocks; decode: load what others have "
        "computed, to the last token", "NAME",
    )  # fmt: skip
    async_scheduling: bool = setting(
        True, readers.switch,
        "on a GPU, or with --distributed-executor-backend mp: make the next step while one is "
        "computed",
    )  # fmt: skip
    session_idle_seconds: float = setting(
        60.0, readers.number,
        "a request whose prompt comes in parts ends after so long without one", "SECONDS",
        bounds=(0.1, MAX_IDLE_SECONDS),
    )  # fmt: skip
    logits_processors: tuple[str, ...] = setting(
        (), processor_names,
        "logits processors of other packages beside the installed ones: module:Class, with commas "
        "between", "NAMES",
    )  # fmt: skip
    structured_outputs_backend: str = setting(
        "auto",
        readers.one_of(*STRUCTURED_OUTPUTS_BACKENDS, synonyms={"llguidance": "guidance"}),
        "what keeps an answer to a schema or a grammar: xgrammar, guidance, or what suits it",
        "NAME",
    )  # fmt: skip
    step_trace: Path | None = setting(
        None, readers.path,
        "append a record of every step, and of what became of each request, to this file; "
        "`stratakv trace` reads it", "FILE",
    )  # fmt: skip
    tenant_secret: bytes = setting(
        b"", readers.secret_bytes,
        "separates the cached blocks of tenants; give it by environment or file", "SECRET",
        is_secret=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(options_of(EngineConfig, ""), self)
        if self.offload.enabled and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "--kv-offload finds blocks by their prefix hashes, so it cannot work with "
                "--no-enable-prefix-caching; drop one of them"
            )
        self._check_role()
        taken = next((each for each in self.lora.modules if self.model.has_name(each.name)), None)
        if taken is not None:
            raise ConfigError(
                f"--lora-modules names an adapter {format_value(taken.name)}, which is the name of "
                "the model itself (--served-model-name, or its path); give the adapter another"
            )
        if self.cache.kv_cache_dtype != "auto":
            self._check_kv_cache_dtype()

    def _check_role(self) -> None:
        """Raise ConfigError for a prefill engine whose blocks no other engine can load, and for a
        decode engine that cannot load the blocks of other engines."""
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
        if self.offload.ssd.rounds:
            raise ConfigError(
                f"--kv-offload-ssd-codec {self.offload.ssd.codec} halves blocks of 16 bits, and "
                f"--kv-cache-dtype {name} makes them of 8 already; drop one of them"
            )
