# SPDX-License-Identifier: Apache-2.0
"""Whether an answer has begun to repeat itself: some tokens, again and again, up to its end."""

from __future__ import annotations

from collections.abc import Sequence


def repeats(token_ids: Sequence[int], min_pattern: int, max_pattern: int, min_count: int) -> bool:
    """Whether the last tokens are one pattern of `min_pattern` to `max_pattern` tokens, at least
    `min_count` times in a row. Asked after every token it costs a comparison for each length, and
    more only where that token stands one pattern before."""
    num_tokens = len(token_ids)
    for length in range(min_pattern, min(max_pattern, num_tokens // min_count) + 1):
        if token_ids[-1] != token_ids[-1 - length]:
            continue
        start = num_tokens - length * min_count
        # It repeats with this period where it equals itself moved by one pattern.
        if token_ids[start + length :] == token_ids[start : num_tokens - length]:
            return True
    return False
