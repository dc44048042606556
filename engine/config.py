# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine: a few frozen value objects with units in their names.

Knows nothing of command lines or HTTP; `cli/` builds these. Each object checks itself and raises
ConfigError with what was expected, what came and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..connector.economics import Choice
from ..tiers.admission import DEFAULT_FILTER, FILTERS
from ..tiers.drill import Drill, parse_drill
from ..tiers.errors import TierConfigError
from ..tiers.policies.choice import DEFAULT_POLICY, POLICIES
from ..tiers.registry import installed_tiers
from ..tiers.remote.address import DEFAULT_PORT, ServerAddress, is_address, parse_address
from .nearest import did_you_mean
from .shown import shown

MIB = 1024**2
GIB = 1024**3

_UNITS: Mapping[str, int] = {
    "": 1, "b": 1,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_DEVICE = re.compile(r"cpu|cuda(?::\d{1,3})?")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

REMOTE = "remote"  # the tier that cache servers are together
OFFLOAD_TIERS = ("cpu", "ssd")  # beside those that other packages bring
DURABILITIES = ("sync", "async")
LOAD_FAILURES = ("recompute", "fail")
SSD_CODECS = ("none", "lossless", "fp8")
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "gather", "kernels")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
COMPILATIONS = ("none", "elementwise")
BLOCK_HASHES = ("sha256", "sha256_cbor")
DEFAULT_POOL_BYTES = 1 * GIB  # on the CPU
DEFAULT_GPU_SHARE = 0.9
MAX_BLOCK_SIZE = 256
# Far above what any machine can use, and small enough for every table that is made of them.
MAX_SIZE_BYTES = 2**60
MAX_BLOCKS = 2**24
MAX_SEQS = 2**16
MAX_TOKENS = 2**24
MAX_WAITING = 2**24
MAX_THREADS = 1024


class ConfigError(ValueError):
    """A setting that cannot work. The message is one sentence with cause and cure."""


