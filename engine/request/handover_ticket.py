# SPDX-License-Identifier: Apache-2.0
"""The ticket of a prompt: data from the node that computed the prompt for the node that answers it.

A ticket grants no access to blocks. The answering node computes the block hashes from its own
prompt, model and tenant, so a ticket of another tenant finds no blocks. A ticket that matches the
request saves computing the prompt's last token again; a ticket that does not match is ignored."""

from __future__ import annotations

import hashlib

import msgspec

from .logprobs import PositionLogprobs
from .sampling_params import SamplingParams

# The defaults of parameters without influence on the first token.
_LATER = {
    "max_tokens": 1, "stop": (), "include_stop_str_in_output": False, "skip_special_tokens": True,
    "bad_words": (), "logprobs": None, "prompt_logprobs": None, "repetition_detection": None,
    "skip_reading_prefix_cache": False, "routed_experts_prompt_start": None,
}  # fmt: skip
# The defaults of parameters that engines from before 2026-11-30 lack. A parameter with its default
# is left out of the digest, so that old and new nodes accept each other's tickets. Every new field
# of SamplingParams must be added here.
_ADDED = {"routed_experts_prompt_start": None}
_DIGEST_CHARACTERS = 32


class Ticket(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, frozen=True
):
    """The digest of a prompt whose blocks other nodes can load, and its answer's first token."""

    num_tokens: int  # number of tokens of the prompt
    prompt: str  # hexadecimal digest of tokens, model, tenant and salt
    params: str  # `params_digest` of the request
    first_token: int
    logprobs: PositionLogprobs | None = None  # of the answer's first token, if requested


def params_digest(params: SamplingParams) -> str:
    """Return a digest of sampling parameters. Parameters have equal digests if they differ only in
    fields without influence on the first output token."""
    # With `min_tokens` above 0, end tokens are banned as the first token.
    stops = {} if params.min_tokens else {"stop_token_ids": (), "ignore_eos": False}
    same = msgspec.structs.replace(params, **_LATER, **stops, min_tokens=min(1, params.min_tokens))
    told = msgspec.structs.asdict(same)
    for name, default in _ADDED.items():
        if told[name] == default:
            del told[name]
    return hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()[:_DIGEST_CHARACTERS]


def is_possible(ticket: Ticket, vocab_size: int) -> bool:
    """Whether the ticket's tokens are in the vocabulary and its log-probabilities start with its
    first token. The front caches the text of every reported token id, so invented ids must be
    refused."""
    told = ticket.logprobs
    ids = [ticket.first_token] if told is None else told.token_ids
    return ids[:1] == [ticket.first_token] and all(0 <= each < vocab_size for each in ids)


def fits(ticket: Ticket, prompt: str, num_tokens: int, params: SamplingParams) -> bool:
    """Whether the ticket belongs to this prompt, its first token was chosen with equivalent
    sampling parameters, and it has the log-probabilities that `params.logprobs` asks for."""
    if (ticket.num_tokens, ticket.prompt) != (num_tokens, prompt):
        return False
    if params.logprobs is not None:
        told = ticket.logprobs
        # The first entry is the token itself; the likeliest tokens follow.
        if told is None or len(told.token_ids) - 1 < params.logprobs:
            return False
    return ticket.params == params_digest(params)
