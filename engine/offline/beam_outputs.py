# SPDX-License-Identifier: Apache-2.0
"""Beam search in the Python API: makes the engine's sampling parameters, and the outputs."""

from __future__ import annotations

from ..request.beam_params import BeamSearchParams
from ..request.sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer
from .outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput


def params_of_beams(params: BeamSearchParams) -> SamplingParams:
    """Return sampling parameters for a request whose choices are the answers of the beam search."""
    return SamplingParams(
        n=params.beam_width,
        max_tokens=params.max_tokens,
        temperature=0.0,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        logprobs=0,
    )


def beam_search_output(
    answer: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """Return the answers of a beam search, which are the choices of `answer`, in vLLM's form."""
    prompt = answer.prompt_token_ids
    return BeamSearchOutput([_sequence(each, prompt, params, tokenizer) for each in answer.outputs])


def _sequence(
    choice: CompletionOutput,
    prompt: list[int],
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchSequence:
    total, num_tokens = choice.cumulative_logprob or 0.0, max(1, len(choice.token_ids))
    kept = choice.token_ids
    if choice.finish_reason == "stop" and not params.include_stop_str_in_output:
        kept = kept[:-1]  # vLLM shows the token that ends an answer only on request
    tokens = [*prompt, *kept]
    return BeamSearchSequence(
        tokens,
        choice.logprobs or [],
        None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True),
        total,
        params.score(total, num_tokens),
        choice.finish_reason,
        choice.error,
    )
