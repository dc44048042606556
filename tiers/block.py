# SPDX-License-Identifier: Apache-2.0
"""The block: its key and the layout of its bytes.

Keys and layouts are part of the ABI in `docs/abi.md`. The golden vectors of
`tests/tiers/test_block.py` detect any change to them.

    root   = SHA-256(canonical CBOR of the identity)
    digest = SHA-256(parent digest | token ids, little-endian int32 | canonical CBOR of the extras)
    key    = digest (32) | group u16 | shard rank u16 | shard count u16 | zero u16    (40 bytes)"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cbor2

from .errors import InvalidBlock

DIGEST_BYTES = 32
KEY_BYTES = 40
TOKEN_BYTES = 4
LAYOUT_VERSION = 1
ROOT_VERSION = 2  # version 1 had a fingerprint of samples, and no dtype or epoch
# Addresses, file offsets and lengths are multiples of this number, as O_DIRECT needs.
ALIGNMENT = 4096

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
}

_KEY_SUFFIX = struct.Struct("<HHHH")
_KEY, _KEYS = struct.Struct(f"{KEY_BYTES}s"), struct.Struct(f"{KEY_BYTES}s" * 64)

# One extra key of a block: a kind ("salt", "lora", "mm", "embeds") and then its values.
Extra = tuple[str | bytes | int, ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """The values that must be equal in two engines that share blocks. Every chain of digests starts
    from the hash of these values (`root`).

    `model` is a fingerprint of weights and configuration, not a path. An operator may set the free
    text `revision` to keep the blocks of otherwise equal models apart. K and V are computed in
    `dtype` and kept in `kv_dtype`. `epoch` is always 0; it is reserved for weights that change
    while an engine runs."""

    model: str
    revision: str
    dtype: str
    kv_dtype: str
    block_size: int
    epoch: int = 0

    def root(self) -> bytes:
        """The 32-byte digest that is the parent of the first block of every chain."""
        fields = {
            "root_version": ROOT_VERSION,
            "model": self.model,
            "revision": self.revision,
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "layout_version": LAYOUT_VERSION,
            "block_size": self.block_size,
            "epoch": self.epoch,
        }
        return hashlib.sha256(cbor2.dumps(fields, canonical=True)).digest()


def encode_extras(extras: Sequence[Extra]) -> bytes:
    """Encode a block's extra keys as canonical CBOR, or as `b""` if there are none. Their order
    changes the block's key, so callers use the order salt, lora, mm, embeds."""
    if not extras:
        return b""
    return cbor2.dumps([list(extra) for extra in extras], canonical=True)


