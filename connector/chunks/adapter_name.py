# SPDX-License-Identifier: Apache-2.0
"""AdapterName: the fingerprint of a LoRA adapter, made from the content of its folder.

    fingerprint = SHA-256( canonical CBOR of [name, fields of adapter_config.json,
                           [file name, digest] of each file with weights] )

The hash leaves out fields that change no number, so that a copy of an adapter has the same
fingerprint in any folder and under any name. The fingerprint in this engine's own keys is another
one (engine/models/lora/adapter_file.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import cbor2

from ...tiers.identity.digest_cache import DigestCache
from ...tiers.identity.file_digests import FileDigest, are_unchanged, digest_files
from ...tiers.settings.values import ConfigError
from .model_name import WEIGHTS

CONFIG_FILE = "adapter_config.json"
_NAME = "stratakv.adapter.1"
# Fields without an effect on what an adapter computes.
_NO_ARITHMETIC = frozenset((
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "revision",
    "task_type",
))  # fmt: skip


class AdapterName(NamedTuple):
    """The name of an adapter in the keys of its blocks."""

    fingerprint: bytes  # 32
    files: tuple[FileDigest, ...]  # the state of the files when they were hashed

    @property
    def is_unchanged(self) -> bool:
        """Whether the files are unchanged since they were hashed."""
        return are_unchanged(self.files)


def name_adapter(path: str, cache: DigestCache | None = None) -> AdapterName:
    """Hash the adapter in the folder `path`. Raises ConfigError for a folder that is not here, such
    as an id on the Hub, and for files that cannot be read or that change meanwhile."""
    folder = Path(os.path.expanduser(path))
    try:
        found = sorted(each for each in folder.iterdir() if each.suffix in WEIGHTS)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the folder of the adapter {path} cannot be read ({error}); give a folder on this "
            "machine"
        ) from error
    if not found:
        raise ConfigError(f"{folder} holds no weights of an adapter; give the folder of one")
    config, *weights = digest_files([folder / CONFIG_FILE, *found], cache)
    content = [
        _NAME,
        _arithmetic(config.path),
        [[each.path.name, each.digest] for each in weights],
    ]
    config.check_unchanged()  # because the configuration was read a second time
    fingerprint = hashlib.sha256(cbor2.dumps(content, canonical=True)).digest()
    return AdapterName(fingerprint, (config, *weights))


def _arithmetic(path: Path) -> dict[str, Any]:
    """Return the fields of the configuration that may change a number."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not the JSON of an adapter ({error}); copy the adapter again"
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} holds no JSON object; copy the adapter again")
    kept = {name: value for name, value in fields.items() if name not in _NO_ARITHMETIC}
    modules = kept.get("target_modules")
    if isinstance(modules, list):  # PEFT writes a set, in any order
        kept["target_modules"] = sorted(map(str, modules))
    return kept
