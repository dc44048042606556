# SPDX-License-Identifier: Apache-2.0
"""The weight files of a Hugging Face directory, and the file that must hold each tensor.

`checkpoint.py` opens the files; `fingerprint.py` reads their bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ....tiers.settings.format import format_name, format_value
from ....tiers.settings.values import ConfigError
from .files import is_there
from .foreign_directory import explain_no_weights
from .json_fields import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024**2


# Rotary frequencies, stored in older exports; ignored, since config.json determines them.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class Shards:
    """The weight files of a model by file name. `weight_map` (tensor name → file) exists only for a
    model with several weight files."""

    files: tuple[Path, ...]
    weight_map: dict[str, Path] | None


def find_shards(path: Path) -> Shards:
    """Find the safetensors files under `path`. Raises ConfigError with the names of missing
    files."""
    if is_there(path / SINGLE_FILE):
        return Shards((path / SINGLE_FILE,), None)
    if not is_there(path / INDEX_FILE):
        raise ConfigError(
            explain_no_weights(path)
            or f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; download or convert the "
            "weights in safetensors form"
        )
    weight_map = {
        tensor: path / name
        for tensor, name in read_weight_map(path).items()
        if not DERIVED.search(tensor)
    }
    files = tuple(sorted(set(weight_map.values())))
    missing = [file.name for file in files if not is_there(file)]
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of its {len(files)} weight files, first "
            f"{format_name(missing[0])}, which {INDEX_FILE} names; download the model again"
        )
    return Shards(files, weight_map)


def read_weight_map(path: Path) -> dict[str, str]:
    """Read the safetensors index file under `path`, and return tensor name → file name. Raise
    ConfigError for an index that names no files, or a file outside the directory."""
    index = read_json(path / INDEX_FILE, MAX_INDEX_BYTES)
    names = index.inner("weight_map").values
    if not names:
        raise index.fault("weight_map", "an object of tensor names and files", names)
    weight_map: dict[str, str] = {}
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise index.fault(
                f"weight_map[{format_value(tensor)}]", "the name of a file beside it", name
            )
        weight_map[tensor] = name
    return weight_map