def parse_size(text: str | int, name: str = "size") -> int:
    """Bytes from `512MiB`, `20GiB`, `1.5GB`, `4096`; raises ConfigError naming `name`."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("", "?")
    if unit.lower() not in _UNITS:
        raise ConfigError(
            f"{name} takes a number of bytes with an optional unit such as 512MiB or 20GiB, "
            f"not {shown(text)}"
        )
    size = float(number) * _UNITS[unit.lower()]
    if size > MAX_SIZE_BYTES:  # also what is too large for a float
        raise ConfigError(f"{name} must be at most {show_size(MAX_SIZE_BYTES)}, not {text[:40]}")
    return int(size)


def show_size(size_bytes: int) -> str:
    """Bytes as a flag takes them, exactly: `512MiB`, or `1000 bytes` where no unit divides it."""
    for unit, factor in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB)):
        if 0 < size_bytes <= MAX_SIZE_BYTES and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{shown(size_bytes)} bytes"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is computed."""

    path: Path  # a Hugging Face directory
    served_name: str
    revision: str = ""  # separates the cached blocks of otherwise equal models
    dtype: str = "auto"  # on the CPU, auto is float32
    max_model_len: int | None = None  # None: what the model allows
    device: str = "cpu"  # or cuda, or one of several GPUs: cuda:1
    attention_backend: str = "auto"
    strict_kernels: bool = False  # refuse what is slow on a GPU
    enforce_eager: bool = False  # record no decode steps
    compilation: str = "none"
    load_format: str = "auto"  # dummy: random weights, for benchmarks

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        check_device("--device", self.device)
        _one_of("--attention-backend", self.attention_backend, ATTENTION_BACKENDS)
        _one_of("--compilation", self.compilation, COMPILATIONS)
        _one_of("--load-format", self.load_format, LOAD_FORMATS)
        if self.attention_backend == "gather" and self.device != "cpu":
            raise ConfigError(
                f"--attention-backend gather computes on the CPU and --device is {self.device}; "
                "drop it"
            )
        if self.max_model_len is not None:
            # One token to read and one to answer with.
            _within("--max-model-len", self.max_model_len, 2, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool. `num_blocks` wins over `memory_bytes` where both are given; with neither it is
    `DEFAULT_POOL_BYTES` on the CPU, and what the share of its memory leaves on a GPU."""

    block_size: int = 16  # tokens
    memory_bytes: int | None = None
    num_blocks: int | None = None
    kv_cache_dtype: str = "auto"  # that of the computation
    gpu_memory_utilization: float = DEFAULT_GPU_SHARE  # weights, steps and the pool together
    enable_prefix_caching: bool = True
    block_hash: str = "sha256"
    watermark: float = 0.01  # fraction of blocks kept free when admitting requests

    def __post_init__(self) -> None:
        size = self.block_size
        if not 1 <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise ConfigError(
                f"--block-size takes a power of two from 1 to {MAX_BLOCK_SIZE}, not {shown(size)}"
            )
        if self.num_blocks is not None:
            _within("--num-blocks", self.num_blocks, 2, MAX_BLOCKS)
        if self.memory_bytes is not None:
            _size_within("--kv-cache-memory-bytes", self.memory_bytes, 1)
        _one_of("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                "--gpu-memory-utilization takes a share above 0 and up to 1, not "
                f"{self.gpu_memory_utilization}"
            )
        _one_of("--block-hash", self.block_hash, BLOCK_HASHES)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"the watermark is a fraction in [0, 1), not {self.watermark}")

    @property
    def pool_bytes(self) -> int:
        """The size of the pool where it is not sized by blocks or by a GPU's memory."""
        return DEFAULT_POOL_BYTES if self.memory_bytes is None else self.memory_bytes


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

    def __post_init__(self) -> None:
        _within("--max-num-batched-tokens", self.max_num_batched_tokens, 1, MAX_TOKENS)
        _within("--max-num-seqs", self.max_num_seqs, 1, MAX_SEQS)
        threshold = self.long_prefill_token_threshold
        _within("--long-prefill-token-threshold", threshold, 0, MAX_TOKENS)
        _within("the number of waiting requests", self.max_waiting_requests, 1, MAX_WAITING)
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
        if self.admit_below > self.preempt_above:
            raise ConfigError(
                f"--admit-below {self.admit_below} lets requests in where --preempt-above "
                f"{self.preempt_above} sends them back; raise the second or lower the first"
            )


def has_tier(tiers: Iterable[str], tier: str) -> bool:
    """Whether a tier is among those that `--kv-offload` names."""
    return any(map(is_address, tiers)) if tier == REMOTE else tier in tiers


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """The tiers below the pool."""

    tiers: tuple[str, ...] = ()
    policy: str = DEFAULT_POLICY
    load: str = Choice.AUTO.value
    load_failure: str = "recompute"
    faults: str = ""  # of the tiers below cpu, on purpose; see tiers/drill.py
    cpu_bytes: int = 4 * GIB
    cpu_huge_pages: bool = False
    ssd_path: Path | None = None
    ssd_bytes: int = 20 * GIB
    ssd_durability: str = "sync"
    ssd_codec: str = "none"
    ssd_admission: str = DEFAULT_FILTER
    ssd_daily_bytes: int | None = None
    ssd_exclusive: bool = False
    # Of cache servers, whose addresses stand among the tiers.
    remote_token_file: Path | None = None
    remote_ca_file: Path | None = None
    remote_cert_file: Path | None = None
    remote_key_file: Path | None = None
    remote_server_name: str | None = None
    # For tiers that other packages bring: tier → option → value.
    tier_options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    io_threads: int = 8
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        self._check_tiers()
        if "ssd" in self.tiers and self.ssd_path is None:
            raise ConfigError("the ssd tier needs --kv-offload-ssd-path DIR")
        _one_of("--kv-offload-policy", self.policy, tuple(POLICIES))
        _one_of("--kv-offload-load", self.load, tuple(choice.value for choice in Choice))
        _one_of("--kv-offload-load-failure", self.load_failure, LOAD_FAILURES)
        self._check_faults()
        _one_of("--kv-offload-ssd-durability", self.ssd_durability, DURABILITIES)
        _one_of("--kv-offload-ssd-codec", self.ssd_codec, SSD_CODECS)
        _one_of("--kv-offload-ssd-admission", self.ssd_admission, tuple(FILTERS))
        _size_within("--kv-offload-cpu-bytes", self.cpu_bytes, 1 * MIB)
        _size_within("--kv-offload-ssd-bytes", self.ssd_bytes, 16 * MIB)
        if self.ssd_daily_bytes is not None:
            _size_within("--kv-offload-ssd-daily-bytes", self.ssd_daily_bytes, 1 * MIB)
        _within("the number of I/O threads", self.io_threads, 1, MAX_THREADS)
        others = [tier for tier in self.tiers if tier not in OFFLOAD_TIERS]
        if self.ssd_codec == "fp8" and others:
            raise ConfigError(
                "--kv-offload-ssd-codec fp8 loses precision, and from the cpu tier such blocks "
                f"reach {', '.join(others)}; use lossless or none beside other tiers"
            )
        for tier in self.tier_options:
            if tier not in self.other_tiers:
                raise ConfigError(
                    f"--kv-offload-tier-options sets options of {shown(tier)}, which is no tier of "
                    "another package in --kv-offload; add it there or drop the options"
                )

    @property
    def enabled(self) -> bool:
        return bool(self.tiers)

    @property
    def other_tiers(self) -> tuple[str, ...]:
        """The tiers that other packages bring."""
        return tuple(
            tier for tier in self.tiers if tier not in OFFLOAD_TIERS and not is_address(tier)
        )

    @property
    def cache_servers(self) -> tuple[ServerAddress, ...]:
        """The cache servers that are one tier together, the last one."""
        return tuple(parse_address(tier) for tier in self.tiers if is_address(tier))

    @property
    def store_names(self) -> tuple[str, ...]:
        """The tiers below the slab, as metrics and drills call them."""
        named = tuple(tier for tier in self.tiers[1:] if not is_address(tier))
        return (*named, REMOTE) if self.cache_servers else named

    @property
    def drill(self) -> Drill | None:
        """The faults to inject; None where none were asked for."""
        return parse_drill(self.faults, self.store_names) if self.faults else None

    def _check_faults(self) -> None:
        try:
            _ = self.drill
        except TierConfigError as error:
            raise ConfigError(f"--kv-offload-faults {shown(self.faults)}: {error}") from error

    def _check_tiers(self) -> None:
        given = ",".join(self.tiers)
        known = (*OFFLOAD_TIERS, *(installed_tiers() if self.other_tiers else ()))
        for tier in self.tiers:
            if tier not in known and not is_address(tier):
                near = did_you_mean(tier, known)
                raise ConfigError(
                    "--kv-offload takes cpu or cpu,ssd, and addresses of cache servers such as "
                    f"grpc://host:{DEFAULT_PORT}, not {shown(given)}{near}; "
                    f"installed tiers: {', '.join(known)}"
                )
        try:
            servers = self.cache_servers
        except TierConfigError as error:
            raise ConfigError(f"--kv-offload {shown(given)}: {error}") from error
        if len(set(self.tiers)) != len(self.tiers):
            raise ConfigError(f"--kv-offload names a tier twice: {given}; name each once")
        if self.tiers and "cpu" not in self.tiers:
            raise ConfigError(
                f"--kv-offload {given} needs the CPU tier that blocks pass through; use cpu,{given}"
            )
        right = [tier for tier in OFFLOAD_TIERS if tier in self.tiers]
        right += [*self.other_tiers, *(tier for tier in self.tiers if is_address(tier))]
        if right[:2] != list(self.tiers[:2]) or right[-len(servers) :] != list(
            self.tiers[-len(servers) :]
        ):
            raise ConfigError(
                f"--kv-offload names the tiers from the pool down; use {','.join(right)}, "
                f"not {given}"
            )
        if len({server.tls for server in servers}) > 1:
            raise ConfigError(
                f"--kv-offload {given} names cache servers with and without TLS; use grpcs:// for "
                "all of them, or grpc:// for all"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine core needs."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    tenant_secret: bytes = field(default=b"", repr=False)  # separates the blocks of tenants
    num_threads: int | None = None  # None: the physical cores

    def __post_init__(self) -> None:
        if self.offload.enabled and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "--kv-offload finds blocks by their prefix hashes, so it cannot work with "
                "--no-enable-prefix-caching; drop one of them"
            )
        if self.cache.kv_cache_dtype != "auto":
            self._check_kv_cache_dtype()
        if self.num_threads is not None:
            _within("--num-threads", self.num_threads, 1, MAX_THREADS)

    def _check_kv_cache_dtype(self) -> None:
        name = self.cache.kv_cache_dtype
        if self.model.attention_backend == "gather":
            raise ConfigError(
                f"--attention-backend gather cannot read --kv-cache-dtype {name}; use kernels"
            )
        if self.offload.ssd_codec == "fp8":
            raise ConfigError(
                f"--kv-offload-ssd-codec fp8 halves blocks of 16 bits, and --kv-cache-dtype {name} "
                "makes them of 8 already; drop one of them"
            )


def check_device(called: str, value: str) -> str:
    """`cpu`, `cuda` or `cuda:1`; raises ConfigError for anything else, several GPUs among it."""
    if _DEVICE.fullmatch(value):
        return value
    if value.startswith("cuda") and ("," in value or "+" in value):
        raise ConfigError(
            f"{called} {shown(value)} names several GPUs, and an engine computes on one; name one, "
            "as cuda:0, and start an engine for each"
        )
    near = did_you_mean(value, ("cpu", "cuda"))
    raise ConfigError(f"{called} takes cpu or cuda (or cuda:1, …), not {shown(value)}{near}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} takes {' or '.join(known)}, not {shown(value)}")


def _within(name: str, value: int, low: int, high: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, not {shown(value)}")
    if value > high:
        raise ConfigError(f"{name} must be at most {high}, not {shown(value)}")


def _size_within(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {show_size(low)}, not {show_size(value)}")
    if value > MAX_SIZE_BYTES:
        raise ConfigError(
            f"{name} must be at most {show_size(MAX_SIZE_BYTES)}, not {show_size(value)}"
        )
