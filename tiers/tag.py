# SPDX-License-Identifier: Apache-2.0
"""The tag of a block. The engine that stores the block makes the tag. Every tier keeps the tag with
the block. An engine that loads the block checks the tag.

    digest   xxh3-128(payload)                                   identifies the bytes
    tag      xxh3-128(name ‖ digest)                             binds the bytes to the block's key
    tag      HMAC-SHA256(tag key, name ‖ payload)[:16]           the same, with a tag key
    name     "STRKVTAG" ‖ layout id (16) ‖ payload bytes u64 ‖ key (40)

A tier keeps the digest and the tag together as the block's `Proof`. Whenever a tier moves the
bytes, it compares the digest, which needs neither the name nor the tag key. It makes no new tag for
a block that came with a tag. A tag without a tag key detects damaged and mixed-up blocks. Only a
holder of the tag key can make a tag with that key. The server that keeps the block, and the
server's other clients, cannot."""

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


# One entry for each block of a batch; None for a missing block, or for a block without a proof.
Proofs = Sequence[Proof | None]


def unpack_proof(packed: bytes) -> Proof:
    return Proof(packed[:TAG_BYTES], packed[TAG_BYTES:PROOF_BYTES])


def payload_digest(payload: Buffer) -> bytes:
    """The 16-byte digest of a block's bytes. Releases the GIL while it hashes."""
    return xxhash.xxh3_128_digest(payload)


class Tagger:
    """Makes tags of blocks of one layout. `tag_key` is a secret of 32 bytes or more, which all
    engines that load each other's blocks share. Thread-safe."""

    def __init__(self, layout_id: bytes, payload_bytes: int, tag_key: bytes | None = None) -> None:
        self._name_head = _NAME_HEAD.pack(_MAGIC, layout_id, payload_bytes)
        self._keyed = None if tag_key is None else hmac.new(tag_key, digestmod="sha256")

    @property
    def is_keyed(self) -> bool:
        """Whether there is a tag key. Then tags are made from bytes and not from a digest."""
        return self._keyed is not None

    def join_names(self, keys: Sequence[bytes]) -> bytes:
        """The names in the tags of blocks, joined without separators. All have the same length."""
        head = self._name_head
        return b"".join([head + key for key in keys])

    def tag(self, key: bytes, digest: bytes) -> bytes:
        """The tag of the block `key` whose bytes have this digest. Uses no tag key."""
        return xxhash.xxh3_128_digest(self._name_head + key + digest)

    def prove_all(self, keys: Sequence[bytes], digests: Sequence[bytes]) -> list[Proof]:
        """The proofs of blocks whose bytes have these digests. Uses no tag key."""
        head, digest_of = self._name_head, xxhash.xxh3_128_digest
        pairs = zip(keys, digests, strict=True)
        return [Proof(digest_of(head + key + digest), digest) for key, digest in pairs]

    def create_hasher(self, key: bytes) -> Any:
        """A hasher for a payload that comes in parts. Call its `update` with each part, while the
        part is in the CPU cache, and then pass the hasher to `finish_proof`."""
        if self._keyed is None:
            return xxhash.xxh3_128()
        return _KeyedHasher(self._keyed, self._name_head + key)

    def finish_proof(self, key: bytes, hasher: Any) -> Proof:
        """The proof of the payload given to `hasher`, which `create_hasher(key)` has made."""
        digest = hasher.digest()
        if self._keyed is None:
            return Proof(self.tag(key, digest), digest)
        return Proof(hasher.tag(), digest)

    def prove(self, key: bytes, payload: Buffer) -> Proof:
        """The proof of a block whose payload is in one piece."""
        if self._keyed is None:
            digest = payload_digest(payload)
            return Proof(self.tag(key, digest), digest)
        hasher = self.create_hasher(key)
        hasher.update(payload)
        return self.finish_proof(key, hasher)


class Hashed:
    """Takes the place of a hasher in `finish_proof` if the digest is known. Only without a tag
    key."""

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    def digest(self) -> bytes:
        return self._digest


class _KeyedHasher:
    """Computes the digest and the tag with a tag key in one pass over the bytes."""

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
