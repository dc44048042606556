# SPDX-License-Identifier: Apache-2.0
"""When a request has said enough: its own end, its length, or an answer that repeats itself.

These rules need token ids only and change nothing. Stop strings are left to the front, which has
the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request.request import Request, RequestStatus


def end_token_ids(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end this request, by its own wish or by the model's."""
    own = request.sampling_params.stop_token_ids
    eos = frozenset() if request.sampling_params.ignore_eos else eos_token_ids
    return eos.union(own) if own else eos


def check_stop(
    request: Request, token_id: int, end_ids: frozenset[int], max_model_len: int
) -> RequestStatus | None:
    """The finished status that `token_id`, just appended to `request`, leads to; None: go on.

    An end id counts only once `min_tokens` are there. It wins over a length reached with the same
    token. The reason to report is the id for a stop id, nothing for the model's own end
    (`stop_reason`).
    """
    num_output = request.num_output_tokens
    if token_id in end_ids and num_output >= request.sampling_params.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if num_output >= request.max_tokens or request.num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    detection = request.repetition_detection
    if detection is not None and num_output >= request.sampling_params.min_tokens:
        sizes = detection.min_pattern_size, detection.max_pattern_size
        if repeats(request.output_token_ids, *sizes, detection.min_count):
            return RequestStatus.FINISHED_REPETITION
    return None


def stop_reason(request: Request, token_id: int) -> int | None:
    """The stop id that ended a stopped request, None where it was the model's own end."""
    return token_id if token_id in request.sampling_params.stop_token_ids else None


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
