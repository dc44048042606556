# SPDX-License-Identifier: Apache-2.0
"""A name for a model's numbers, so that only engines with the same weights share blocks.

Reading all weights would cost minutes for large models, so the fingerprint is SHA-256 over
- the fields of the specification that change K and V, as canonical JSON, and
- for each weight file in the order of the names: its size (u64), its safetensors header, and 64
  samples of 4 KiB spread evenly from the first to the last byte of its data (all of the data where
  the samples would cover it).
The header holds every tensor's name, shape, type and place. A fine-tuned model differs everywhere,
so samples find it; whoever edits a few numbers by hand sets `revision` in the identity.
Knows nothing of tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from pathlib import Path
from typing import BinaryIO, Protocol

from ....tiers.settings.values import ConfigError
from ..spec import ModelSpec, load_model_spec
from .shards import find_shards

SAMPLES = 64
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 * 1000 * 1000  # the limit of the format

# They say where generation starts and ends and how weights lie, not what K and V are.
_NOT_NUMBERS = ("eos_token_ids", "bos_token_id", "stored_dtype", "is_text_part")
# Younger than blocks on people's disks, whose names stand as long as these are absent.
_OMITTED_AT_NONE = (
    "sliding_window",
    "sliding_layers",
    "local_rope",
    "query_scalar",
    "logits_softcap",
)
_U64 = struct.Struct("<Q")


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def fingerprint(path: Path, spec: ModelSpec | None = None, *, random_for: str | None = None) -> str:
    """64 hexadecimal digits; raises ConfigError for a directory that cannot be read. Weights that
    are random are named by the kind of device they are made on, and no file is read."""
    fields = dataclasses.asdict(spec or load_model_spec(path))
    for name in _NOT_NUMBERS:
        del fields[name]
    for name in _OMITTED_AT_NONE:
        if fields[name] is None:
            del fields[name]
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    if random_for is not None:
        digest.update(b"random weights on " + random_for.encode())
        return digest.hexdigest()
    for file in find_shards(path).files:
        _add_file(digest, file)
    return digest.hexdigest()


def _add_file(digest: _Hash, path: Path) -> None:
    try:
        size = path.stat().st_size
        digest.update(_U64.pack(size))
        with path.open("rb") as file:
            header = _read_header(file, size, path)
            digest.update(header)
            for position, length in _samples(_U64.size + len(header), size):
                file.seek(position)
                digest.update(file.read(length))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); change its mode") from error


def _read_header(file: BinaryIO, size: int, path: Path) -> bytes:
    head = file.read(_U64.size)
    length = _U64.unpack(head)[0] if len(head) == _U64.size else size
    if length > min(MAX_HEADER_BYTES, size - _U64.size):
        raise ConfigError(f"{path} is not a whole safetensors file; download the model again")
    return file.read(length)


def _samples(start: int, end: int) -> list[tuple[int, int]]:
    """Positions and lengths of the samples between two positions of a file."""
    room = end - start - SAMPLE_BYTES
    if end - start <= SAMPLES * SAMPLE_BYTES:
        return [(start, end - start)]
    return [(start + room * i // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]
