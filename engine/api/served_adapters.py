# SPDX-License-Identifier: Apache-2.0
"""`ServedAdapters`: the LoRA adapters that clients can name as their model.

The server keeps the list, because it checks each request before the engine core gets the request.
The core checks again: a request for an adapter that was unloaded since then ends with an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..client.base import EngineClient
from ..request.core_messages import LoadAdapter, LoadedAdapter, UnloadAdapter

# Time limit for loading an adapter, long enough for a large adapter on a slow disk.
LOAD_SECONDS = 300.0


class ServedAdapters:
    """The LoRA adapters of one engine, by name. Use a `ServedAdapters` in one event loop only."""

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
        """Load the adapter in the folder `path`. Raises TimeoutError, and ValueError if the engine
        core refuses the adapter."""
        message = LoadAdapter(name, str(path), replaces)
        # Shielded, so that the list still gets the adapter if the client disconnects.
        return await asyncio.shield(self._load(client, message))

    async def _load(self, client: EngineClient, message: LoadAdapter) -> LoadedAdapter:
        text = msgspec.json.encode(message).decode()
        found = await client.call("load_adapter", text, timeout_seconds=LOAD_SECONDS)
        adapter = msgspec.convert(found, LoadedAdapter)
        self._by_name[message.name] = adapter
        return adapter

    async def unload_adapter(self, client: EngineClient, name: str) -> None:
        """Remove an adapter, which running requests keep. Raises ValueError for an unknown name."""
        text = msgspec.json.encode(UnloadAdapter(name)).decode()
        try:
            await client.call("unload_adapter", text)
        finally:
            self._by_name.pop(name, None)
