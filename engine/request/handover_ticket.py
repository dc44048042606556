# SPDX-License-Identifier: Apache-2.0
"""The ticket of a prompt: the message from the node that computed it to the node that answers.

A ticket gives no access. The node that answers makes the names of the blocks from its own prompt,
model and tenant, so a foreign ticket finds no blocks. A ticket saves computing the last token of
the prompt a second time, and it is used only if it fits.
"""

from __future__ import annotations

import hashlib

import msgspec

from .logprobs import PositionLogprobs
from .sampling_params import SamplingParams

# Parameters without influence on the first token.
_LATER = {
    "max_tokens": 1, "stop": (), "include_stop_str_in_output": False, "skip_special_tokens": True,
    "bad_words": (), "logprobs": None, "prompt_logprobs": None, "repetition_detection": None,
    "skip_reading_prefix_cache": False,
}  # fmt: skip
_DIGEST_CHARACTERS = 32


class Ticket(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, frozen=True
):
    """A prompt whose blocks other nodes can load, and the first token of its answer."""

    num_tokens: int  # of the prompt
    prompt: str  # hexadecimal digest of its tokens, the model, tenant and salt
    params: str  # `params_digest` of the request
    first_token: int
    logprobs: PositionLogprobs | None = None  # of the first token, if requested


def params_digest(params: SamplingParams) -> str:
    """Return a digest that is equal for parameters that choose the same first token for
    a prompt."""
    # Below `min_tokens` the tokens that end an answer are banned; otherwise they may be chosen.
    stops = {} if params.min_tokens else {"stop_token_ids": (), "ignore_eos": False}
    same = msgspec.structs.replace(params, **_LATER, **stops, min_tokens=min(1, params.min_tokens))
    return hashlib.sha256(msgspec.msgpack.encode(same)).hexdigest()[:_DIGEST_CHARACTERS]


def is_possible(ticket: Ticket, vocab_size: int) -> bool:
    """Whether its tokens are in this vocabulary, and its log-probabilities belong to its first
    token. The front keeps the text of every reported token, so a client must not invent ids."""
    told = ticket.logprobs
    ids = [ticket.first_token] if told is None else told.token_ids
    return ids[:1] == [ticket.first_token] and all(0 <= each < vocab_size for each in ids)


def fits(ticket: Ticket, prompt: str, num_tokens: int, params: SamplingParams) -> bool:
    """Whether the ticket belongs to this prompt, and has the first token that these parameters
    choose, with the log-probabilities that they ask for."""
    if (ticket.num_tokens, ticket.prompt) != (num_tokens, prompt):
        return False
    if params.logprobs is not None:
        told = ticket.logprobs
        # The token itself comes first, the likeliest behind it.
        if told is None or len(told.token_ids) - 1 < params.logprobs:
            return False
    return ticket.params == params_digest(params)
