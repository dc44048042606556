# SPDX-License-Identifier: Apache-2.0
"""Makes the key of an LMCache chunk from LMCache's key of the chunk and from all other values that
determine the chunk's bytes.

    root    = SHA-256( canonical CBOR of the fields of ChunkIdentity )
    digest  = SHA-256( root | canonical CBOR of [hash, model, kv rank, object group, cache salt] )
    key     = digest | group 0 | shard 0 of 1                               (40 bytes, docs/abi.md)

If the model's files are on this machine, `model` is a digest of the files (model_names.py).
LMCache's kv rank contains world size and rank, and LMCache's hash covers token ids. LMCache's
key lacks shapes and dtypes, so the root covers these. Chunks with different roots are stored in
separate tiers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cbor2

from ...tiers.block import key_suffix
from ...tiers.settings.values import ConfigError

_NAMESPACE = b"lmcache-chunk-1\0"
_SUFFIX = key_suffix()
_MAX_RANK = 16

# Bytes per number of the LMCache dtypes without separate scales; `uint8` means opaque bytes.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIdentity:
    """The values, in addition to LMCache's keys, that two servers must agree on to share chunks."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    revision: str
    salt: str
    host_version: str  # major.minor of LMCache, which decides the layout of a chunk

    @property
    def chunk_bytes(self) -> int:
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in sizes)

    def root(self) -> bytes:
        """A 32-byte digest of all fields, for keys and stores."""
        return hashlib.sha256(cbor2.dumps(asdict(self), canonical=True)).digest()

    def namespace(self) -> bytes:
        return _NAMESPACE + self.root()


def read_identity(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], revision: str, salt: str, version: str
) -> ChunkIdentity:
    """Make the identity of chunks of these shapes and dtypes. Raises ConfigError if unsupported."""
    names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    unknown = sorted(set(names) - DTYPE_BYTES.keys())
    if unknown:
        raise ConfigError(
            f"chunks of LMCache with numbers of dtype {unknown[0]} cannot be kept, as far as "
            f"StrataKV knows; use a KV cache of {', '.join(DTYPE_BYTES)}"
        )
    sizes = tuple(tuple(int(size) for size in shape) for shape in shapes)
    if not sizes or len(sizes) != len(names) or any(len(shape) > _MAX_RANK for shape in sizes):
        raise ConfigError(
            f"a chunk of LMCache has a dtype for each shape, not {len(names)} for {len(sizes)}"
        )
    return ChunkIdentity(
        shapes=sizes, dtypes=names, revision=revision, salt=salt, host_version=version
    )


class ChunkKeys:
    """Makes the tiers' keys from LMCache's ObjectKeys."""

    def __init__(self, root: bytes) -> None:
        self._root = hashlib.sha256(root)

    def derive_chunk_key(self, key: Any, model: str) -> bytes:
        """Return the 40-byte key of a chunk. `model` is the model's name (model_names.py)."""
        fields = [key.chunk_hash, model, key.kv_rank, key.object_group_id, key.cache_salt]
        hasher = self._root.copy()
        hasher.update(cbor2.dumps(fields, canonical=True))
        return hasher.digest() + _SUFFIX
