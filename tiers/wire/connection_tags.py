# SPDX-License-Identifier: Apache-2.0
"""Tags of blocks on one connection between a client and the memory of a tenant store."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from ..block import BlockLayout
from ..tag import Proof, Tagger


class Tags:
    """The tags of one connection: those that its engine makes with a tag key or for a namespace,
    if it has one, are for the wire; what the engine itself keeps has plain ones. Thread-safe."""

    def __init__(self, layout: BlockLayout, tag_key: bytes | None, namespace: bytes = b"") -> None:
        layout_id, size = layout.layout_id(), layout.page_bytes
        self._plain = self._wire = Tagger(layout_id, size)
        if namespace:
            layout_id = hashlib.sha256(layout_id + namespace).digest()[: len(layout_id)]
        if namespace or tag_key is not None:
            self._wire = Tagger(layout_id, size, tag_key)
        self.are_keyed = self._wire.is_keyed
        self.begin_block = self._wire.create_hasher
        self.names = self._wire.join_names  # of which tags without a key are made

    def sent(self, key: bytes, hasher: Any, proof: Proof | None) -> Proof | None:
        """What goes with a block that was hashed as it was copied; None where its bytes are not
        what `proof` says."""
        made = self._wire.finish_proof(key, hasher)
        return made if proof is None or proof.digest == made.digest else None

    def prove(self, key: bytes, payload: memoryview, proof: Proof | None) -> Proof | None:
        """Do what `sent` does, for a whole block."""
        made = self._wire.prove(key, payload)
        return made if proof is None or proof.digest == made.digest else None

    def outgoing(self, key: bytes, proof: Proof) -> Proof:
        """What goes with a block whose plain proof is known. Not for tags with a key, for which
        the bytes are needed."""
        return Proof(self._wire.tag(key, proof.digest), proof.digest)

    def received(self, key: bytes, hasher: Any, tag: bytes) -> Proof | None:
        """The proof, for the engine's own tiers, of a block that came with `tag`; None where it
        is another block than was stored under the key."""
        made = self._wire.finish_proof(key, hasher)
        if not hmac.compare_digest(made.tag, tag):
            return None
        if self._wire is self._plain:
            return made
        return Proof(self._plain.tag(key, made.digest), made.digest)

    def received_all(
        self, keys: Sequence[bytes], digests: Sequence[bytes], tags: Sequence[bytes]
    ) -> list[Proof]:
        """The proofs, for the engine's own tiers, of blocks whose `tags` (made without a key, for
        the wire) are those that they came with."""
        if self._wire is not self._plain:
            tags = [self._plain.tag(k, digest) for k, digest in zip(keys, digests, strict=True)]
        return list(map(Proof, tags, digests))
