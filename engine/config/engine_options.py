# SPDX-License-Identifier: Apache-2.0
"""The engine's options by name, as flags and keyword arguments give them, and the EngineConfig.

One table serves `stratakv serve --block-size 32` and `LLM(block_size=32)`. The value objects of
`engine_config.py` check values; here unknown names and contradictions are refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import Option, build_settings, flag_of
from ...tiers.settings.readers import one_of
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ...tiers.tier_settings import REMOTE
from ..models.checkpoint.files import check_directory
from ..models.checkpoint.hub import fetch_model, is_hub_id
from .engine_config import (
    ATTENTION_BACKENDS,
    BLOCK_HASHES,
    COMPILATIONS,
    DTYPES,
    EXECUTORS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    POOLINGS,
    RESERVES,
    ROLES,
    STRUCTURED_OUTPUTS_BACKENDS,
    EngineConfig,
    ModelConfig,
)
from .offload_config import OFFLOAD_OPTIONS, has_tier
from .unsupported_options import explain_not_built

EMBEDDED_MODEL = Path(__file__).parents[1] / "models" / "embedded"
EMBEDDED_NAME = "stratakv-embedded"


_MAX_MARK_CHARACTERS = 256


def _mark(called: str, value: Any) -> str:
    """A text of a model, which may have line breaks in it."""
    text = value if isinstance(value, str) else ""
    lines = readers.text(called, text.replace("\n", " ").replace("\r", " "))
    if len(lines) > _MAX_MARK_CHARACTERS:
        raise ConfigError(
            f"{called} takes a text of up to {_MAX_MARK_CHARACTERS} characters, not {len(lines)}"
        )
    return text


def _read_processors(called: str, value: Any) -> tuple[str, ...]:
    """`module:Class`, several with commas between, as a list of them, or of classes."""
    items = value if isinstance(value, list | tuple) else [] if value is None else [value]
    names: list[str] = []
    for item in items:
        if isinstance(item, type):
            names.append(_importable(called, item))
        elif not isinstance(item, str):
            raise ConfigError(f"{called} takes module:Class or classes, not {format_value(item)}")
        elif item.strip():
            names.extend(readers.texts(called, item))
    for name in names:
        module, _, path = name.partition(":")
        parts = [*module.split("."), *path.split(".")]
        if not all(part.isidentifier() for part in parts):
            raise ConfigError(
                f"{called} takes module:Class, such as mypackage.processors:NoRepeat, not "
                f"{format_value(name)}"
            )
    return tuple(names)


def _importable(called: str, kind: type) -> str:
    """The name by which another process finds this class."""
    found: Any = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise ConfigError(
            f"{called} holds {kind.__module__}.{kind.__qualname__}, which cannot be found by that "
            "name; define the class at the top of a module"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


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
        "gather (CPU only), kernels, triton, sdpa or fa3 (that library for long chunks), or what "
        "suits the device", "NAME",
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
    "reasoning_start": Option(
        "model", "reasoning_start", _mark,
        "the text before a thought of the model, such as <think>; none: answers are not split",
        "TEXT", "found in the tokenizer",
    ),
    "reasoning_end": Option(
        "model", "reasoning_end", _mark, "the text behind a thought, such as </think>", "TEXT",
        "found in the tokenizer",
    ),
    "pooling": Option(
        "model", "pooling", one_of(*POOLINGS),
        "the embedding of a prompt: the hidden state of its last token, or the mean of all", "NAME",
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
        "cache", "kv_cache_dtype", one_of(*KV_CACHE_DTYPES, synonyms={"fp8": "fp8_e4m3"}),
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
    **{
        name: replace(option, section=f"offload.{option.section}".rstrip("."))
        for name, option in OFFLOAD_OPTIONS.items()
    },
    "num_threads": Option(
        "", "num_threads", readers.integer, "threads that compute", "N", "the physical cores"
    ),
    "distributed_executor_backend": Option(
        "", "executor", one_of(*EXECUTORS),
        "uni: the model runs in the engine core's process; mp: in one of its own", "NAME",
    ),
    "role": Option(
        "", "role", one_of(*ROLES),
        "prefill: answer when others can load the prompt's blocks; decode: load what others have "
        "computed, to the last token", "NAME",
    ),
    "async_scheduling": Option(
        "", "async_scheduling", readers.switch,
        "on a GPU, or with --distributed-executor-backend mp: make the next step while one is "
        "computed",
    ),
    "logits_processors": Option(
        "", "logits_processors", _read_processors,
        "logits processors of other packages beside the installed ones: module:Class, with commas "
        "between", "NAMES",
    ),
    "structured_outputs_backend": Option(
        "", "structured_outputs_backend",
        one_of(*STRUCTURED_OUTPUTS_BACKENDS, synonyms={"llguidance": "guidance"}),
        "what keeps an answer to a schema or a grammar: xgrammar, guidance, or what suits it",
        "NAME",
    ),
    "scheduling_policy": Option(
        "scheduler", "policy", readers.text,
        "who runs next: fcfs, first come, first served; priority, by the requests' `priority`, the "
        "lowest first; or a policy of another package", "NAME",
    ),
    "reserve": Option(
        "scheduler", "reserve", one_of(*RESERVES),
        "let a request in only if the pool has room for its prompt (prompt), or for all the tokens "
        "that it may come to (full), beside what those before it may still take", "WHAT",
    ),
    "pin_tenant_share": Option(
        "scheduler", "pin_tenant_share", readers.number,
        "of the blocks that continuum keeps for agents' jobs, those that it keeps for one tenant "
        "at most", "SHARE",
    ),
    "step_trace": Option(
        "", "step_trace", readers.path,
        "append a record of every step, and of what became of each request, to this file; "
        "`stratakv trace` reads it", "FILE",
    ),
    "tenant_secret": Option(
        "", "tenant_secret", readers.secret_bytes,
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
    if "ssd" in sections["offload"].get("tiers", ()) and "path" not in sections["offload.ssd"]:
        # Only then: a user without a home directory has none.
        sections["offload.ssd"]["path"] = default_ssd_path()
    path = model_directory(model, sections["model"].get("revision", ""), is_fetched=is_fetched)
    typed = "" if model is None else str(model)
    if "served_name" not in sections["model"]:
        sections["model"]["served_name"] = _served_name(typed, path)
    model_config = ModelConfig(path, **sections["model"])
    return build_settings(EngineConfig, sections, model=model_config)


_SECTIONS = {option.section for option in OPTIONS.values()}


def default_ssd_path() -> Path:
    """The default folder of the ssd tier. Raises ConfigError where this user has none."""
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        cache = os.path.expanduser("~/.cache")
        if not os.path.isabs(cache):
            raise ConfigError(
                f"user {os.geteuid()} has no home directory for the default place of the ssd tier; "
                "name one with --kv-offload-ssd-path, or set HOME or XDG_CACHE_HOME"
            )
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
    """Other names that clients may use for a model: the path that it was started with, as it was
    given and in full. Nothing where `given` names the model, where it is the embedded one, and for
    an id of the Hub, which is its name already."""
    if model is None or "served_model_name" in given:
        return ()
    if is_hub_id(str(model)) and not os.path.lexists(model):
        return ()
    return tuple(dict.fromkeys((str(model), os.path.abspath(model))))


def _served_name(typed: str, path: Path) -> str:
    """The name of a model that was given none."""
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
    for prefix, needed, wanted in (
        ("kv_serve_", "serve_at", "--kv-serve HOST:PORT"),
        ("kv_peers_", "peers", "--kv-peers grpc://host:9500"),
    ):
        for name in given:
            if name.startswith(prefix) and not sections["offload"].get(needed):
                raise ConfigError(
                    f"{flag_of(name)} is given and {wanted.split()[0]} is not; add {wanted} or "
                    "drop it"
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
