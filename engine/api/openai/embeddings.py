# SPDX-License-Identifier: Apache-2.0
"""POST /v1/embeddings: answers each prompt with a vector.

All prompts of a request are checked before the engine gets any prompt. A vector is made from the
model's hidden states as `--pooling` says, and has the length 1 unless `normalize` is false."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from contextlib import aclosing
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...request.core_messages import AddRequest, RequestExtras
from ...request.pooling import EMBEDDING_PARAMS, Vector, finish_vector, with_pooling
from ..api_errors import ENGINE, ApiError
from ..front import Front
from .request.body import read_request
from .request.checks import check_ids_of_request
from .request.protocol import EmbeddingRequest
from .response.answer import Tally, run_all
from .response.generation import Generation, tenant_of
from .response.replies import Usage, now
from .response.streaming import until_disconnect

_decoder = msgspec.json.Decoder(EmbeddingRequest)
_encoder = msgspec.json.Encoder()


class Embedding(msgspec.Struct):
    """The vector of one prompt: a list of numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


async def create_embeddings(front: Front, http: Request) -> ASGIApp:
    arrival_seconds = time.monotonic()
    request, _ = await read_request(http, front.settings, _decoder)
    request.model = front.check_model(request.model)
    adapter = "" if request.model == front.model_name else request.model
    check_ids_of_request(request.cache_salt, request.request_id)
    try:
        front.dimensions.check_asked_count(request.dimensions, front.client.ready.hidden_size)
    except ValueError as error:
        raise ApiError(str(error), param="dimensions", code="invalid_value") from None
    prompts = await front.resolve_prompts(
        request.input,
        add_special_tokens=request.add_special_tokens is not False,
        truncate_to=request.truncate_prompt_tokens,
        max_tokens=1,
        param="input",
    )
    own_id, tenant = uuid.uuid4().hex, tenant_of(front, http)
    generations = []
    for index, prompt in enumerate(prompts):
        message = AddRequest(
            f"embd-{own_id}-{index}",
            prompt,
            EMBEDDING_PARAMS,
            cache_salt=request.cache_salt or "",
            tenant=tenant,
            extras=RequestExtras(adapter=adapter) if adapter else None,
        )
        message = with_pooling(message, front.pooling)
        generations.append(
            Generation(index, message, keeps_tokens=False, arrival_seconds=arrival_seconds)
        )
    async with asyncio.timeout(front.settings.request_timeout_seconds):
        work = _collect_all(front, request, generations, request.request_id or own_id)
        body = await until_disconnect(http.receive, work, front.in_flight.ended)
    return Response(body, media_type="application/json")


async def _collect_all(
    front: Front, request: EmbeddingRequest, generations: list[Generation], answer_id: str
) -> bytes:
    tally = Tally.from_generations(front, generations)
    found: dict[int, bytes | None] = {}

    async def collect(generation: Generation) -> None:
        async with aclosing(generation.run(front)) as outputs:
            async for output in outputs:
                tally.add(generation, output)
                if output.embedding is not None:
                    found[generation.index] = output.embedding

    await run_all(generations, collect)

    def encode() -> bytes:
        data = [
            Embedding("embedding", each.index, _in_form(request, found.get(each.index)))
            for each in generations
        ]
        name, usage = str(request.model), tally.usage()
        return _encoder.encode(EmbeddingList(f"embd-{answer_id}", "list", now(), name, data, usage))

    try:
        return await front.off_loop(encode, len(found) * front.client.ready.hidden_size)
    except ValueError as error:
        raise ApiError(str(error), status=500, kind=ENGINE, code="no_embedding") from None


def _in_form(request: EmbeddingRequest, data: bytes | None) -> list[float] | str:
    """Return a vector as a list, or as base64 if requested. Raises ValueError for a bad vector."""
    normalize = request.normalize is not False
    vector: Vector = finish_vector(data, normalize=normalize, dimensions=request.dimensions)
    numbers = vector.astype("<f4")
    if request.encoding_format == "base64":
        return base64.b64encode(numbers.tobytes()).decode()
    listed: list[float] = numbers.tolist()
    return listed
