# SPDX-License-Identifier: Apache-2.0
"""vLLM's names of options, accepted as flags and in files, so that vLLM's command lines work here.

Each name of vLLM stands for an option of StrataKV, or is accepted only with values that change
nothing, or is refused with a reason and a remedy. The log notes options without an effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.sizes import MAX_SIZE_BYTES
from ...tiers.settings.values import GIB, ConfigError
from ..request.logprobs import MAX_LOGPROBS
from .engine_config import POOLINGS
from .option_readers import media_domains
from .speculative_config import METHODS

_ONE_DEVICE = "the engine computes on one device, and models over several are not built"
_POOLING_TYPES = ("pooling_type", "seq_pooling_type")
_ALWAYS_ON = ("normalize", "use_activation")
_MAX_GIB = MAX_SIZE_BYTES // GIB
_SPECULATIVE_NAMES = {
    "method": "speculative_method",
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
}


@dataclass(frozen=True, slots=True)
class Meaning:
    """The options of StrataKV, with parsed values, that an alias with a value stands for."""

    values: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)  # values if no layer sets the option
    note: str = ""  # a line for the log about an option without effect


Translate = Callable[[str, Any], Meaning]  # arguments: the option as the user wrote it, the value


@dataclass(frozen=True, slots=True)
class Alias:
    translate: Translate
    metavar: str = ""  # empty: a switch, which also exists with the prefix --no-
    is_server: bool = False  # True: a flag of `serve` only, not of `generate`


_NOTHING = Meaning()


def _renamed(name: str, read: readers.Reader) -> Translate:
    return lambda called, value: Meaning({name: read(called, value)})


def _only(*neutral: str, way: str) -> Translate:
    """Accept the `neutral` values, which StrataKV fulfils anyway, and refuse all other values."""

    def translate(called: str, value: Any) -> Meaning:
        if readers.word(value) not in neutral:
            known = " or ".join(neutral)
            raise ConfigError(f"{called} takes {known} here, not {format_value(value)}; {way}")
        return _NOTHING

    return translate


def _refused(way: str) -> Translate:
    """Refuse every value that does not switch the feature off, as "false" does."""

    def translate(called: str, value: Any) -> Meaning:
        if readers.word(value) in ("0", "0.0", "false", "no", "off"):
            return _NOTHING
        raise ConfigError(f"{called} is not taken: {way}")

    return translate


def _without_effect(read: readers.Reader, reason: str) -> Translate:
    def translate(called: str, value: Any) -> Meaning:
        read(called, value)
        return Meaning(note=f"{called} has no effect: {reason}")

    return translate


def _offloading_size(called: str, value: Any) -> Meaning:
    """Read the size of the cpu tier in GiB; the option also turns this tier on."""
    gibibytes = readers.number(called, value)
    if not 0 < gibibytes <= _MAX_GIB:
        raise ConfigError(
            f"{called} takes GiB above 0 and up to {_MAX_GIB}, not {format_value(value)}"
        )
    return Meaning({"kv_offload_cpu_bytes": int(gibibytes * GIB)}, implied={"kv_offload": ("cpu",)})


def _no_log_stats(called: str, value: Any) -> Meaning:
    return Meaning({"log_stats": not readers.switch(called, value)})


def _pooler_config(called: str, value: Any) -> Meaning:
    """Read vLLM's pooler configuration, of which only the pooling type is supported."""
    rest = _object_of(value) or {}
    kinds = {str(rest.pop(name, None)).lower() for name in _POOLING_TYPES if name in rest}
    is_neutral = all(name in _ALWAYS_ON and on is True for name, on in rest.items())
    if len(kinds) != 1 or not kinds <= set(POOLINGS) or not is_neutral:
        raise ConfigError(
            f'{called} takes {{"pooling_type": "LAST"}} or {{"pooling_type": "MEAN"}} here, not '
            f"{format_value(value)}; vectors are normalised unless a request wants them not"
        )
    return Meaning({"pooling": kinds.pop()})


