# SPDX-License-Identifier: Apache-2.0
"""Block hashing over Python lists of token ids, for comparison.

The method is vLLM's default: each block's hash is SHA-256 over the pickle of (parent, ids, extras).
The module only writes pickles and reads none."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence


def pickle_sha256_chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the digests of the full blocks in `token_ids`, each the parent of the next."""
    digests = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = (parent, tuple(token_ids[start : start + block_size]), None)
        parent = hashlib.sha256(pickle.dumps(block, protocol=5)).digest()
        digests.append(parent)
    return digests
