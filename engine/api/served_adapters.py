# SPDX-License-Identifier: Apache-2.0
"""ServedAdapters: the adapters that clients can name as their model.

The front keeps the list, because it checks each request before the core sees it. The core has the
last word: a request for an adapter that was unloaded meanwhile ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..client.base import EngineClient
from ..request.core_messages import LoadAdapter, LoadedAdapter, UnloadAdapter

# Reading a large adapter from a slow disk.
LOAD_SECONDS = 300.0


class ServedAdapters:
    """The adapters of one engine, by name. Called on the front's event loop."""

    def __init__(self, loaded: Iterable[LoadedAdapter]) -> None:
        self._by_name = {each.name: each for each in loaded}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def loaded(self) -> list[LoadedAdapter]:
        return list(self._by_name.values())

    async def load_adapter(
        self, client: EngineClient, name: str, path: Path, *, replaces: bool
    ) -> LoadedAdapter:
        """Load the adapter in a folder. Raises ValueError if the core refuses it, and
        TimeoutError."""
        message = LoadAdapter(name, str(path), replaces)
        # Shielded: if the client leaves, the list must still follow the core.
        return await asyncio.shield(self._load(client, message))

    async def _load(self, client: EngineClient, message: LoadAdapter) -> LoadedAdapter:
        text = msgspec.json.encode(message).decode()
        found = await client.call("load_adapter", text, timeout_seconds=LOAD_SECONDS)
        adapter = msgspec.convert(found, LoadedAdapter)
        self._by_name[message.name] = adapter
        return adapter

    async def unload_adapter(self, client: EngineClient, name: str) -> None:
        """Forget an adapter; requests that run keep it. Raises ValueError for an unknown one."""
        text = msgspec.json.encode(UnloadAdapter(name)).decode()
        try:
            await client.call("unload_adapter", text)
        finally:
            self._by_name.pop(name, None)
