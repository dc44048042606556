# SPDX-License-Identifier: Apache-2.0
"""A server that ends while a TLS connection is lost: the transport has let go of its protocol and
the server has not been told yet."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from stratakv.engine.api.http.http_protocol import HttpProtocol


class LostTransport:
    """As asyncio's over TLS, between the loss and the word of it."""

    _ssl_protocol = None
    is_aborted = False

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return int(self._ssl_protocol._get_write_buffer_size())  # type: ignore[attr-defined]

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.parametrize("is_told", [False, True])
def test_a_connection_that_is_lost_ends_no_shutdown(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(H11Protocol, "shutdown", lambda self: None)
    protocol = object.__new__(HttpProtocol)
    transport = LostTransport()
    if is_told:
        transport._ssl_protocol = SimpleNamespace(_get_write_buffer_size=lambda: 0)  # type: ignore[assignment]
    protocol.transport, protocol.scheme = transport, "https"  # type: ignore[assignment]
    protocol.shutdown()
    assert transport.is_aborted is is_told
