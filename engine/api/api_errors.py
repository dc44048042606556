# SPDX-License-Identifier: Apache-2.0
"""The errors that clients get, in the form of OpenAI's API, and the conversion of exceptions.

Any code that a route calls may raise `ApiError`. `to_api_error` converts every other exception to
an `ApiError`, so no client gets a traceback."""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..client.base import EngineDead

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
ENGINE = "engine_error"
MAX_MESSAGE_CHARACTERS = 1000

_BY_STATUS: dict[int, tuple[str, str]] = {
    404: ("not_found", "there is no such route: the API lies under /v1"),
    405: ("method_not_allowed", "the route exists but not for this method"),
}


class ApiError(Exception):
    """An error answer: the HTTP status and the fields of OpenAI's error object. `retry_seconds`:
    the time after which the same request may succeed."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: int | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARACTERS:  # a message may quote the client's input
            message = message[:MAX_MESSAGE_CHARACTERS] + "..."
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_seconds = retry_seconds


class ClientGone(Exception):
    """The client has closed its connection, so no answer is sent."""


class ErrorDetail(msgspec.Struct):
    """The fields of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def to_api_error(error: BaseException) -> ApiError:
    """Return the error answer for any exception. An unexpected exception is also logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDead):
        message = f"the engine is not running: {error}"
        return ApiError(message, status=503, kind=ENGINE, code="engine_dead")
    if isinstance(error, TimeoutError):
        message = "the request took longer than the server allows and was aborted"
        return ApiError(message, status=504, kind="timeout_error", code="timeout")
    if isinstance(error, HTTPException):
        code, text = _BY_STATUS.get(error.status_code, (None, str(error.detail)))
        return ApiError(text, status=error.status_code, code=code)
    logger.error("unhandled error in a request", exc_info=error)
    return ApiError(
        "the server failed on this request; its log has the reason",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def encode_error(error: ApiError) -> bytes:
    detail = ErrorDetail(error.message, error.kind, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def error_response(error: ApiError) -> Response:
    """Return the HTTP response. An error 408 or 413 closes the connection, as bytes are unread."""
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"
    if error.retry_seconds is not None:
        headers["Retry-After"] = str(error.retry_seconds)
    body = encode_error(error)
    return Response(body, error.status, headers=headers, media_type="application/json")
