# SPDX-License-Identifier: Apache-2.0
"""The check of the API key: an ASGI middleware for all routes that are not in `open_paths`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from ..api_errors import ApiError, error_response

HEALTH_PATH = "/health"  # health probes request this path without a key
NODE_PATH = "/node"  # routers request this path without a key
ASKING = ("http", "websocket")  # types of ASGI scopes that are a client's request


class ApiKeyMiddleware:
    """Answers 401 to a request without the header `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] not in ASKING or scope["path"] in self._open_paths
        if is_open or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        message = "a valid API key is needed: send it as `Authorization: Bearer <key>`"
        error = ApiError(message, status=401, kind="authentication_error", code="invalid_api_key")
        await error_response(error)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
        scheme, _, key = given.partition(b" ")
        # All digests have one length, so the time of the comparison does not reveal the key.
        same = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return same and scheme.lower() == b"bearer"
