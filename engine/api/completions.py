# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions: prompts in, text and token ids out.

Knows nothing of chat. Every prompt is checked before the first one starts.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import msgspec
from msgspec import UnsetType
from starlette.requests import Request
from starlette.types import ASGIApp

from .answer import Answer, Part
from .body import decode_body, read_body
from .front import DEFAULT_COMPLETION_TOKENS, Front
from .generation import Generation
from .protocol import Completion, CompletionChoice, CompletionRequest, Usage

_decoder = msgspec.json.Decoder(CompletionRequest)


class CompletionAnswer(Answer):
    """The form is the same whole and in pieces."""

    def whole(self, parts: list[Part], usage: Usage) -> Completion:
        return self.chunk(parts, usage)

    def chunk(self, parts: list[Part], usage: Usage | UnsetType | None) -> Completion:
        choices = [
            CompletionChoice(
                part.index,
                part.text,
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
                prompt_token_ids=part.prompt_token_ids,
                token_ids=part.token_ids,
            )
            for part in parts
        ]
        name = self.front.model_name
        return Completion(self.answer_id, "text_completion", self.created, name, choices, usage)


async def create_completion(front: Front, http: Request) -> ASGIApp:
    """The route."""
    arrival_seconds = time.monotonic()
    request = decode_body(await read_body(http, front.settings), _decoder)
    front.check(request)
    prompts = await front.resolve_prompts(request.prompt)
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    generations = _generations(front, request, prompts, answer_id, arrival_seconds)
    return await CompletionAnswer(front, answer_id, request, generations).respond(http)


def _generations(
    front: Front,
    request: CompletionRequest,
    prompts: Sequence[bytes],
    answer_id: str,
    arrival_seconds: float,
) -> list[Generation]:
    generations = []
    for index, prompt in enumerate(prompts):
        params = front.sampling_params(
            request, prompt, request.max_tokens, DEFAULT_COMPLETION_TOKENS
        )
        message = front.make_request(f"{answer_id}-{index}", prompt, params, request)
        generations.append(Generation(index, message, arrival_seconds))
    return generations
