# SPDX-License-Identifier: Apache-2.0
"""A shelf: the tiers for LMCache's chunks of one layout. The first chunk or look-up of the layout
opens the tiers, in a separate thread, because opening reads an index and faults in memory.

    opening ──► open                     tasks that came meanwhile go on
       │  └───► refused                  for good: every chunk is a miss, and the reason is logged
       └──late► every chunk is a miss until it is open"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path

from ...tiers.errors import TierError
from ...tiers.settings.values import ConfigError
from ..chunks.build import open_chunk_tiers
from ..chunks.chunk_settings import ChunkSettings
from ..chunks.tiers import ChunkTiers
from .identity import ChunkIdentity, ChunkKeys

log = logging.getLogger(__name__)

HOST = "LMCache"
OPEN_SECONDS = 30.0
_FOLDER = re.compile(r"[0-9a-f]{16}")

Waiter = Callable[[ChunkTiers | None], None]


class Shelf:
    """Opens and holds the tiers of one layout. Thread-safe."""

    def __init__(self, identity: ChunkIdentity, settings: ChunkSettings, layouts: int) -> None:
        self.identity = identity
        self.keys = ChunkKeys(identity.root())
        self.folder = identity.root().hex()[:16]
        self.tiers: ChunkTiers | None = None
        self.refusal = ""
        self._settings = settings
        self._layouts = layouts
        self._lock = threading.Lock()
        self._waiters: list[Waiter] | None = []  # None: tasks no longer wait
        self._closed = False
        self._timer = threading.Timer(OPEN_SECONDS, self._late)
        self._timer.daemon = True
        self._thread = threading.Thread(target=self._open_tiers, name="stratakv-open", daemon=True)
        self._timer.start()
        self._thread.start()

    def when_open(self, waiter: Waiter) -> None:
        """Call `waiter` with the tiers once they are open; with None if that fails or is late."""
        with self._lock:
            tiers = self.tiers
            if tiers is None and self._waiters is not None:
                self._waiters.append(waiter)
                return
        waiter(tiers)

    def close(self, seconds: float) -> None:
        """Close the tiers, now or as soon as they are open. Idempotent."""
        with self._lock:
            self._closed = True
            tiers, self.tiers = self.tiers, None
        self._notify_waiters(None)
        if tiers is not None:
            tiers.close(seconds)

    def _open_tiers(self) -> None:
        tiers = None
        try:
            for path in self._settings.ssd.paths:
                check_folders(path, self.folder, self._layouts)
            identity = self.identity
            tiers = open_chunk_tiers(
                self._settings, identity.chunk_bytes, identity.namespace(), HOST, self.folder
            )
        except (ConfigError, TierError) as error:
            self.refusal = str(error)
            log.error("StrataKV keeps no chunks of %s: %s", identity_text(self.identity), error)
        except Exception as error:
            self.refusal = f"{type(error).__name__}: {error}"
            log.exception("StrataKV keeps no chunks of %s", identity_text(self.identity))
        with self._lock:
            is_unwanted = self._closed
            if not is_unwanted:
                self.tiers = tiers
        if tiers is not None and is_unwanted:
            tiers.close(0.0)
            tiers = None
        self._notify_waiters(tiers)

    def _late(self) -> None:
        log.error("the tiers of LMCache's chunks are not open after %g s", OPEN_SECONDS)
        self._notify_waiters(None)

    def _notify_waiters(self, tiers: ChunkTiers | None) -> None:
        self._timer.cancel()
        with self._lock:
            waiters, self._waiters = self._waiters or [], None
        for waiter in waiters:
            waiter(tiers)


def identity_text(identity: ChunkIdentity) -> str:
    parts = zip(identity.shapes, identity.dtypes, strict=True)
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in parts)


def check_folders(path: Path, folder: str, layouts: int) -> None:
    """Check that the directory may hold this layout. Raises ConfigError if the directory already
    has folders of `layouts` other layouts, which take room on the disk too. An unreadable directory
    passes; its store reports later that the disk is down."""
    try:
        if not path.is_dir():
            return
        held = sorted(each.name for each in path.iterdir() if _FOLDER.fullmatch(each.name))
    except OSError as error:
        log.warning("%s cannot be looked at (%s)", path, error.strerror)
        return
    others = [name for name in held if name != folder]
    if len(others) >= layouts:
        raise ConfigError(
            f"{path} holds chunks of {len(others)} other layouts ({', '.join(others[:4])}) and may "
            f"hold {layouts} in all; remove those folders, or raise `layouts` in adapter_params"
        )
