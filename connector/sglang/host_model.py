# SPDX-License-Identifier: Apache-2.0
"""The names of SGLang's model and settings, for the identity of its pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from ..chunks.adapter_name import name_adapter
from ..chunks.model_name import HostModel, ModelName, name_model, settings_text, warn_of_unseen

log = logging.getLogger(__name__)

HOST = "SGLang"
# SGLang's arguments that change numbers in the cache, in addition to the model's files.
_NUMBERS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "torchao_config",
    "load_format",
    "model_loader_extra_config",
    "json_model_override_args",
    "model_impl",
)


class ModelNames(NamedTuple):
    """Two fields of a PageIdentity."""

    model: str
    settings: str  # empty if SGLang does not expose them


def names_of(served_name: str, revision: str | None) -> ModelNames:
    """Return the names of model and settings, from SGLang's arguments in this process. `revision`
    is StrataKV's setting. Raises ConfigError for a model that cannot be read."""
    arguments = _server_arguments()
    path = getattr(arguments, "model_path", None)
    if not path:
        model = HostModel(served_name)
        name = ModelName(served_name, (), "SGLang does not say where its files are")
        settings = ""
    else:
        hub_revision = getattr(arguments, "revision", None) or ""
        model = HostModel(path, hub_revision, getattr(arguments, "download_dir", None))
        name = name_model(model, log.info)
        numbers = {each: getattr(arguments, each, None) for each in _NUMBERS}
        if numbers["load_format"] == "dummy":
            numbers["random_seed"] = getattr(arguments, "random_seed", None)
        adapters = _adapters(getattr(arguments, "lora_paths", None))
        if adapters:  # without adapters the text is as in earlier versions
            numbers["adapters"] = adapters
        settings = settings_text(numbers)
    warn_of_unseen(HOST, model, name, revision)
    return ModelNames(name.text, settings)


def _adapters(given: Any) -> list[list[str]]:
    """Return name, path and fingerprint of each adapter that SGLang loads at its start. SGLang's
    page hash has a digest of name and path for these adapters, and a random id for adapters that
    are loaded later. Raises ConfigError for an adapter that cannot be read."""
    if isinstance(given, Mapping):
        given = [f"{name}={path}" for name, path in given.items()]
    found = []
    for each in given or ():
        if isinstance(each, str):
            name, separator, path = each.partition("=")
            name, path = (name, path) if separator else ("", each)
        else:
            fields = each.get if isinstance(each, Mapping) else partial(getattr, each)
            name, path = fields("lora_name", None) or "", fields("lora_path", None) or ""
        found.append([name, path, name_adapter(path).fingerprint.hex()])
    return sorted(found)


def _server_arguments() -> Any:
    """Return SGLang's own arguments; None if SGLang does not expose them."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, AttributeError, RuntimeError, ValueError, LookupError):
        return None
