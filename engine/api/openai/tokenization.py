# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize: the token ids of a text, and the text of token ids.

A text may be longer than the context, because no tokens are generated."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...request.request import pack_token_ids, unpack_token_ids
from ..api_errors import ApiError
from ..front import Front
from ..picture_reader import PictureReader
from .request.body import read_request
from .request.conversation import render
from .request.protocol import ChatMessage, DetokenizeRequest, TokenizeRequest
from .response.replies import DetokenizedPrompt, Tokens
from .response.tools import template_tools

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_OF_MESSAGES = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(front: Front, http: Request) -> ASGIApp:
    request, body = await read_request(http, front.settings, _tokenize_decoder)
    front.check_model(request.model)
    if request.messages is not None:
        front.dropped.report_unknown(body)
    text, special = await _text(front, request)
    if request.add_special_tokens is not None:
        special = request.add_special_tokens
    if request.messages is not None and front.pictures is not None:
        ids = await _ids_with_pictures(front, front.pictures, request.messages, text, special)
    else:
        param = "prompt" if request.messages is None else "messages"
        ids = await _encode(front, text, special, param)

    def answer() -> bytes:
        spellings = [front.texts.spelling(i) for i in ids] if request.return_token_strs else None
        return msgspec.json.encode(Tokens(len(ids), front.max_model_len, ids, spellings))

    return _json(await front.off_loop(answer, len(ids)))


async def detokenize(front: Front, http: Request) -> ASGIApp:
    request, _ = await read_request(http, front.settings, _detokenize_decoder)
    front.check_model(request.model)
    tokenizer = front.need_tokenizer("tokens", "nothing can be detokenized")
    ids = request.tokens

    def answer() -> bytes:
        front.check_vocabulary(ids, "tokens")
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return msgspec.json.encode(DetokenizedPrompt(text))

    return _json(await front.off_loop(answer, len(ids)))


async def _text(front: Front, request: TokenizeRequest) -> tuple[str, bool]:
    """Return the text, and whether the tokenizer must still add special tokens."""
    if (request.prompt is None) == (request.messages is None):
        which = "neither" if request.prompt is None else "both"
        message = f"/tokenize takes `prompt` or `messages`, and {which} came; send one of them"
        raise ApiError(message, param="prompt", code="invalid_value")
    if request.messages is not None:
        tools = template_tools(front.settings, request.tools or [])
        return await render(front, request.messages, request, tools), False
    for name in _OF_MESSAGES:
        if getattr(request, name) is not None:
            message = f"`{name}` is for `messages`, and a `prompt` came; leave it out"
            raise ApiError(message, param=name, code="invalid_value")
    return request.prompt or "", True


async def _encode(front: Front, text: str, special: bool, param: str) -> list[int]:
    (ids,) = await front.encode_texts(
        [text], add_special_tokens=special, max_tokens=None, param=param
    )
    return ids


async def _ids_with_pictures(
    front: Front, reader: PictureReader, messages: list[ChatMessage], text: str, special: bool
) -> list[int]:
    """Return the token ids of a conversation's prompt with its pictures, as a chat has them."""
    pictures, reservation = await reader.read_pictures(messages, front.max_prompt_tokens)
    ids = await _encode(front, reader.expand_text(text, pictures), special, "messages")
    prompt, _ = reader.place_items(pack_token_ids(ids), pictures)
    reservation.free_bytes()
    return unpack_token_ids(prompt)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
