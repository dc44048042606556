# SPDX-License-Identifier: Apache-2.0
"""Makes a beam search from a request's fields of vLLM, such as `use_beam_search`."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ....request.beam_params import BeamSearchParams, wish_without_effect
from ....request.sampling_params import SamplingParams
from ...api_errors import ApiError
from .protocol import SamplingFields


class AskedBeams(NamedTuple):
    """A beam search, and the sampling parameters of the search's answers."""

    search: BeamSearchParams
    params: SamplingParams


def beams_of(request: SamplingFields, params: SamplingParams, embeds: bytes) -> AskedBeams | None:
    """Return the beam search of a request with `use_beam_search`, else None. The search's answers
    are the request's `n` choices, each of at most `params.max_tokens` tokens. Raises ApiError for
    beam-search fields without `use_beam_search`, and for parameters that a beam search does not
    support. A repetition penalty from the model's defaults, not from the client, is ignored."""
    penalty, early = request.length_penalty, request.early_stopping
    if not request.use_beam_search:
        alone = {"length_penalty": penalty not in (None, 1.0), "early_stopping": early}
        for name, is_given in alone.items():
            if is_given:
                message = f"`{name}` is of a beam search; send `use_beam_search: true` with it"
                raise ApiError(message, param=name, code="invalid_value")
        return None
    if request.repetition_penalty is None:
        params = msgspec.structs.replace(params, repetition_penalty=1.0)
    if name := "prompt_embeds" if embeds else wish_without_effect(params):
        message = f"`{name}` cannot be used in a beam search; leave it out"
        raise ApiError(message, param=name, code="invalid_value")
    try:
        search = BeamSearchParams(
            beam_width=request.n or 1,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if penalty is None else penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
            early_stopping=False if early is None else early,
        )
    except ValueError as error:
        raise ApiError(f"beam search: {error}", code="invalid_value") from None
    return AskedBeams(search, params)
