# SPDX-License-Identifier: Apache-2.0
"""Whether a text has begun to repeat itself: the end of a list of tokens as one pattern, again and
again."""

from __future__ import annotations

from collections.abc import Sequence


def repeats(token_ids: Sequence[int], min_pattern: int, max_pattern: int, min_count: int) -> bool:
    """Whether the list ends with a pattern of `min_pattern` to `max_pattern` tokens that stands
    there at least `min_count` times in a row.

    To be asked after each token: where the last one does not occur at the right distances before,
    which is usual, nothing else is looked at; at worst `max_pattern * min_count` tokens are.
    Raises ValueError unless 1 <= min_pattern <= max_pattern and min_count >= 2.
    """
    if not 1 <= min_pattern <= max_pattern or min_count < 2:
        raise ValueError(
            "a repetition is a pattern of 1 <= min_pattern <= max_pattern tokens, at least twice, "
            f"not min_pattern={min_pattern}, max_pattern={max_pattern}, min_count={min_count}"
        )
    longest = min(max_pattern, len(token_ids) // min_count)
    if longest < min_pattern:
        return False
    before = token_ids[-1 - longest : len(token_ids) - min_pattern]
    if token_ids[-1] not in before:
        return False
    last, again = token_ids[-1], min_count - 1
    likely = [
        size
        for size in range(min_pattern, longest + 1)
        if token_ids[-1 - size] == last and token_ids[-1 - size * again] == last
    ]
    if not likely:
        return False
    # Backwards, a pattern of a size stands there so many times where the text agrees with itself,
    # moved by that size, over all of them but one.
    same = _agreements(token_ids[: -1 - longest * min_count : -1], likely[-1])
    return any(same[size] >= size * again for size in likely)


def _agreements(tokens: Sequence[int], most: int) -> list[int]:
    """For each shift up to `most`, how many of the first tokens equal those that lie so far behind
    them. No token is compared twice with success (the Z algorithm)."""
    size = len(tokens)
    found = [size] + [0] * most
    start = end = 0  # the known agreement that reaches farthest
    for shift in range(1, most + 1):
        length = min(end - shift, found[shift - start]) if shift < end else 0
        while shift + length < size and tokens[length] == tokens[shift + length]:
            length += 1
        found[shift] = length
        if shift + length > end:
            start, end = shift, shift + length
    return found
