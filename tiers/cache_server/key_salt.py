# SPDX-License-Identifier: Apache-2.0
"""KeySalt: derives the keys under which the server stores a tenant's blocks.

    stored key = HMAC-SHA256(tenant key, key) | the key's group and shard
    tenant key = HMAC-SHA256(server secret, tenant)

No client can choose the stored key of another tenant's block. Stored keys do not reveal prompts."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from ..block import DIGEST_BYTES, cut_keys
from ..native.openssl import key_hasher
from .secret_file import SECRET_BYTES

_BLOCK_BYTES = 64  # of SHA-256


class KeySalt:
    """Derives the stored keys of one tenant."""

    def __init__(self, secret: bytes, tenant: str) -> None:
        if len(secret) < SECRET_BYTES:
            raise ValueError(f"a server secret has {SECRET_BYTES} bytes or more, not {len(secret)}")
        tenant_key = hmac.digest(secret, tenant.encode(), "sha256")
        self._hasher = key_hasher(tenant_key)
        padded = tenant_key.ljust(_BLOCK_BYTES, b"\0")
        # The two key blocks of HMAC are hashed in advance, which halves the work for each key.
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def salt_keys(self, keys: Sequence[bytes]) -> list[bytes]:
        """The 40-byte stored keys of 40-byte keys. The time does not depend on the keys' values."""
        if self._hasher is not None:
            return cut_keys(self._hasher.hmac_keys(b"".join(keys), len(keys)))
        inner, outer = self._inner, self._outer
        result = []
        for key in keys:
            hasher = inner.copy()
            hasher.update(key)
            outside = outer.copy()
            outside.update(hasher.digest())
            result.append(outside.digest() + key[DIGEST_BYTES:])
        return result
