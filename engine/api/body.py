# SPDX-License-Identifier: Apache-2.0
"""Reads and decodes a request body, within its limits.

Knows nothing of the fields: the type to decode into is given. Decoding is msgspec's, because a
prompt of thousands of token ids has to become a list in well under a millisecond.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ..config import MIB
from ..nearest import did_you_mean
from .errors import ApiError, ClientGone
from .settings import ApiSettings

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(.*?)`(?: - at `(.*)`)?", re.DOTALL)
_AT_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
MAX_QUOTED_CHARACTERS = 64
# Most clients read no answer before they have sent everything, and a connection that is closed
# before that looks like a fault of the network. So this much beyond the limit is read, and dropped.
DISCARDED_BYTES = 64 * MIB


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """The whole body. Raises ApiError 413 where it is over the limit, 408 where it does not arrive
    in time, and ClientGone where the client leaves before the end."""
    try:
        async with asyncio.timeout(settings.body_timeout_seconds):
            return await _read(request, settings.max_body_bytes)
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
        raise _too_large(limit)  # the client waits for a word before it sends anything
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


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The typed request. Raises ApiError naming the place, such as `$.temperature`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), decoder) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        message = "the body nests lists or objects too deeply; send a flat one"
        raise ApiError(message, code="invalid_json") from None


def _invalid(message: str, decoder: msgspec.json.Decoder[T]) -> ApiError:
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        return _unknown_field(unknown.group(1), unknown.group(2) or "", decoder)
    missing = _MISSING_FIELD.search(message)
    if missing:
        name = missing.group(1)
        return ApiError(f"{message}; add it", param=name, code="missing_field")
    place = _AT_PATH.search(message)
    return ApiError(message, param=place.group(1) if place else None, code="invalid_type")


def _unknown_field(name: str, parent: str, decoder: msgspec.json.Decoder[T]) -> ApiError:
    shown = name[:MAX_QUOTED_CHARACTERS]
    place = f"$.{parent}.{shown}" if parent else f"$.{shown}"
    known = [] if parent else [field.encode_name for field in msgspec.structs.fields(decoder.type)]
    cure = did_you_mean(shown, known) or "; leave it out"
    message = f"unknown field `{shown}` at `{place}`{cure}"
    param = f"{parent}.{shown}" if parent else shown
    return ApiError(message, param=param, code="unknown_parameter")


def _too_large(limit: int) -> ApiError:
    message = f"the request body is over the limit of {limit} bytes; send less in one request"
    return ApiError(message, status=413, code="body_too_large")
