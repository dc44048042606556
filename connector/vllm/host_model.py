# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM's models and settings in the identity of its blocks."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from ..chunks.model_name import HostModel, name_model, settings_text, warn_of_unseen

log = logging.getLogger(__name__)

# The fields of the model's configuration that do not change the numbers in a KV cache.
_NOT_NUMBERS = ("_name_or_path", "name_or_path", "transformers_version")


class ModelNames(NamedTuple):
    """Three fields of a ChunkIdentity."""

    model: str
    drafts: str  # name of the draft model; empty without a draft model
    settings: str  # digest of vLLM's settings that change numbers; empty if not exposed


def names_of(vllm_config: Any, revision: str | None) -> ModelNames:
    """Return the names from vLLM's configuration. Raises ConfigError for an unreadable model."""
    model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    # For a model in an object store, `model_weights` is the address of the weights.
    name = getattr(model, "model_weights", "") or model.model
    cache_folder = getattr(load, "download_dir", None)
    own = HostModel(name, getattr(model, "revision", None) or "", cache_folder)
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    drafts = ""
    if draft is not None and draft.model != model.model:
        draft_revision = getattr(draft, "revision", None) or ""
        drafts = _named(HostModel(draft.model, draft_revision, cache_folder), revision)
    settings = settings_text(_numbers_of(model, load))
    return ModelNames(_named(own, revision), drafts, settings)


def names_of_tier(model: str, revision: str | None) -> ModelNames:
    """Return the only name that a secondary tier can read: the model's. Raises ConfigError."""
    if not revision:
        log.info(
            "vLLM tells StrataSpec the model's files and not its own settings: give another "
            "`revision` to engines with other --hf-overrides, --quantization, --load-format, "
            "--speculative-config, --mamba-cache-dtype, or another --dtype beside an fp8 cache; "
            "StrataConnector sees them itself"
        )
    return ModelNames(_named(HostModel(model), revision), "", "")


def _named(model: HostModel, revision: str | None) -> str:
    name = name_model(model, log.info)
    warn_of_unseen("vLLM", model, name, revision)
    return name.text


def _numbers_of(model: Any, load: Any) -> dict[str, Any]:
    """Return the settings of vLLM that change the numbers in its KV cache: overrides of the
    configuration (rope, windows), computing dtype, quantisation while loading, random weights,
    picture processing."""
    config = getattr(model, "hf_config", None)
    known = {} if config is None else dict(config.to_dict())
    for name in _NOT_NUMBERS:
        known.pop(name, None)
    load_format = str(getattr(load, "load_format", ""))
    pictures = getattr(model, "multimodal_config", None)
    return {
        "config": known,
        "dtype": str(model.dtype),
        "quantization": getattr(model, "quantization", None),
        "load_format": load_format,
        "seed": getattr(model, "seed", None) if load_format == "dummy" else None,
        "loader": getattr(load, "model_loader_extra_config", None),
        "processor": getattr(pictures, "mm_processor_kwargs", None),
    }
