# SPDX-License-Identifier: Apache-2.0
"""The engine's options by name, and the EngineConfig made from given options.

One table, `OPTIONS`, defines both `stratakv serve --block-size 32` and `LLM(block_size=32)`. The
table is built from the fields of the dataclasses in `engine_config.py`, which check values. This
module refuses unknown names and contradictory options, and finds options without effect."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...tiers.remote.membership import is_address
from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.option import Option, build_settings, flag_of, options_of
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ...tiers.tier_settings import REMOTE
from ..models.checkpoint.files import check_directory
from ..models.checkpoint.hub import fetch_model, is_hub_id
from .engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from .lora_config import LoraConfig
from .offload_config import OFFLOAD_OPTIONS, OFFLOAD_TIERS
from .speculative_config import DRAFT_MODEL, EAGLE, OF_MODELS, SpeculativeConfig
from .unsupported_options import explain_not_built

EMBEDDED_MODEL = Path(__file__).parents[1] / "models" / "embedded"
EMBEDDED_NAME = "stratakv-embedded"
_POOL_SIZES = ("num_blocks", "kv_cache_memory_bytes")
_OF_SPECULATION = tuple(options_of(SpeculativeConfig, ""))[1:]  # without `speculative_method`
_ADAPTER_SOURCES = {"enable_lora", "lora_modules", "lora_dir"}
_OF_ADAPTERS = ("max_loras", "max_lora_rank", "max_cpu_loras")
_OF_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
_SHOWN_LATE = ("scheduling_policy", "reserve", "pin_tenant_share")


def _engine_options() -> dict[str, Option]:
    """Return the options in the order of the help text, each with its path below EngineConfig."""
    own, scheduler = options_of(EngineConfig, ""), options_of(SchedulerConfig, "scheduler")
    last = [scheduler.pop(name) for name in _SHOWN_LATE]
    files = {name: own.pop(name) for name in ("step_trace", "tenant_secret")}
    return {
        **options_of(ModelConfig, "model"),
        **options_of(CacheConfig, "cache"),
        **scheduler,
        **{
            name: replace(option, section=f"offload.{option.section}".rstrip("."))
            for name, option in OFFLOAD_OPTIONS.items()
        },
        **options_of(SpeculativeConfig, "speculative"),
        **options_of(LoraConfig, "lora"),
        **own,
        **dict(zip(_SHOWN_LATE, last, strict=True)),
        **files,
    }


OPTIONS: Mapping[str, Option] = _engine_options()


def engine_config(
    model: str | Path | None, given: Mapping[str, Any], *, is_fetched: bool = True
) -> EngineConfig:
    """Return the settings of an engine with the given options. If `model` is None, the engine has
    the embedded model. A Hub model that the local cache lacks is downloaded; with `is_fetched`
    False, the model's id becomes the model's path instead.

    Raises ConfigError for an unknown option, an invalid value, or a contradiction."""
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
        # The default path exists only for a user with a home directory.
        sections["offload.ssd"]["path"] = default_ssd_path()
    path = model_directory(model, sections["model"].get("revision", ""), is_fetched=is_fetched)
    if draft := sections["speculative"].get("model"):
        from ..models.eagle.eagle_spec import (
            is_eagle_head,
        )  # imported here, because a router must not import code that reads tensors

        directory = model_directory(draft, is_fetched=is_fetched)
        kind = EAGLE if is_eagle_head(directory) else DRAFT_MODEL
        sections["speculative"].setdefault("method", kind)
        sections["speculative"]["model"] = directory
    typed = "" if model is None else str(model)
    if "served_name" not in sections["model"]:
        sections["model"]["served_name"] = _served_name(typed, path)
    model_config = ModelConfig(path, **sections["model"])
    return build_settings(EngineConfig, sections, model=model_config)


_SECTIONS = {option.section for option in OPTIONS.values()}


def has_tier(tiers: Iterable[str], tier: str) -> bool:
    return any(map(is_address, tiers)) if tier == REMOTE else tier in tiers


def hides(name: str, value: Any) -> Iterator[str]:
    """Yield the names of the options that have no effect if the option `name` has the `value`."""
    if name in _POOL_SIZES:
        yield from (other for other in _POOL_SIZES if other != name)
    elif name == "speculative_method":
        if value == "none":
            yield from _OF_SPECULATION
        else:
            yield from _OF_LOOKUP if value in OF_MODELS else ("speculative_model",)
    elif name == "kv_offload":
        for tier in (*OFFLOAD_TIERS, REMOTE):
            if not has_tier(value, tier):
                yield from (other for other in OPTIONS if other.startswith(f"kv_offload_{tier}_"))


def without_effect(engine: EngineConfig) -> Iterator[str]:
    """Yield the names of the options that have no effect with these settings."""
    if engine.cache.num_blocks is not None:
        yield from hides("num_blocks", engine.cache.num_blocks)
    yield from hides("speculative_method", engine.speculative.method)
    if not engine.lora.num_slots:
        yield from _OF_ADAPTERS
    offload = engine.offload
    yield from hides("kv_offload", offload.tiers)
    for name, value in (("kv_peers", offload.peers), ("kv_serve", offload.serve_at)):
        if not value:
            yield from (other for other in OPTIONS if other.startswith(f"{name}_"))


def default_ssd_path() -> Path:
    """Return the default folder of the ssd tier. Raises ConfigError for a user without a home."""
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
    """Return the directory of a model. `model` is a path, or a Hub id such as org/model, whose
    directory is in the Hub's cache; a model that the cache lacks is downloaded. With `is_fetched`
    False, an id is returned unchanged. Raises ConfigError if the directory does not exist."""
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
    """Return a model's additional names for clients: its path as given, and its absolute path. A
    model has no additional names if `given` sets `served_model_name`, if it is the embedded model,
    or if a Hub id names the model, because the Hub id is the served name."""
    if model is None or "served_model_name" in given:
        return ()
    if is_hub_id(str(model)) and not os.path.lexists(model):
        return ()
    return tuple(dict.fromkeys((str(model), os.path.abspath(model))))


def _served_name(typed: str, path: Path) -> str:
    """Return the default of `served_model_name`, the model's name in requests of clients."""
    if not typed:
        return EMBEDDED_NAME
    if is_hub_id(typed) and not os.path.lexists(typed):
        return typed
    return readers.text(flag_of("served_model_name"), path.resolve().name)


def _refuse_contradictions(
    given: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> None:
    tiers = sections["offload"].get("tiers", ())
    for tier in (*OFFLOAD_TIERS, REMOTE):
        wanted = {"cpu": "cpu", REMOTE: "cpu,grpc://host:9400"}.get(tier, f"cpu,{tier}")
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
    speculative = sections["speculative"]
    method = speculative.get("method", DRAFT_MODEL if speculative.get("model") else "none")
    for name in hides("speculative_method", method):
        if name in given and name != "speculative_model":
            why = "no drafts are proposed" if method == "none" else "a draft model proposes"
            raise ConfigError(
                f"{flag_of(name)} is given and {why}; add --speculative-method ngram or drop it"
            )
    if not given.keys() & _ADAPTER_SOURCES:
        for name in _OF_ADAPTERS:
            if name in given:
                raise ConfigError(
                    f"{flag_of(name)} is given and no adapters are taken; add --lora-modules "
                    "NAME=PATH, --lora-dir or --enable-lora, or drop it"
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
