# SPDX-License-Identifier: Apache-2.0
"""The tag of a block: the engine that stores the block makes it, every tier keeps it with the
block, and an engine that loads the block compares it.

    digest   xxh3-128(payload)                                          what lies here
    tag      xxh3-128(name ‖ digest)                                    what was stored under a name
    tag      HMAC-SHA256(tag key, name ‖ payload)[:16]                  with a tag key
    name     "STRKVTAG" ‖ layout id (16) ‖ payload bytes u64 ‖ key (40)

A tier keeps digest and tag together as the block's proof. It compares the digest whenever it moves
the bytes, for which it needs neither the name nor a key; it never makes a tag for bytes that came
with one. A tag without a key finds damage and mix-ups. A tag with a key can be made only with that
key: neither by the server that keeps the block nor by another client of it.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import xxhash

TAG_BYTES = 16
PROOF_BYTES = 2 * TAG_BYTES
NO_TAG = bytes(TAG_BYTES)

_MAGIC = b"STRKVTAG"
_NAME_HEAD = struct.Struct("<8s16sQ")

Buffer = bytes | bytearray | memoryview


class Proof(NamedTuple):
    """The proof of a block: its tag and the digest of its bytes, 16 bytes each."""

    tag: bytes
    digest: bytes

    def pack(self) -> bytes:
        return self.tag + self.digest


# Proofs of a batch's blocks; None where a block did not come, or came without one.
Proofs = Sequence[Proof | None]


def unpack_proof(packed: bytes) -> Proof:
    return Proof(packed[:TAG_BYTES], packed[TAG_BYTES:PROOF_BYTES])


def payload_digest(payload: Buffer) -> bytes:
    """The 16-byte digest of a block's bytes. Releases the interpreter while it hashes."""
    return xxhash.xxh3_128_digest(payload)


class Tagger:
    """Makes tags of blocks of one layout. `tag_key`: a secret of 32 bytes or more, shared by all
    engines that load each other's blocks. Thread-safe."""

    def __init__(self, layout_id: bytes, payload_bytes: int, tag_key: bytes | None = None) -> None:
        self._name_head = _NAME_HEAD.pack(_MAGIC, layout_id, payload_bytes)
        self._keyed = None if tag_key is None else hmac.new(tag_key, digestmod="sha256")

    @property
    def is_keyed(self) -> bool:
        """Whether a tag is made from the bytes of its block, and not only from their digest."""
        return self._keyed is not None

    def join_names(self, keys: Sequence[bytes]) -> bytes:
        """The names of blocks, of one length each, joined without separators."""
        head = self._name_head
        return b"".join([head + key for key in keys])

    def tag(self, key: bytes, digest: bytes) -> bytes:
        """The tag, without a tag key, of the block `key` whose bytes have this digest."""
        return xxhash.xxh3_128_digest(self._name_head + key + digest)

    def prove_all(self, keys: Sequence[bytes], digests: Sequence[bytes]) -> list[Proof]:
        """The proofs, without a tag key, of blocks whose bytes have these digests."""
        head, digest_of = self._name_head, xxhash.xxh3_128_digest
        pairs = zip(keys, digests, strict=True)
        return [Proof(digest_of(head + key + digest), digest) for key, digest in pairs]

    def create_hasher(self, key: bytes) -> Any:
        """A hasher with `update`, for a payload that comes in parts, so that each part is hashed
        while it is in the processor's cache; `finish_proof` takes the hasher."""
        if self._keyed is None:
            return xxhash.xxh3_128()
        return _KeyedHasher(self._keyed, self._name_head + key)

    def finish_proof(self, key: bytes, hasher: Any) -> Proof:
        """The proof of the payload passed to `hasher`, which is from `create_hasher(key)`."""
        digest = hasher.digest()
        if self._keyed is None:
            return Proof(self.tag(key, digest), digest)
        return Proof(hasher.tag(), digest)

    def prove(self, key: bytes, payload: Buffer) -> Proof:
        """The proof of a whole block."""
        if self._keyed is None:
            digest = payload_digest(payload)
            return Proof(self.tag(key, digest), digest)
        hasher = self.create_hasher(key)
        hasher.update(payload)
        return self.finish_proof(key, hasher)


class Hashed:
    """A stand-in for a hasher whose bytes have been hashed already."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def digest(self) -> bytes:
        return self._digest


class _KeyedHasher:
    """Digest and keyed tag in one pass."""

    def __init__(self, keyed: hmac.HMAC, name: bytes) -> None:
        self._tag = keyed.copy()
        self._tag.update(name)
        self._content = xxhash.xxh3_128()

    def update(self, part: Buffer) -> None:
        self._content.update(part)
        self._tag.update(part)

    def digest(self) -> bytes:
        return self._content.digest()

    def tag(self) -> bytes:
        return self._tag.digest()[:TAG_BYTES]
