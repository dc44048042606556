# SPDX-License-Identifier: Apache-2.0
"""Makes a request's bodies for its prefill and decode node, and the facts for choosing the nodes.

JSON fields are kept as the client's bytes, so a decode node reads exactly the client's text. A body
that is not a JSON object is sent unchanged to a decode node, which reports the error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..api.http.http_protocol import PARTS_PATH
from .nodes import Facts

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATING = (COMPLETIONS, CHAT)
_WITH_PROMPT = (COMPLETIONS, PARTS_PATH)

# English text has about four bytes of UTF-8 per token.
BYTES_PER_TOKEN = 4
# A guess, as the number depends on the model: a photo has some 800 to 1,300 tokens in most models.
TOKENS_PER_PICTURE = 1024
_PICTURES = ("image_url", "input_image")  # types of content parts

# A prompt whose JSON has more commas is not decoded, which would block the event loop for seconds.
MAX_PARTS = 65536
_IN_LISTS_OF_IDS = b"0123456789-, \t\r\n"

KV_PARAMS = "kv_transfer_params"
# Request fields without a use for the single token that a prefill node generates.
_NOT_FOR_PREFILL = (
    "best_of", "early_stopping", "echo", "length_penalty", "logprobs", "min_completion_tokens",
    "min_tokens", "prompt_logprobs", "return_token_ids", "stream_options", "top_logprobs",
    "use_beam_search",
)  # fmt: skip
# Request fields that determine the first token's log-probabilities.
_OF_FIRST_TOKEN = ("logprobs", "top_logprobs")
_ONE, _FALSE, _NULL = msgspec.Raw(b"1"), msgspec.Raw(b"false"), msgspec.Raw(b"null")
_ASK_FOR_REMOTE_DECODE = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')

Fields = Mapping[str, msgspec.Raw]


def read_fields(body: bytes) -> Fields:
    """Return the undecoded fields of a JSON object; {} if `body` is not a JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def read_facts(path: str, fields: Fields) -> Facts:
    """Return the facts about a request by which the request's node is chosen."""
    raw = bytes(fields.get("prompt" if path in _WITH_PROMPT else "messages", _NULL))
    if raw.count(b",") > MAX_PARTS:
        tokens, is_exact = _tokens_of_many(raw)
    elif path in _WITH_PROMPT:
        tokens, is_exact = _prompt_tokens(_decode(fields, "prompt"))
    else:
        tokens, is_exact = _chat_tokens(_decode(fields, "messages")), False
    return Facts(path, tokens, is_exact, fields)


def wants_prefill(facts: Facts, above: int) -> bool:
    """Return whether a prefill node computes the prompt before a decode node gets the request. The
    prompt must have more than `above` tokens, and the request no `kv_transfer_params` of another
    router. A request for prompt log-probabilities gets no prefill node, because the decode node
    must compute the whole prompt anyway. A beam search runs wholly on one node."""
    return (
        facts.prompt_tokens > above
        and _is_null(facts.fields, KV_PARAMS)
        and _is_null(facts.fields, "prompt_logprobs")
        and bytes(facts.fields.get("use_beam_search", _NULL)).strip() != b"true"
    )


def prefill_body(fields: Fields, *, with_kv_params: bool) -> bytes:
    """Return a prefill node's request: one token, no stream. With `with_kv_params`, the decode node
    reuses the token, so the request keeps the client's log-probability fields."""
    body = {name: value for name, value in fields.items() if name not in _NOT_FOR_PREFILL}
    if with_kv_params:
        body |= {name: fields[name] for name in _OF_FIRST_TOKEN if name in fields}
        least = _decode(fields, "min_tokens")
        if isinstance(least, int) and least > 0:
            body["min_tokens"] = _ONE
    body |= {"max_tokens": _ONE, "stream": _FALSE}
    for name in ("max_completion_tokens", "n"):
        if not _is_null(body, name):
            body[name] = _ONE
    if with_kv_params:
        body[KV_PARAMS] = _ASK_FOR_REMOTE_DECODE
    return msgspec.json.encode(body)


def handed_over(answer: bytes) -> msgspec.Raw | None:
    """Return the `kv_transfer_params` of a prefill node's answer, or None."""
    fields = read_fields(answer)
    params = fields.get(KV_PARAMS)
    return None if params is None or _is_null(fields, KV_PARAMS) else params


def decode_body(fields: Fields, params: msgspec.Raw) -> bytes:
    """Return the client's request with the `kv_transfer_params` of the prefill node."""
    return msgspec.json.encode({**fields, KV_PARAMS: params})


def _is_null(fields: Fields, name: str) -> bool:
    return bytes(fields.get(name, _NULL)).strip() == b"null"


def _decode(fields: Fields, name: str) -> Any:
    try:
        return msgspec.json.decode(fields[name]) if name in fields else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _tokens_of_many(raw: bytes) -> tuple[int, bool]:
    """Return the number of tokens of an undecoded prompt, and whether the number is exact."""
    if raw.translate(None, _IN_LISTS_OF_IDS) == b"[]":
        return raw.count(b",") + 1, True
    return len(raw) // BYTES_PER_TOKEN, False


def _prompt_tokens(prompt: Any) -> tuple[int, bool]:
    """Return the number of tokens of the longest prompt, and whether the number is exact."""
    if isinstance(prompt, str):
        return len(prompt.encode()) // BYTES_PER_TOKEN, False
    if not isinstance(prompt, list) or not prompt:
        return 0, False
    if all(isinstance(each, int) for each in prompt):
        return len(prompt), True
    longest = (0, False)
    for each in prompt:
        if isinstance(each, (str, list)):
            longest = max(longest, _prompt_tokens(each))
    return longest


def _chat_tokens(messages: Any) -> int:
    """Return a guess of the tokens of a conversation's texts and pictures."""
    if not isinstance(messages, list):
        return 0
    num_bytes = num_pictures = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            if not isinstance(part, dict):
                continue
            if isinstance(text := part.get("text"), str):
                num_bytes += len(text.encode())
            num_pictures += part.get("type") in _PICTURES
    return num_bytes // BYTES_PER_TOKEN + num_pictures * TOKENS_PER_PICTURE
