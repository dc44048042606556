# SPDX-License-Identifier: Apache-2.0
"""The check of the Origin header, which limits the web pages that may open a websocket.

A browser lets a web page open a websocket to any host, without the check (CORS) that applies to
other requests to another origin. The server itself refuses a websocket from a web page whose other
requests CORS would refuse. Programs other than browsers send no Origin."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import Scope

from ..api_errors import ApiError
from ..api_settings import CrossOrigin

ANY = "*"
_SHOWN_CHARACTERS = 64


def check_origin(scope: Scope, allowed: CrossOrigin | None) -> None:
    """Raise ApiError for a web page whose origin is neither this server nor in `allowed`."""
    given = [value for name, value in scope["headers"] if name == b"origin"]
    if not given:
        return
    origin = given[0].decode("latin-1")
    if len(given) == 1:
        names = () if allowed is None else allowed.origins
        if ANY in names or origin in names or _is_own(origin, scope):
            return
    raise ApiError(
        f"pages of {origin[:_SHOWN_CHARACTERS]!r} may not open websockets here; start the server "
        "with --allowed-origins and that origin if they are meant to",
        status=403,
        code="origin_not_allowed",
    )


def _is_own(origin: str, scope: Scope) -> bool:
    """Return whether the page is of this host and port; a proxy may have changed the scheme."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    try:
        page = urlsplit(origin)
    except ValueError:
        return False
    return page.scheme in ("http", "https") and hosts == [page.netloc] and bool(page.netloc)
