# SPDX-License-Identifier: Apache-2.0
"""Reads and makes `kv_transfer_params`, a field that routers copy from a prefill node's answer to
the request for a decode node.

The field has the keys that routers for vLLM nodes use. Routers for vLLM pass on unknown keys, so
this server adds a *ticket* under the key `stratakv`. Routers for SGLang nodes send a request to a
prefill and a decode node at once, with a `bootstrap_room`. This server opens no connection to an
address in the field, because any client could have written the address."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ....request.core_messages import NO_EXTRAS, RequestExtras
from ....request.handover_ticket import Ticket
from ....request.logprobs import MAX_LOGPROBS
from ....request.sampling_params import SamplingParams
from ...api_errors import ApiError
from ..request.protocol import SamplingFields

FIELD = "kv_transfer_params"
OURS = "stratakv"
_MAX_DIGEST_CHARACTERS = 64
_ENGINE_ID = uuid.uuid4().hex

Params = dict[str, Any]


def read_params(
    params: Params | None, *, is_alone: bool, asked_elsewhere: bool = False
) -> RequestExtras | None:
    """Return the extras for the engine, from a router's parameters. A ticket is ignored unless the
    request has one prompt and one answer (`is_alone`). Raises ApiError for invalid parameters."""
    if not params:
        return RequestExtras(asked_elsewhere=True) if asked_elsewhere else None
    asks = _switch(params, "do_remote_decode")
    brings = _switch(params, "do_remote_prefill")
    if asks and brings:
        message = (
            f"`{FIELD}` asks for `do_remote_decode` and for `do_remote_prefill`; a node does one "
            "or the other"
        )
        raise ApiError(message, param=FIELD, code="invalid_value")
    ticket = _ticket(params) if brings else None
    extras = RequestExtras(
        hand_over=asks,
        ticket=ticket if is_alone else None,
        computed_elsewhere=not asks and ticket is None and _names_prefill(params),
        asked_elsewhere=asked_elsewhere,
    )
    return None if extras == NO_EXTRAS else extras


def without_routers_least(params: SamplingParams, request: SamplingFields) -> SamplingParams:
    """Return the parameters without a `min_tokens` of 1 that a router added. Routers that send
    `remote_engine_id` add `min_tokens` to a prefill node's request for one token. `min_tokens`
    forbids tokens that end an answer, which might be the right first token."""
    given = request.kv_transfer_params or {}
    is_theirs = given.get("do_remote_decode") and "remote_engine_id" in given
    if not is_theirs or (params.min_tokens, params.max_tokens) != (1, 1):
        return params
    return msgspec.structs.replace(params, min_tokens=0)


def params_for_decode(request_id: str, ticket: Ticket) -> Params:
    """Return the `kv_transfer_params` in a prefill node's answer, which the decode node gets."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],
        "remote_engine_id": _ENGINE_ID,
        "remote_request_id": request_id,
        "remote_host": "",
        "remote_port": 0,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": ticket.num_tokens,
        OURS: msgspec.to_builtins(ticket),
    }


def _names_prefill(params: Params) -> bool:
    """Return whether another node computes the prompt now. Routers that send a request to a prefill
    and a decode node at once add a transfer id, or the id of the prefill node's request."""
    prefiller = params.get("remote_prefiller")
    if isinstance(prefiller, dict):
        return bool(prefiller.get("kv_request_id"))
    return bool(params.get("do_remote_prefill") and params.get("transfer_id"))


def _switch(params: Params, name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    message = f"`{FIELD}.{name}` is true or false; send one of them, or leave it out"
    raise ApiError(message, param=f"{FIELD}.{name}", code="invalid_type")


def _ticket(params: Params) -> Ticket | None:
    given = params.get(OURS)
    if given is None:
        return None  # other software made the parameters, so there is no ticket
    try:
        ticket = msgspec.convert(given, Ticket)
    except msgspec.ValidationError as error:
        message = f"`{FIELD}.{OURS}` is no ticket of a prefill node: {error}; pass it on unchanged"
        raise ApiError(message, param=f"{FIELD}.{OURS}", code="invalid_value") from None
    if not _can_be(ticket):
        message = f"`{FIELD}.{OURS}` holds what no ticket does; pass it on unchanged"
        raise ApiError(message, param=f"{FIELD}.{OURS}", code="invalid_value")
    return ticket


def _can_be(ticket: Ticket) -> bool:
    """Return whether a ticket's fields have sizes that are possible in a ticket of a server."""
    numbers, told = [ticket.num_tokens, ticket.first_token], ticket.logprobs
    if told is not None:
        count = len(told.token_ids)
        if not 1 <= count <= MAX_LOGPROBS + 1 or len(told.logprobs) != count:
            return False
        numbers += [*told.token_ids, told.rank]
    digests = (ticket.prompt, ticket.params)
    return all(len(digest) <= _MAX_DIGEST_CHARACTERS for digest in digests) and all(
        0 <= number < 2**31 for number in numbers
    )
