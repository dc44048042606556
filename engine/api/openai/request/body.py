# SPDX-License-Identifier: Apache-2.0
"""Reads and decodes a request body, within limits on its size and time.

The caller passes a decoder for the request's type. msgspec decodes the body, because a prompt of
thousands of token ids has to become a list in well under a millisecond."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
from starlette.requests import ClientDisconnect, Request

from .....tiers.settings.suggestions import did_you_mean
from .....tiers.settings.values import MIB
from ...api_errors import ApiError, ClientGone
from ...api_settings import ApiSettings

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(.*?)`(?: - at `(.*)`)?", re.DOTALL)
_WANTS_WHOLE = re.compile(r"Expected `int( \| null)?`, got `float`")
_AT_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_INDEX = re.compile(r"\[[^]]*\]")
JSON = "application/json"
JSON_LINES = "application/x-ndjson"
MAX_QUOTED_CHARACTERS = 64
# Bytes over the body limit that are read and dropped. Most clients read no answer until the whole
# body is sent, and report a network error if the server closes the connection earlier.
DISCARDED_BYTES = 64 * MIB


async def read_request(
    http: Request, settings: ApiSettings, decoder: msgspec.json.Decoder[T]
) -> tuple[T, bytes]:
    """Return the decoded request and its body. Raises like `read_body` and `decode_body`."""
    body = await read_body(http, settings)
    return decode_body(body, decoder), body


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """Return the whole body. Raises ClientGone, and ApiError: 413 for a body over the limit, 408
    for a late body, 415 if the headers do not declare JSON without an encoding."""
    try:
        async with asyncio.timeout(settings.body_timeout_seconds):
            body = await _read(request, settings.max_body_bytes)
            check_kind(request)
            return body
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        seconds = settings.body_timeout_seconds
        message = f"the request body did not arrive within {seconds:g} seconds; send it faster"
        raise ApiError(message, status=408, code="body_timeout") from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > limit
    if too_large and "expect" in request.headers:
        raise _too_large(limit)  # the client waits for an answer before it sends the body
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            too_large = True
            chunks.clear()
        if not too_large:
            chunks.append(chunk)
        elif size > limit + DISCARDED_BYTES:
            break
    if too_large:
        raise _too_large(limit)
    return b"".join(chunks)


def check_kind(request: Request, wanted: str = JSON) -> None:
    """Raise ApiError 415 unless the body's content type is `wanted`. Browsers send some other types
    without a CORS preflight, so any web page could use a server that has no key."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if kind == wanted and encoding == "identity":
        return
    came = f"`Content-Type: {kind[:MAX_QUOTED_CHARACTERS]}`" if kind else "no Content-Type"
    cure = f"with `Content-Type: {wanted}`"
    if kind == wanted:
        came = f"`Content-Encoding: {encoding[:MAX_QUOTED_CHARACTERS]}`"
        cure = "uncompressed"
    message = f"the body came with {came}; send JSON {cure}"
    raise ApiError(message, status=415, code="unsupported_media_type")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the decoded request. Raises ApiError with a bad field's path, as `$.temperature`."""
    if not body.strip():
        raise ApiError("the body is empty; send a JSON object", code="invalid_json")
    try:
        with _collector_paused():
            try:
                return decoder.decode(body)
            except msgspec.ValidationError as error:
                if not _WANTS_WHOLE.match(str(error)):
                    raise
                return _with_whole_numbers(body, decoder)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"the body is not valid JSON: {error}; send one JSON object in UTF-8"
        raise ApiError(message, code="invalid_json") from None
    except RecursionError:
        message = "the body nests lists or objects too deeply; send a flat one"
        raise ApiError(message, code="invalid_json") from None


def _with_whole_numbers(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a body in which integers may be written as `4.0`, as some languages write integers."""
    given = msgspec.json.decode(body)
    if isinstance(given, dict):
        for name, value in given.items():
            if isinstance(value, float) and value.is_integer():
                given[name] = int(value)
    return msgspec.convert(given, decoder.type)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would scan a large body repeatedly. Millions of empty
    lists decode in a quarter of a second with the pause, and in over a second without a pause."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _invalid(message: str, decoder: msgspec.json.Decoder[T]) -> ApiError:
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        return _unknown_field(unknown.group(1), unknown.group(2) or "", decoder)
    missing = _MISSING_FIELD.search(message)
    if missing:
        path = [(missing.group(2) or "").removeprefix("$").removeprefix("."), missing.group(1)]
        param = ".".join(filter(None, path))
        return ApiError(f"{message}; add it", param=param, code="missing_field")
    place = _AT_PATH.search(message)
    param = place.group(1) if place else ""
    if message.startswith("Invalid enum value"):
        message += _known_words(decoder.type, param)
    if not param:
        message += "; send a JSON object"
    return ApiError(message, param=param or None, code="invalid_type")


def _known_words(kind: type, path: str) -> str:
    """Return the allowed strings for the field at `path`, as the end of an error message."""
    here = [msgspec.inspect.type_info(kind)]
    for name in _INDEX.sub("", path).split("."):
        here = [
            field.type
            for struct in _alternatives(here)
            if isinstance(struct, msgspec.inspect.StructType)
            for field in struct.fields
            if field.encode_name == name
        ]
    literals = [t for t in _alternatives(here) if isinstance(t, msgspec.inspect.LiteralType)]
    words = sorted(str(value) for literal in literals for value in literal.values)
    return f"; send {' or '.join(words)}" if words else ""


def _alternatives(types: Iterable[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    """Yield each type; instead of a union its members, and instead of a list its item type."""
    for each in types:
        if isinstance(each, msgspec.inspect.UnionType):
            yield from _alternatives(each.types)
        elif isinstance(each, msgspec.inspect.ListType):
            yield from _alternatives((each.item_type,))
        else:
            yield each


def _unknown_field(name: str, parent: str, decoder: msgspec.json.Decoder[T]) -> ApiError:
    shown = name[:MAX_QUOTED_CHARACTERS]
    place = f"$.{parent}.{shown}" if parent else f"$.{shown}"
    # A field of type Any exists only to be refused, so the message does not suggest such a field.
    fields = [] if parent else msgspec.structs.fields(decoder.type)
    known = [field.encode_name for field in fields if field.type is not Any]
    cure = did_you_mean(shown, known) or "; leave it out"
    message = f"unknown field `{shown}` at `{place}`{cure}"
    param = f"{parent}.{shown}" if parent else shown
    return ApiError(message, param=param, code="unknown_parameter")


def _too_large(limit: int) -> ApiError:
    message = f"the request body is over the limit of {limit} bytes; send less in one request"
    return ApiError(message, status=413, code="body_too_large")
