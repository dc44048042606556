# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a model: a digest of all files that decide its K and V.

    fingerprint = SHA-256( canonical CBOR { spec, config, weights } )

`spec` has the fields of the `ModelSpec`, `config` is the digest of config.json, and `weights` has
the name and digest of each safetensors file, in the order of `find_shards`. Each digest covers a
whole file (see `tiers/identity`). So copies of a model have the same fingerprint, and a change of
one byte in one of these files gives another fingerprint. No tensors are read."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cbor2

from ....tiers.identity.digest_cache import DigestCache
from ....tiers.identity.file_digests import FileDigest, Progress, digest_files
from ....tiers.settings.values import ConfigError
from ..model_spec import ModelSpec
from ..spec.spec_parser import load_model_spec
from .files import is_there
from .shards import find_shards

CONFIG = "config.json"
MAX_HEADER_BYTES = 100 * 1000 * 1000  # the limit of the safetensors format

# Fields of `ModelSpec` without an effect on K and V: the ids of end and begin tokens, and the form
# of the weights. The fingerprint covers them only through the digest of config.json.
_NOT_NUMBERS = ("eos_token_ids", "bos_token_id", "stored_dtype", "is_text_part")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The digests of a model's files, and the model's fingerprint."""

    fingerprint: str  # 64 hexadecimal digits
    files: tuple[FileDigest, ...]

    @classmethod
    def read(
        cls,
        path: Path,
        spec: ModelSpec | None = None,
        *,
        random_for: str | None = None,
        cache: DigestCache | None = None,
        progress: Progress | None = None,
    ) -> ModelFiles:
        """Hash the files whose digests are not in `cache` (default: the user's cache of digests).
        `random_for`, if given, describes random weights and everything that determines them; no
        weight file is then read. Raises ConfigError for a directory that cannot be read."""
        spec = spec or load_model_spec(path)
        paths = [path / CONFIG]
        if random_for is None:
            paths += check_headers(path)
        config, *weights = digest_files(paths, cache, progress)
        named: dict[str, Any] = {"spec": _fields(spec), "config": config.digest}
        if random_for is None:
            named["weights"] = [[each.path.name, each.digest] for each in weights]
        else:
            named["random"] = random_for
        digest = hashlib.sha256(cbor2.dumps(named, canonical=True))
        return cls(digest.hexdigest(), (config, *weights))

    def check_unchanged(self) -> None:
        """Raise ConfigError if a file has changed since it was hashed."""
        for file in self.files:
            file.check_unchanged()


def fingerprint(path: Path, spec: ModelSpec | None = None, *, random_for: str | None = None) -> str:
    """Return the fingerprint of the model in a directory, 64 hexadecimal digits. Raises like
    `ModelFiles.read`."""
    return ModelFiles.read(path, spec, random_for=random_for).fingerprint


def _fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a spec that are not None, as a dict. Without the None fields, a new
    field of `ModelSpec` does not change the fingerprints of models that do not use the field."""
    fields = dataclasses.asdict(spec)
    return {
        name: value
        for name, value in fields.items()
        if name not in _NOT_NUMBERS and value is not None
    }


def check_headers(path: Path) -> tuple[Path, ...]:
    """Return the weight files under `path`. Raise ConfigError if a file is missing, or if a file's
    header shows that the file is cut off."""
    files = find_shards(path).files
    for file in files:
        _check_header(file)
    return files


def _check_header(path: Path) -> None:
    """Raise ConfigError if the header of a safetensors file shows that the file is cut off. The
    header is checked before the whole file is hashed."""
    is_there(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_U64.size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); change its mode") from error
    length = _U64.unpack(head)[0] if len(head) == _U64.size else size
    if length > min(MAX_HEADER_BYTES, size - _U64.size):
        raise ConfigError(f"{path} is not a whole safetensors file; download the model again")
