# SPDX-License-Identifier: Apache-2.0
"""The name of a host's model: a digest of every byte of the model's files.

    name = "sha256:" | SHA-256( canonical CBOR of [file name, digest] of each file )

The files lie in the host's model directory, or in the cache of the Hugging Face Hub. All files
count except hidden files and Markdown, because a host may read any of them. `settings_text` covers
the host's settings that change the numbers in a KV cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import cbor2

from ...tiers.identity.digest_cache import DigestCache
from ...tiers.identity.file_digests import FileDigest, Progress, are_unchanged, digest_files
from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError

log = logging.getLogger(__name__)

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PAGES = (".md",)
_CONFIG = "config.json"


class HostModel(NamedTuple):
    """The name of a model in the host's configuration (vLLM's, for example)."""

    name: str  # a directory, a file, an id on the Hub, or an address elsewhere
    revision: str = ""  # on the Hub
    cache_folder: str | None = None  # the folder of the Hub's files, if not the usual folder


class ModelName(NamedTuple):
    """The name of a model in the identity of its blocks."""

    text: str
    files: tuple[FileDigest, ...]  # the state of the files when they were hashed
    unseen: str = ""  # why the files could not be hashed; `text` is then the host's name

    @property
    def is_unchanged(self) -> bool:
        return are_unchanged(self.files)


def name_model(
    model: HostModel, progress: Progress | None = None, cache: DigestCache | None = None
) -> ModelName:
    """Hash the files of a model. Raises ConfigError for a file that cannot be read."""
    path = _path_of(model)
    files = [] if path is None else _files(path)
    if not any(file.suffix in WEIGHTS for file in files):
        where = "its files are not here" if path is None else f"{path} holds no weights"
        revision = f"@{model.revision}" if model.revision else ""
        return ModelName(model.name + revision, (), where)
    digests = digest_files(files, cache, progress)
    named = cbor2.dumps([[each.path.name, each.digest] for each in digests], canonical=True)
    return ModelName(f"sha256:{hashlib.sha256(named).hexdigest()}", tuple(digests))


def warn_of_unseen(host: str, model: HostModel, name: ModelName, revision: str | None) -> None:
    """Warn if the model is identified only by the host's name, without digest or `revision`."""
    if name.unseen and not revision:
        log.warning(
            "StrataKV below %s finds the blocks of %s by that name, not by its bytes: %s. Set "
            "`revision`, to another text whenever the weights change, or blocks of other weights "
            "are taken for these",
            host,
            format_value(model.name),
            name.unseen,
        )


def settings_text(settings: Mapping[str, Any]) -> str:
    """Return a digest (64 hexadecimal digits) of the host's settings that change cached numbers."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return the fields or the type of a value that JSON cannot hold, without its address."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, bytes):
        return value.hex()
    kind = type(value)
    text = str(value)
    return f"{kind.__module__}.{kind.__qualname__}" if " at 0x" in text else text


def _path_of(model: HostModel) -> Path | None:
    try:
        path = Path(model.name)
        if path.exists():
            return path
    except (OSError, ValueError):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        # The name of a quantised file in a repository is `org/model:kind`.
        found = try_to_load_from_cache(
            model.name.partition(":")[0],
            _CONFIG,
            cache_dir=model.cache_folder,
            revision=model.revision or None,
        )
    except (ImportError, ValueError):  # the library is missing, or the name is no id of the Hub
        return None
    return Path(found).parent if isinstance(found, str) else None


def _files(path: Path) -> list[Path]:
    """Return the files of the model, sorted by name, without hidden files and Markdown."""
    if path.is_file():
        return [path]
    try:
        return sorted(
            file
            for file in path.iterdir()
            if file.is_file() and not file.name.startswith(".") and file.suffix not in _PAGES
        )
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be read ({error.strerror}); change its mode"
        ) from error
