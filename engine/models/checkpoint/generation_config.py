# SPDX-License-Identifier: Apache-2.0
"""The sampling parameters that a model's authors recommend, from its generation_config.json.

Only numeric keys that a request may have too are read from the file. `do_sample: false` in the file
does not make the server sample greedily, since exporters write it for every model. The front end
decides whether a recommended value applies to a request. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from .files import is_there
from .json_fields import JsonFields, read_json

GENERATION_CONFIG = "generation_config.json"
_MAX_TOP_K = 2**31 - 1

# The bounds are those of a request's sampling parameters.
_READERS: Mapping[str, Callable[[JsonFields, str], float | int]] = {
    "temperature": lambda fields, name: fields.number_from(name, 0.0, 100.0),
    "top_k": lambda fields, name: fields.integer(name, minimum=-1, maximum=_MAX_TOP_K),
    "top_p": lambda fields, name: fields.number(name, at_most=1.0),
    "min_p": lambda fields, name: fields.number_from(name, 0.0, 1.0),
    "repetition_penalty": lambda fields, name: fields.number(name, at_most=100.0),
    "max_new_tokens": lambda fields, name: fields.integer(name),
}


def load_default_sampling(path: Path) -> dict[str, float | int]:
    """Read the recommended values from the model directory `path`, as a dict by Hugging Face's
    names. The dict is empty if generation_config.json does not exist. Raises ConfigError, with file
    and key, for a value that a request may not have."""
    if not is_there(path / GENERATION_CONFIG):
        return {}
    fields = read_json(path / GENERATION_CONFIG)
    return {name: read(fields, name) for name, read in _READERS.items() if fields.has(name)}
