# SPDX-License-Identifier: Apache-2.0
"""When a request has said enough: the rules that need token ids only.

Knows nothing of text: stop strings are looked for where tokens become text. Changes nothing.
"""

from __future__ import annotations

from ..request import Request, RequestStatus


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
    return None


def stop_reason(request: Request, token_id: int) -> int | None:
    """The stop id that ended a stopped request, None where it was the model's own end."""
    return token_id if token_id in request.sampling_params.stop_token_ids else None
