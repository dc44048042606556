# SPDX-License-Identifier: Apache-2.0
"""Tags of blocks on a client's connection to a tenant store."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from ..block import BlockLayout
from ..tag import Proof, Tagger


class Tags:
    """Makes and checks the tags of blocks on one connection. Wire tags, which the server keeps,
    depend on the engine's tag key and namespace, if any. Plain tags, for the engine's own tiers,
    depend on neither key nor namespace. Thread-safe."""

    def __init__(self, layout: BlockLayout, tag_key: bytes | None, namespace: bytes = b"") -> None:
        layout_id, size = layout.layout_id(), layout.page_bytes
        self._plain = self._wire = Tagger(layout_id, size)
        if namespace:
            layout_id = hashlib.sha256(layout_id + namespace).digest()[: len(layout_id)]
        if namespace or tag_key is not None:
            self._wire = Tagger(layout_id, size, tag_key)
        self.are_keyed = self._wire.is_keyed
        self.begin_block = self._wire.create_hasher
        self.names = self._wire.join_names  # used for tags without a tag key

    def sent(self, key: bytes, hasher: Any, proof: Proof | None) -> Proof | None:
        """Return the wire proof of a block that `hasher` hashed during its copy; None if `proof` is
        not None and has another digest."""
        made = self._wire.finish_proof(key, hasher)
        return made if proof is None or proof.digest == made.digest else None

    def prove(self, key: bytes, payload: memoryview, proof: Proof | None) -> Proof | None:
        """Hash a whole block and return its wire proof; None if `proof` has another digest."""
        made = self._wire.prove(key, payload)
        return made if proof is None or proof.digest == made.digest else None

    def outgoing(self, key: bytes, proof: Proof) -> Proof:
        """Return the wire proof of a block from its plain proof. Works only without a tag key,
        because a tag with a key is made from the block's bytes."""
        return Proof(self._wire.tag(key, proof.digest), proof.digest)

    def received(self, key: bytes, hasher: Any, tag: bytes) -> Proof | None:
        """Return the plain proof of a block that arrived with the wire tag `tag`; None if the tag
        does not match, because another block was stored under `key`."""
        made = self._wire.finish_proof(key, hasher)
        if not hmac.compare_digest(made.tag, tag):
            return None
        if self._wire is self._plain:
            return made
        return Proof(self._plain.tag(key, made.digest), made.digest)

    def received_all(
        self, keys: Sequence[bytes], digests: Sequence[bytes], tags: Sequence[bytes]
    ) -> list[Proof]:
        """Return the plain proofs of blocks that arrived with payload `digests` and wire `tags`.
        The wire tags were made without a tag key."""
        if self._wire is not self._plain:
            tags = [self._plain.tag(k, digest) for k, digest in zip(keys, digests, strict=True)]
        return list(map(Proof, tags, digests))
