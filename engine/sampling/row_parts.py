# SPDX-License-Identifier: Apache-2.0
"""Cuts a batch of logits into parts small enough that what is made of them stays in caches.

Each row is worked on by itself, so the cuts change no result.
"""

from __future__ import annotations

from collections.abc import Iterator

# A temporary of this many float64 takes 8 MiB. Of a whole batch with a large vocabulary it would
# take hundreds, fresh from the system every time: a draw from 256 rows took five times as long.
LOGITS_CHUNK_CPU = 2**20
# Elsewhere there are no such caches, and each part is some thirty launches: 64 MiB.
LOGITS_CHUNK_GPU = 2**23


def row_parts(num_rows: int, vocab_size: int, device_type: str = "cpu") -> Iterator[slice]:
    """Consecutive slices that cover all rows."""
    at_once = LOGITS_CHUNK_CPU if device_type == "cpu" else LOGITS_CHUNK_GPU
    size = max(1, at_once // max(1, vocab_size))
    for start in range(0, num_rows, size):
        yield slice(start, min(num_rows, start + size))