def chain_digests(
    parent: bytes,
    token_bytes: memoryview,
    block_size: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """The 32-byte digests of the consecutive full blocks in `token_bytes` (little-endian int32).

    `parent` is the parent of the first block. `extras` maps a block's index in this call to its
    encoded extras. A partial block at the end is ignored. Two different inputs never give the same
    hashed bytes. The reason is that the root contains the block size, so all blocks of a chain have
    equally many token bytes."""
    step = block_size * TOKEN_BYTES
    digests: list[bytes] = []
    sha256 = hashlib.sha256
    for index, start in enumerate(range(0, len(token_bytes) - step + 1, step)):
        hasher = sha256(parent)
        hasher.update(token_bytes[start : start + step])
        if extras and index in extras:
            hasher.update(extras[index])
        parent = hasher.digest()
        digests.append(parent)
    return digests


def chain_digests_sha256_cbor(
    parent: bytes,
    blocks: Iterable[Sequence[int]],
    extras: Mapping[int, Extra] | None = None,
) -> list[bytes]:
    """The block hashes that vLLM's `sha256_cbor` computes, for routers that compute them too. Each
    digest is SHA-256(canonical CBOR of [parent, token ids, extra keys or null]). These digests do
    not depend on the `Identity`, so a store of such blocks is for one identity, whose root is the
    store's namespace."""
    digests: list[bytes] = []
    for index, tokens in enumerate(blocks):
        extra = list(extras[index]) if extras and index in extras else None
        payload = cbor2.dumps([parent, [int(t) for t in tokens], extra], canonical=True)
        parent = hashlib.sha256(payload).digest()
        digests.append(parent)
    return digests


def tenant_salt(secret: bytes, tenant: str, cache_salt: str) -> bytes | None:
    """The salt for the first block of a tenant's prompts. None if secret, tenant and cache salt are
    all empty. The salt is an HMAC-SHA256 with the engine's secret as the key. A client does not
    know this secret, so it cannot choose a cache salt that yields another tenant's salt."""
    if not (secret or tenant or cache_salt):
        return None
    message = cbor2.dumps([tenant, cache_salt], canonical=True)
    return hmac.new(secret, message, hashlib.sha256).digest()


class KeyParts(NamedTuple):
    """The parts of a 40-byte block key."""

    digest: bytes
    group: int
    shard_rank: int
    shard_count: int


def key_suffix(group: int = 0, shard_rank: int = 0, shard_count: int = 1) -> bytes:
    """The 8 bytes that follow a digest in a key, equal for all blocks of a worker and group."""
    if not 0 <= shard_rank < shard_count:
        raise InvalidBlock(f"shard rank {shard_rank} is not below the shard count {shard_count}")
    return _KEY_SUFFIX.pack(group, shard_rank, shard_count, 0)


def pack_key(digest: bytes, group: int = 0, shard_rank: int = 0, shard_count: int = 1) -> bytes:
    if len(digest) != DIGEST_BYTES:
        raise InvalidBlock(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    return digest + key_suffix(group, shard_rank, shard_count)


def cut_keys(packed: bytes) -> list[bytes]:
    """Split concatenated keys of `KEY_BYTES` each. The function unpacks 64 keys at a time, because
    making a tuple for each key would take longer than making the key."""
    many = len(packed) // _KEYS.size * _KEYS.size
    keys: list[bytes] = []
    for part in _KEYS.iter_unpack(memoryview(packed)[:many]):
        keys += part
    return keys + [key for (key,) in _KEY.iter_unpack(memoryview(packed)[many:])]


def unpack_key(key: bytes) -> KeyParts:
    """Split a key into its parts. Raises InvalidBlock for bytes that `pack_key` never makes."""
    if len(key) != KEY_BYTES:
        raise InvalidBlock(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    group, rank, count, zero = _KEY_SUFFIX.unpack_from(key, DIGEST_BYTES)
    if zero != 0 or rank >= count:
        raise InvalidBlock("the key's shard fields are not valid")
    return KeyParts(bytes(key[:DIGEST_BYTES]), group, rank, count)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout of a block's bytes. It is the same in the GPU pool, in the slab, in an SSD slot
    and on the wire. The bytes are a row-major, little-endian array `[num_layers, 2 (K, V),
    block_size, num_kv_heads, head_dim]` of `kv_dtype`: one contiguous chunk over all layers."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str

    def __post_init__(self) -> None:
        if self.kv_dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise InvalidBlock(f"unknown KV dtype {self.kv_dtype!r}; known are {known}")
        if min(self.num_layers, self.block_size, self.num_kv_heads, self.head_dim) < 1:
            raise InvalidBlock(f"every dimension of a block layout is at least 1, got {self}")

    @property
    def page_bytes(self) -> int:
        """The size of one block in bytes: K and V of all its layers."""
        elements = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.kv_dtype]

    @property
    def place_bytes(self) -> int:
        """The size of one layer of a block in bytes, K and V together."""
        return self.page_bytes // self.num_layers

    @property
    def slot_bytes(self) -> int:
        """`page_bytes` rounded up to `ALIGNMENT`: the size of one slot of a slab in bytes."""
        return -(-self.page_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def token_bytes(self) -> int:
        """The size of one token's K and V over all layers, in bytes."""
        return self.page_bytes // self.block_size

    def layout_id(self) -> bytes:
        """A 16-byte fingerprint of the layout. Different layouts have different fingerprints."""
        fields = {
            "layout_version": LAYOUT_VERSION,
            "num_layers": self.num_layers,
            "block_size": self.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "kv_dtype": self.kv_dtype,
        }
        return hashlib.sha256(cbor2.dumps(fields, canonical=True)).digest()[:16]
