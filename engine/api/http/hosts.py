# SPDX-License-Identifier: Apache-2.0
"""The check of the Host header, which limits the names under which a server answers requests.

After a browser has loaded a web page, the page's host name can be made to resolve to this machine
(DNS rebinding). The browser then treats the page and a server on this machine as one origin, and
the page's requests have the page's host name in Host. A server that listens on loopback and needs
no key accepts only an IP address, localhost or a configured name in Host."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from ....tiers.wire.listen import host_in, is_loopback, is_no_foreign_name
from ..api_errors import ApiError, error_response
from .api_key import ASKING

ANY = "*"
_SHOWN_CHARACTERS = 64


def hosts_to_check(
    given: Sequence[str], listens_on: str, *, asks_for_key: bool
) -> frozenset[str] | None:
    """Return the allowed values of Host; None for any. `given`: the names of --allowed-hosts."""
    if ANY in given or (not given and (asks_for_key or not is_loopback(listens_on))):
        return None
    return frozenset((*given, listens_on.lower()))


def check_host(scope: Scope, allowed: frozenset[str] | None) -> None:
    """Raise ApiError for a request whose Host header is not allowed."""
    if allowed is None:
        return
    header = next((value for name, value in scope["headers"] if name == b"host"), None)
    if header is None:  # a request of HTTP/1.0, which no browser sends
        return
    name = host_in(header)
    if name in allowed or is_no_foreign_name(name):
        return
    shown = header.decode("latin-1")[:_SHOWN_CHARACTERS]
    raise ApiError(
        f"this server is not {shown!r}: it answers requests to addresses and to localhost; start "
        "it with --allowed-hosts and that name if it is meant",
        status=403,
        code="host_not_allowed",
    )


class HostMiddleware:
    """Answers 403 to requests whose Host header is not allowed."""

    def __init__(self, app: ASGIApp, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ASKING:
            try:
                check_host(scope, self._allowed)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
