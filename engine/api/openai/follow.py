# SPDX-License-Identifier: Apache-2.0
"""POST /follow/v1/completions and /follow/v1/chat/completions: prepare a node for a later request
whose prompt another node computes now.

The body is the body of the later request. The cache tiers *follow* the prompt: the tiers load the
prompt's KV blocks while the other node stores the blocks. The engine computes nothing."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from ..api_errors import ApiError
from ..front import Front
from .request.body import JSON
from .response.generation import Generation

FOLLOW = "/follow"  # the prefix of the paths of these two routes


class Followed(msgspec.Struct):
    """The reply to a request of /follow."""

    followed: int  # number of prompts whose KV blocks the tiers load
    object: str = "follow"


async def follow(front: Front, generations: Iterable[Generation]) -> ASGIApp:
    """Make the engine core's tiers follow each prompt. Raises ApiError for a refused prompt."""
    count = 0
    for generation in generations:
        if generation.child:
            continue
        message = msgspec.json.encode(generation.request).decode()
        try:
            count += bool(await front.client.call("follow", message))
        except ValueError as error:
            raise ApiError(str(error), code="invalid_value") from None
    return Response(msgspec.json.encode(Followed(count)), media_type=JSON)