def _speculative_config(called: str, value: Any) -> Meaning:
    """Read vLLM's object for speculative decoding with n-grams, suffixes or a draft model."""
    given = _object_of(value)
    if given is None or not given.keys() & {"method", "model"}:
        raise ConfigError(
            f'{called} takes an object such as {{"method": "ngram", "num_speculative_tokens": 8}}, '
            f"not {format_value(value)}"
        )
    known = METHODS[1:]
    if given.get("method") is None:
        given.pop("method", None)  # the model determines the method
    elif given["method"] not in known:
        raise ConfigError(
            f"{called} takes {' or '.join(known)} as its method here, not "
            f"{format_value(given['method'])}: drafts of such heads are not built"
        )
    if given.get("draft_tensor_parallel_size") == 1:  # an engine of StrataKV has one device
        del given["draft_tensor_parallel_size"]
    if others := given.keys() - _SPECULATIVE_NAMES.keys():
        raise ConfigError(
            f"{called} takes {', '.join(_SPECULATIVE_NAMES)} here, and no "
            f"{format_value(min(others, key=str))}"
        )
    bounds = [name for name in ("prompt_lookup_min", "prompt_lookup_max") if name in given]
    if len(bounds) == 1:  # as in vLLM, a single given bound is the minimum and the maximum
        given |= dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), given[bounds[0]])
    return Meaning({_SPECULATIVE_NAMES[name]: value for name, value in given.items()})


def _object_of(value: Any) -> dict[str, Any] | None:
    """Return a new dict from a JSON text or a dict; None for any other value."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return dict(value) if isinstance(value, dict) else None


ALIASES: Mapping[str, Alias] = {
    "kv_offloading_size": Alias(_offloading_size, "GIB"),
    "kv_offloading_backend": Alias(
        _only("native", way="the tiers are StrataKV's own; say --kv-offload cpu or cpu,ssd"), "NAME"
    ),
    "num_gpu_blocks_override": Alias(_renamed("num_blocks", readers.integer), "N"),
    "prefix_caching_hash_algo": Alias(
        _renamed("block_hash", readers.one_of("sha256", "sha256_cbor")), "NAME"
    ),
    "guided_decoding_backend": Alias(
        _renamed("structured_outputs_backend", readers.one_of("auto", "xgrammar", "guidance")),
        "NAME",
    ),
    "pooler_config": Alias(_pooler_config, "JSON"),
    "override_pooler_config": Alias(_pooler_config, "JSON"),
    "speculative_config": Alias(_speculative_config, "JSON"),
    "tensor_parallel_size": Alias(_only("1", way=_ONE_DEVICE), "N"),
    "pipeline_parallel_size": Alias(_only("1", way=_ONE_DEVICE), "N"),
    "tokenizer_mode": Alias(
        _only("auto", way="the tokenizer is the model's tokenizer.json"), "NAME"
    ),
    "trust_remote_code": Alias(
        _refused("no code of model repositories is run; leave it out, or use a built-in model")
    ),
    "swap_space": Alias(
        _refused("blocks go to a tier below the KV pool; say --kv-offload cpu"), "GIB"
    ),
    "kv_transfer_config": Alias(
        _refused("the tiers are configured by options; say --kv-offload cpu,ssd"), "JSON"
    ),
    "seed": Alias(
        _only("0", way="every request brings its own seed; send `seed` with it"),
        "N",
        is_server=True,
    ),
    "max_logprobs": Alias(
        _only(str(MAX_LOGPROBS), way="so many may be asked for with any request"),
        "N",
        is_server=True,
    ),
    "uvicorn_log_level": Alias(
        _renamed("log_level", readers.one_of("debug", "info", "warning", "error")),
        "LEVEL",
        is_server=True,
    ),
    "allowed_media_domains": Alias(_renamed("media_domain", media_domains), "LIST", is_server=True),
    "disable_log_stats": Alias(_no_log_stats, is_server=True),
    "disable_log_requests": Alias(
        _without_effect(readers.switch, "requests are never logged"), is_server=True
    ),
    "enable_auto_tool_choice": Alias(
        _without_effect(
            readers.switch,
            "models call tools wherever their form is known; --tool-call-parser names it",
        ),
        is_server=True,
    ),
    "exclude_tools_when_tool_choice_none": Alias(
        _without_effect(readers.switch, "a prompt has no tools where `tool_choice` is none"),
        is_server=True,
    ),
    "enable_prompt_tokens_details": Alias(
        _without_effect(readers.switch, "every answer's usage holds them"), is_server=True
    ),
}
