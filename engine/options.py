# SPDX-License-Identifier: Apache-2.0
"""The engine's options by name, as flags and keyword arguments give them, and the EngineConfig.

One table serves `stratakv serve --block-size 32` and `LLM(block_size=32)`. The value objects of
`config.py` check values; here unknown names and contradictions are refused. `settings/` does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..connector.economics import Choice
from ..tiers.admission import FILTERS, known_filters
from ..tiers.policies.choice import POLICIES, known_policies
from ..tiers.settings.format import format_value
from ..tiers.settings.suggestions import did_you_mean
from ..tiers.settings.values import ConfigError
from .config import (
    ATTENTION_BACKENDS,
    BLOCK_HASHES,
    COMPILATIONS,
    DTYPES,
    LOAD_FORMATS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from .models.checkpoint.files import check_directory
from .models.checkpoint.hub import fetch_model, is_hub_id
from .offload_config import DURABILITIES, LOAD_FAILURES, REMOTE, SSD_CODECS, OffloadConfig, has_tier
from .settings import readers
from .settings.not_built import explain_not_built
from .settings.readers import Reader, one_of

EMBEDDED_MODEL = Path(__file__).parent / "models" / "embedded"
EMBEDDED_NAME = "stratakv-embedded"


LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: where it goes and how its value is read."""

    section: str  # "model" | "cache" | "scheduler" | "offload" | "engine" | "server"
    field: str
    read: Reader
    help: str
    metavar: str = ""  # empty: a switch with --no-
    unset: str = "none"  # the default in words, where the value object's says nothing
    is_secret: bool = False


def flag_of(name: str) -> str:
    """`block_size` → `--block-size`."""
    return "--" + name.replace("_", "-")


