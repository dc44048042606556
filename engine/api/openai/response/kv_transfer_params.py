# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params`: a field of requests and answers. Routers copy it from a prefill node's
answer into the request for a decode node.

The keys are the keys of routers for vLLM nodes. These routers pass on unknown keys, so this server
puts its ticket under `stratakv`. Routers for SGLang nodes ask both nodes at once and name a
`bootstrap_room`. Either kind may name addresses, for other software. This server opens no
connection to them, because any client could have written them.
"""

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
    """The request's extras for the engine, from a router's parameters. A ticket is ignored unless
    the request has one prompt and one answer (`is_alone`). Raises ApiError for invalid
    parameters."""
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
    """The parameters without a `min_tokens` of 1 that a router added. Routers that send
    `remote_engine_id` set it for the one token of a prefill node. With it no token may end the
    answer, though the client's request may allow that. A first token chosen so would not fit the
    client's request."""
    given = request.kv_transfer_params or {}
    is_theirs = given.get("do_remote_decode") and "remote_engine_id" in given
    if not is_theirs or (params.min_tokens, params.max_tokens) != (1, 1):
        return params
    return msgspec.structs.replace(params, min_tokens=0)


def params_for_decode(request_id: str, ticket: Ticket) -> Params:
    """The `kv_transfer_params` of a prefill node's answer, for the decode node."""
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
    """Whether another node computes the prompt now. Routers that ask both nodes at once join the
    two requests by the id of a transfer, or of the other request."""
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
        return None  # made by other software: its blocks are found by key or not at all
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
    """Whether the ticket's fields are within the sizes of real tickets."""
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
