# SPDX-License-Identifier: Apache-2.0
"""Makes the key of a vLLM chunk from vLLM's hash and all other values that determine its bytes.

    root    = SHA-256( canonical CBOR of the fields of ChunkIdentity )
    digest  = SHA-256( root | vLLM's block hash )
    key     = digest | group u16 | shard 0 of 1                             (40 bytes, docs/abi.md)

vLLM's hash chains token ids, images and the request's `cache_salt`, but not the model, dtype,
layout or parallel ranks. vLLM's hash covers an adapter's name and path but not its content.
StrataConnector therefore makes its own hashes for requests with adapters
(kv_connector/adapters.py), and StrataSpec refuses adapters. A chunk contains the pages of all
ranks, so a key has no rank, and engines with different numbers of ranks never share a key."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import cbor2

from ...tiers.block import DTYPE_BYTES, BlockLayout, key_suffix
from ...tiers.errors import InvalidBlock
from ...tiers.settings.values import ConfigError

# The bytes of the cache group, which follow the block hash in vLLM's own key.
GROUP_BYTES = 4
NAMESPACE = b"vllm-chunk-1\0"

# vLLM's name of a dtype → StrataKV's name. Dtypes with scales outside the pages are not listed,
# because their bytes may mean different numbers in two engines of the same model.
DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e4m3",  # of the same width; `kv_dtype` in the identity differs
}
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIdentity:
    """The values that must be equal for two vLLM engines to share chunks."""

    model: str  # a digest of the model's files, or vLLM's name (chunks/model_name.py)
    drafts: str  # the same for a draft model, whose layers may be in the pages
    settings: str  # digest of vLLM's settings that change numbers; may be empty
    revision: str
    salt: str
    kv_dtype: str
    kv_layout: str
    platform: str  # the attention backends of a platform decide the layout of pages
    host_version: str  # major.minor of vLLM, which may change the layout of pages too
    chunk_bytes: int
    blocks_per_chunk: int
    tokens_per_hash: int
    groups: tuple[tuple[int, int, tuple[str, ...]], ...]  # id, tokens of a block, layers
    parallel: tuple[int, ...]  # world, tensor, pipeline, prefill and decode context
    is_replicated: bool
    is_canonical: bool
    # For each layer with a state: group, name, kind, and its tensors' shapes and dtypes.
    states: tuple[tuple[Any, ...], ...] = ()

    def root(self) -> bytes:
        """A 32-byte digest of all fields, for keys and stores."""
        fields = asdict(self)
        if not self.states:  # keeps digests made before this field existed
            del fields["states"]
        return hashlib.sha256(cbor2.dumps(fields, canonical=True)).digest()

    def namespace(self) -> bytes:
        return NAMESPACE + self.root()


class ChunkKeys:
    """Makes the tiers' keys from vLLM's keys."""

    def __init__(self, root: bytes) -> None:
        self._root = hashlib.sha256(root)

    def derive_chunk_key(self, host_key: bytes) -> bytes:
        """Return the 40-byte key of a chunk. Raises InvalidBlock if `host_key` is too short."""
        if len(host_key) <= GROUP_BYTES:
            raise InvalidBlock(f"a key of vLLM has a hash and a group, not {len(host_key)} bytes")
        hasher = self._root.copy()
        hasher.update(host_key[:-GROUP_BYTES])
        return hasher.digest() + key_suffix(int.from_bytes(host_key[-GROUP_BYTES:], "big"))


def chunk_layout(chunk_bytes: int, kv_dtype: str) -> BlockLayout:
    """Return the layout of a chunk: `chunk_bytes` bytes of one dtype, in vLLM's order. Raises
    ConfigError for a dtype that cannot be shared between engines."""
    name = DTYPES.get(kv_dtype)
    if name is None:
        raise ConfigError(
            f"the KV cache dtype {kv_dtype} of vLLM cannot be shared between engines, as far as "
            f"StrataKV knows; use --kv-cache-dtype auto or one of {', '.join(DTYPES)}"
        )
    return BlockLayout(1, 1, 1, chunk_bytes // (2 * DTYPE_BYTES[name]), name)
