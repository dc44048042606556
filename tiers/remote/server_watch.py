# SPDX-License-Identifier: Apache-2.0
"""ServerWatch: a stream on which a server reports stored and removed blocks. The reports update the
link's `presence`, which otherwise only look-ups, loads and stores update."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import grpc

from ..errors import TierError
from ..wire.frames import WireError, unpack_keys
from .server_link import ServerLink

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0  # between the end of a watch and the next watch


class ServerWatch:
    """A watch of one server until `close`. A thread calls `news` with keys of stored blocks."""

    def __init__(self, link: ServerLink, news: Callable[[Sequence[bytes]], None]) -> None:
        self._link = link
        self._news = news
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._watch_for_ever, name="stratakv-remote-watch", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the watch. The link must be closed first, which ends the watch's call."""
        self._closed.set()
        self._thread.join(_PAUSE_SECONDS + 1)

    def _watch_for_ever(self) -> None:
        while not self._closed.is_set():
            try:
                if self._link.wait_up(_PAUSE_SECONDS):
                    self._read_events()
            except (grpc.RpcError, TierError, WireError) as error:
                log.debug("%s is not watched for now: %s", self._link.address, error)
            except Exception:  # the thread must go on: no other one watches
                log.exception("%s is not watched for now", self._link.address)
            self._closed.wait(_PAUSE_SECONDS)

    def _read_events(self) -> None:
        presence = self._link.presence
        for event in self._link.stream_events():
            if event.cleared or event.lost:
                presence.clear()
            keys: Sequence[bytes] = ()
            for packed, is_here in ((event.removed, False), (event.stored, True)):
                keys = unpack_keys(packed, len(packed)) if packed else ()
                presence.learn(keys, [is_here] * len(keys))
            self._news(keys)
