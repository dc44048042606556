# SPDX-License-Identifier: Apache-2.0
"""The engine's options by name, as flags and keyword arguments give them, and the EngineConfig.

One table serves `stratakv serve --block-size 32` and `LLM(block_size=32)`. The value objects of
`config.py` check values; here unknown names and contradictions are refused. Knows nothing of argv.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import (
    BLOCK_HASHES,
    DTYPES,
    OFFLOAD_TIERS,
    CacheConfig,
    ConfigError,
    EngineConfig,
    ModelConfig,
    OffloadConfig,
    SchedulerConfig,
    parse_size,
)
from .nearest import did_you_mean

EMBEDDED_MODEL = Path(__file__).parent / "models" / "embedded"
EMBEDDED_NAME = "stratakv-embedded"


LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: where it goes and how its value is read."""

    section: str  # "model" | "cache" | "scheduler" | "offload" | "engine"
    field: str
    parse: Callable[[str, Any], Any]  # (flag, value given) → value; raises ConfigError
    help: str
    metavar: str = ""  # empty: a switch with --no-


def flag_of(name: str) -> str:
    """`block_size` → `--block-size`."""
    return "--" + name.replace("_", "-")


def _integer(flag: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(str(value))
    except ValueError:
        raise ConfigError(f"{flag} takes a whole number, not {value!r}") from None


def _number(flag: str, value: Any) -> float:
    """Also what is no finite number; the value objects refuse it with their bounds."""
    try:
        return float(value if isinstance(value, int | float) else str(value))
    except (ValueError, OverflowError):
        raise ConfigError(f"{flag} takes a number, not {value!r}") from None


def _size(flag: str, value: Any) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return parse_size(value if is_count else str(value), flag)


def _switch(flag: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{flag} takes True or False, not {value!r}")
    return value


def _text(flag: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{flag} takes a text that is not empty, not {value!r}")
    return value


def _path(flag: str, value: Any) -> Path:
    """Raises ConfigError for what names no place in a file system."""
    text = _text(flag, str(value) if isinstance(value, Path) else value)
    if "\0" in text:
        raise ConfigError(f"{flag} takes a path, and {text!r} holds a zero byte; leave it out")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # `~name` of nobody on this machine
        raise ConfigError(f"{flag} takes a path, not {text!r} ({error})") from error


def one_of(*known: str) -> Callable[[str, Any], str]:
    """A reader of one word out of several."""

    def parse(flag: str, value: Any) -> str:
        if value not in known:
            raise ConfigError(
                f"{flag} takes {' or '.join(known)}, not {value!r}{did_you_mean(str(value), known)}"
            )
        return str(value)

    return parse


def _tiers(flag: str, value: Any) -> tuple[str, ...]:
    """Which tiers there are, and in which order, is for OffloadConfig to say."""
    names = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not is_list or value == "":
        raise ConfigError(f"{flag} takes cpu or cpu,ssd, not {value!r}")
    return tuple(name.strip() for name in names)


OPTIONS: Mapping[str, Option] = {
    "served_model_name": Option(
        "model", "served_name", _text, "the name clients ask for (default: the directory's)", "NAME"
    ),
    "revision": Option(
        "model", "revision", _text, "text that separates the blocks of otherwise equal models",
        "TEXT",
    ),
    "dtype": Option("model", "dtype", one_of(*DTYPES), f"{', '.join(DTYPES)}", "TYPE"),
    "device": Option("model", "device", one_of("cpu", "cuda"), "where to compute: cpu", "DEVICE"),
    "max_model_len": Option(
        "model", "max_model_len", _integer, "longest prompt and output, in tokens", "N"
    ),
    "block_size": Option("cache", "block_size", _integer, "tokens in a block (16)", "N"),
    "num_blocks": Option("cache", "num_blocks", _integer, "blocks in the KV pool", "N"),
    "kv_cache_memory_bytes": Option(
        "cache", "memory_bytes", _size, "size of the KV pool instead (1GiB)", "SIZE"
    ),
    "enable_prefix_caching": Option(
        "cache", "enable_prefix_caching", _switch, "keep and find blocks by their prefix"
    ),
    "block_hash": Option("cache", "block_hash", one_of(*BLOCK_HASHES), "sha256, sha256_cbor",
                         "NAME"),
    "max_num_batched_tokens": Option(
        "scheduler", "max_num_batched_tokens", _integer, "tokens in one step (2048)", "N"
    ),
    "max_num_seqs": Option(
        "scheduler", "max_num_seqs", _integer, "requests in one step (256)", "N"
    ),
    "long_prefill_token_threshold": Option(
        "scheduler", "long_prefill_token_threshold", _integer,
        "most tokens of one prompt in a step (0: the whole budget)", "N",
    ),
    "enable_chunked_prefill": Option(
        "scheduler", "enable_chunked_prefill", _switch, "spread a prompt over several steps"
    ),
    "admit_below": Option(
        "scheduler", "admit_below", _number,
        "let requests in while less than this share of the pool is held (0.8)", "SHARE",
    ),
    "preempt_above": Option(
        "scheduler", "preempt_above", _number,
        "send requests back while more than this share of the pool is held (0.95)", "SHARE",
    ),
    "kv_offload": Option(
        "offload", "tiers", _tiers, "tiers below the KV pool: cpu or cpu,ssd", "TIERS"
    ),
    "kv_offload_cpu_bytes": Option("offload", "cpu_bytes", _size, "size of the cpu tier (4GiB)",
                                   "SIZE"),
    "kv_offload_ssd_path": Option(
        "offload", "ssd_path", _path, "directory of the ssd tier (~/.cache/stratakv/ssd)", "DIR"
    ),
    "kv_offload_ssd_bytes": Option("offload", "ssd_bytes", _size, "size of the ssd tier (20GiB)",
                                   "SIZE"),
    "num_threads": Option(
        "engine", "num_threads", _integer, "threads that compute (the physical cores)", "N"
    ),
}  # fmt: skip


def engine_config(model: str | Path | None, given: Mapping[str, Any]) -> EngineConfig:
    """The settings of an engine from the options given; None means the embedded model.

    Raises ConfigError for an unknown option, a value that cannot be, or a contradiction.
    """
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None:
            raise ConfigError(f"there is no option {name!r}{did_you_mean(name, OPTIONS)}")
        sections[option.section][option.field] = option.parse(flag_of(name), value)
    _refuse_contradictions(given, sections)
    offload = sections["offload"]
    if "ssd" in offload.get("tiers", ()):
        offload.setdefault("ssd_path", default_ssd_path())
    path, name = _model(model)
    return EngineConfig(
        model=ModelConfig(**{"path": path, "served_name": name, **sections["model"]}),
        cache=CacheConfig(**sections["cache"]),
        scheduler=SchedulerConfig(**sections["scheduler"]),
        offload=OffloadConfig(**offload),
        **sections["engine"],
    )


_SECTIONS = ("model", "cache", "scheduler", "offload", "engine")


def default_ssd_path() -> Path:
    """Where the ssd tier lies unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "stratakv" / "ssd"


def _model(model: str | Path | None) -> tuple[Path, str]:
    """Directory and served name of a model."""
    if model is None:
        return EMBEDDED_MODEL, EMBEDDED_NAME
    path = _path("MODEL", model)
    if not path.is_dir():
        raise ConfigError(
            f"{path} is no directory; give a model directory as Hugging Face saves it (nothing is "
            "downloaded), or leave MODEL out for the embedded one"
        )
    return path, path.resolve().name


def _refuse_contradictions(
    given: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> None:
    tiers = sections["offload"].get("tiers", ())
    for tier in OFFLOAD_TIERS:
        for name in given:
            if name.startswith(f"kv_offload_{tier}_") and tier not in tiers:
                wanted = "cpu" if tier == "cpu" else "cpu,ssd"
                raise ConfigError(
                    f"{flag_of(name)} is given but {tier} is not in --kv-offload; add "
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