OPTIONS: Mapping[str, Option] = {
    "served_model_name": Option(
        "model", "served_name", readers.text, "the name clients ask for", "NAME",
        "the directory's name, or the id",
    ),
    "revision": Option(
        "model", "revision", readers.text,
        "branch, tag or commit of a model on the Hub; separates the blocks of otherwise equal "
        "models", "TEXT",
    ),
    "dtype": Option("model", "dtype", one_of(*DTYPES), f"{', '.join(DTYPES)}", "TYPE"),
    "device": Option(
        "model", "device", readers.device, "where to compute: cpu, cuda or one GPU, cuda:1",
        "DEVICE",
    ),
    "attention_backend": Option(
        "model", "attention_backend", one_of(*ATTENTION_BACKENDS),
        "gather (CPU only), kernels, or what suits the device", "NAME",
    ),
    "strict_kernels": Option(
        "model", "strict_kernels", readers.switch,
        "refuse a kernel's slow twin on a GPU instead of warning",
    ),
    "enforce_eager": Option(
        "model", "enforce_eager", readers.switch, "record no decode steps as CUDA graphs"
    ),
    "compilation": Option(
        "model", "compilation", one_of(*COMPILATIONS),
        "elementwise: norms, rotations and activations by torch.compile", "NAME",
    ),
    "load_format": Option(
        "model", "load_format", one_of(*LOAD_FORMATS),
        "dummy: random weights, for which config.json is enough", "NAME",
    ),
    "max_model_len": Option(
        "model", "max_model_len", readers.integer, "longest prompt and output, in tokens", "N",
        "what the model allows and the pool holds",
    ),
    "block_size": Option("cache", "block_size", readers.integer, "tokens in a block", "N"),
    "num_blocks": Option(
        "cache", "num_blocks", readers.integer, "blocks in the KV pool", "N", "from the free memory"
    ),
    "kv_cache_memory_bytes": Option(
        "cache", "memory_bytes", readers.size, "size of the KV pool instead", "SIZE",
        "from the free memory",
    ),
    "gpu_memory_utilization": Option(
        "cache", "gpu_memory_utilization", readers.number,
        "share of a GPU's memory that weights, steps and the KV pool take", "SHARE",
    ),
    "kv_cache_dtype": Option(
        "cache", "kv_cache_dtype", readers.kv_cache_dtype,
        "number type of the KV pool: auto, as --dtype, or fp8_e4m3", "TYPE",
    ),
    "enable_prefix_caching": Option(
        "cache", "enable_prefix_caching", readers.switch, "keep and find blocks by their prefix"
    ),
    "block_hash": Option(
        "cache", "block_hash", one_of(*BLOCK_HASHES), "sha256, sha256_cbor", "NAME"
    ),
    "max_num_batched_tokens": Option(
        "scheduler", "max_num_batched_tokens", readers.integer, "tokens in one step", "N"
    ),
    "max_num_seqs": Option(
        "scheduler", "max_num_seqs", readers.integer, "requests in one step", "N"
    ),
    "long_prefill_token_threshold": Option(
        "scheduler", "long_prefill_token_threshold", readers.integer,
        "most tokens of one prompt in a step; 0 is the whole budget", "N",
    ),
    "enable_chunked_prefill": Option(
        "scheduler", "enable_chunked_prefill", readers.switch, "spread a prompt over several steps"
    ),
    "admit_below": Option(
        "scheduler", "admit_below", readers.number,
        "let requests in while less than this share of the pool is held", "SHARE",
    ),
    "preempt_above": Option(
        "scheduler", "preempt_above", readers.number,
        "send requests back while more than this share of the pool is held", "SHARE",
    ),
    "kv_offload": Option(
        "offload", "tiers", readers.tiers,
        "tiers below the KV pool: cpu or cpu,ssd or cpu,ssd,grpc://host:9400", "TIERS",
    ),
    "kv_offload_policy": Option(
        "offload", "policy", readers.one_of_these_or(POLICIES, known_policies),
        f"what the cpu tier evicts: {', '.join(POLICIES)}, or a policy of a package",
        "NAME",
    ),
    "kv_offload_load": Option(
        "offload", "load", one_of(*[choice.value for choice in Choice]),
        "load what a tier has where that is quicker than computing (auto), always, or in both ways "
        "at once", "NAME",
    ),
    "kv_offload_load_failure": Option(
        "offload", "load_failure", one_of(*LOAD_FAILURES),
        "what a request does whose blocks a tier had and could not bring: recompute them, or fail",
        "NAME",
    ),
    "kv_offload_faults": Option(
        "offload", "faults", readers.text,
        "a drill: faults of the tiers below cpu, on purpose: [TIER:]CALL:KIND=VALUE,…", "LIST",
    ),
    "kv_offload_cpu_bytes": Option(
        "offload", "cpu_bytes", readers.size, "size of the cpu tier", "SIZE"
    ),
    "kv_offload_cpu_huge_pages": Option(
        "offload", "cpu_huge_pages", readers.switch, "take the cpu tier's memory in huge pages"
    ),
    "kv_offload_ssd_path": Option(
        "offload", "ssd_path", readers.path, "directory of the ssd tier", "DIR",
        "~/.cache/stratakv/ssd",
    ),
    "kv_offload_ssd_bytes": Option(
        "offload", "ssd_bytes", readers.size, "size of the ssd tier", "SIZE"
    ),
    "kv_offload_ssd_durability": Option(
        "offload", "ssd_durability", one_of(*DURABILITIES),
        "sync: what was stored outlives a kill and a power cut; async: but for the last 2 seconds",
        "NAME",
    ),
    "kv_offload_ssd_codec": Option(
        "offload", "ssd_codec", one_of(*SSD_CODECS),
        "how blocks are packed on their way to the disk: none, lossless, fp8", "NAME",
    ),
    "kv_offload_ssd_policy": Option(
        "offload", "ssd_policy", readers.one_of_these_or(POLICIES, known_policies),
        f"what the ssd tier evicts: {', '.join(POLICIES)}, or a policy of a package",
        "NAME",
    ),
    "kv_offload_ssd_admission": Option(
        "offload", "ssd_admission", readers.one_of_these_or(FILTERS, known_filters),
        f"which evicted blocks are written: {', '.join(FILTERS)}, or a filter of a package",
        "NAME",
    ),
    "kv_offload_ssd_daily_bytes": Option(
        "offload", "ssd_daily_bytes", readers.size, "most that is written to the ssd in a day",
        "SIZE", "no bound",
    ),
    "kv_offload_ssd_exclusive": Option(
        "offload", "ssd_exclusive", readers.switch,
        "keep a block either in the cpu tier or in the ssd tier",
    ),
    "kv_offload_ssd_mac_key_file": Option(
        "offload", "ssd_mac_key_file", readers.path,
        "file with the key that seals blocks on a disk that others can write", "FILE",
    ),
    "kv_offload_remote_token_file": Option(
        "offload", "remote_token_file", readers.path, "file with the token for cache servers",
        "FILE",
    ),
    "kv_offload_remote_ca_file": Option(
        "offload", "remote_ca_file", readers.path,
        "who signed the certificates of cache servers, as PEM", "FILE", "the system's authorities",
    ),
    "kv_offload_remote_cert_file": Option(
        "offload", "remote_cert_file", readers.path,
        "the engine's certificate for cache servers, as PEM", "FILE",
    ),
    "kv_offload_remote_key_file": Option(
        "offload", "remote_key_file", readers.path, "the key of that certificate, as PEM", "FILE"
    ),
    "kv_offload_remote_server_name": Option(
        "offload", "remote_server_name", readers.text,
        "what the certificates of cache servers say", "NAME", "the host in the address",
    ),
    "kv_offload_remote_tag_key_file": Option(
        "offload", "remote_tag_key_file", readers.path,
        "file with the key of the tags of blocks on cache servers, which no server then can forge",
        "FILE",
    ),
    "kv_offload_tier_options": Option(
        "offload", "tier_options", readers.tier_options,
        "options of tiers that other packages bring: tier.option=value,…", "LIST",
    ),
    "require_tiers": Option(
        "offload", "require_tiers", readers.switch,
        "refuse to start while a tier below cpu is down, instead of going on without it",
    ),
    "num_threads": Option(
        "engine", "num_threads", readers.integer, "threads that compute", "N", "the physical cores"
    ),
    "tenant_secret": Option(
        "engine", "tenant_secret", readers.secret_bytes,
        "separates the cached blocks of tenants; give it by environment or file", "SECRET",
        is_secret=True,
    ),
}  # fmt: skip


