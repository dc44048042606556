# SPDX-License-Identifier: Apache-2.0
"""Ends that token ids alone decide."""

from __future__ import annotations

import pytest

from stratakv.engine.request.request import Request, RequestStatus
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import check_stop, end_token_ids, stop_reason

EOS = frozenset({2, 3})
STOPPED = RequestStatus.FINISHED_STOPPED
CAPPED = RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize(
    ("options", "said", "max_model_len", "expected"),
    [
        ({}, [5], 100, None),
        ({}, [2], 100, STOPPED),
        ({}, [3], 100, STOPPED),
        ({"ignore_eos": True}, [2], 100, None),
        ({"stop_token_ids": (7,)}, [7], 100, STOPPED),
        ({"stop_token_ids": (7,), "ignore_eos": True}, [7], 100, STOPPED),
        ({"stop_token_ids": (7,), "ignore_eos": True}, [3], 100, None),
        ({"min_tokens": 3}, [2, 2], 100, None),
        ({"min_tokens": 3, "stop_token_ids": (7,)}, [5, 7], 100, None),
        ({"min_tokens": 3}, [2, 2, 2], 100, STOPPED),
        ({"max_tokens": 2}, [5, 5], 100, CAPPED),
        ({"max_tokens": 2}, [5, 2], 100, STOPPED),
        ({"max_tokens": 2, "ignore_eos": True}, [5, 2], 100, CAPPED),
        ({}, [5, 5], 5, CAPPED),
        ({}, [5], 5, None),
        ({"min_tokens": 9}, [2, 2], 5, CAPPED),
    ],
)
def test_the_end(
    options: dict[str, object],
    said: list[int],
    max_model_len: int,
    expected: RequestStatus | None,
) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    request = Request("r", [1, 1, 1], params)
    for token_id in said:
        request.append_output_token(token_id)
    ends = end_token_ids(request, EOS)
    assert check_stop(request, said[-1], ends, max_model_len) is expected


def test_a_stop_id_is_a_reason_and_the_models_own_end_is_none() -> None:
    request = Request("r", [1], SamplingParams(stop_token_ids=(7,)))
    assert stop_reason(request, 7) == 7
    assert stop_reason(request, 2) is None