def engine_config(
    model: str | Path | None, given: Mapping[str, Any], *, is_fetched: bool = True
) -> EngineConfig:
    """The settings of an engine from the options given; None means the embedded model. A model of
    the Hub is downloaded where it is not in the local cache and `is_fetched`; otherwise the path is
    its id.

    Raises ConfigError for an unknown option, a value that cannot be, or a contradiction.
    """
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None:
            explained = explain_not_built(format_value(name), name)
            near = did_you_mean(name, OPTIONS)
            raise ConfigError(explained or f"there is no option {format_value(name)}{near}")
        sections[option.section][option.field] = option.read(flag_of(name), value)
    _refuse_contradictions(given, sections)
    offload = sections["offload"]
    if "ssd" in offload.get("tiers", ()):
        offload.setdefault("ssd_path", default_ssd_path())
    path = model_directory(model, sections["model"].get("revision", ""), is_fetched=is_fetched)
    typed = "" if model is None else str(model)
    if "served_name" not in sections["model"]:
        sections["model"]["served_name"] = _served_name(typed, path)
    return EngineConfig(
        model=ModelConfig(path, typed_name=typed, **sections["model"]),
        cache=CacheConfig(**sections["cache"]),
        scheduler=SchedulerConfig(**sections["scheduler"]),
        offload=OffloadConfig(**offload),
        **sections["engine"],
    )


_SECTIONS = ("model", "cache", "scheduler", "offload", "engine")


def default_ssd_path() -> Path:
    """Where the ssd tier lies unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return readers.path("XDG_CACHE_HOME", cache) / "stratakv" / "ssd"


def model_directory(
    model: str | Path | None,
    revision: str = "",
    *,
    is_fetched: bool = True,
    needs_weights: bool = True,
) -> Path:
    """The directory of a model: a directory of that name or, for an id such as org/model, where the
    Hub's cache keeps it, downloaded if need be and `is_fetched`. Raises ConfigError where there is
    none."""
    if model is None:
        return EMBEDDED_MODEL
    path = readers.path("MODEL", model)
    if is_hub_id(str(model)) and not os.path.lexists(path):
        if not is_fetched:
            return path
        return fetch_model(str(model), revision, needs_weights=needs_weights)
    check_directory(path)
    return path


def model_aliases(model: str | Path | None, given: Mapping[str, Any]) -> tuple[str, ...]:
    """What else clients may call a model: the path that it was started with, as it was given and in
    full. Nothing where `given` names the model, where it is the embedded one, and for an id of the
    Hub, which is its name already."""
    if model is None or "served_model_name" in given:
        return ()
    if is_hub_id(str(model)) and not os.path.lexists(model):
        return ()
    return tuple(dict.fromkeys((str(model), os.path.abspath(model))))


def _served_name(typed: str, path: Path) -> str:
    """What clients call a model that was given no name."""
    if not typed:
        return EMBEDDED_NAME
    if is_hub_id(typed) and not os.path.lexists(typed):
        return typed
    return readers.text(flag_of("served_model_name"), path.resolve().name)


def _refuse_contradictions(
    given: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> None:
    tiers = sections["offload"].get("tiers", ())
    for tier, wanted in (("cpu", "cpu"), ("ssd", "cpu,ssd"), (REMOTE, "cpu,grpc://host:9400")):
        for name in given:
            if name.startswith(f"kv_offload_{tier}_") and not has_tier(tiers, tier):
                what = "no cache server is" if tier == REMOTE else f"{tier} is not"
                raise ConfigError(
                    f"{flag_of(name)} is given but {what} in --kv-offload; add "
                    f"--kv-offload {wanted} or drop it"
                )
    if "num_blocks" in given and "kv_cache_memory_bytes" in given:
        raise ConfigError(
            "--num-blocks and --kv-cache-memory-bytes both set the size of the KV pool; give one"
        )
    chunked = sections["scheduler"].get("enable_chunked_prefill", True)
    if not chunked and sections["scheduler"].get("long_prefill_token_threshold"):
        raise ConfigError(
            "--long-prefill-token-threshold spreads prompts over steps, which "
            "--no-enable-chunked-prefill forbids; drop one of them"
        )
