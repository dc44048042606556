# SPDX-License-Identifier: Apache-2.0
"""`ServedAdapters`: the LoRA adapters that clients can name as their model.

The server keeps the list, because it checks each request before the engine core gets the request.
The core checks again: a request for an adapter that was unloaded since then ends with an error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ...tiers.settings.format import format_name
from ..client.base import EngineClient
from ..request.core_messages import LoadAdapter, LoadedAdapter, UnloadAdapter

logger = logging.getLogger(__name__)

# The time for which a client waits for a load, enough for a large adapter on a slow disk.
LOAD_SECONDS = 300.0


class ServedAdapters:
    """The LoRA adapters of one engine, by name. Use a `ServedAdapters` in one event loop only."""

    def __init__(self, loaded: Iterable[LoadedAdapter]) -> None:
        self._by_name = {each.name: each for each in loaded}
        self._loads: set[asyncio.Task[LoadedAdapter]] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @property
    def loaded(self) -> list[LoadedAdapter]:
        return list(self._by_name.values())

    async def load_adapter(
        self, client: EngineClient, name: str, path: Path, *, replaces: bool
    ) -> LoadedAdapter:
        """Load the adapter in the folder `path`. A load that lasts longer than LOAD_SECONDS, or
        whose caller is cancelled, continues, and the list follows it. Raises TimeoutError, and
        ValueError if the engine core refuses the adapter."""
        load = asyncio.create_task(self._load(client, LoadAdapter(name, str(path), replaces)))
        self._loads.add(load)
        load.add_done_callback(self._note_end)
        done, _ = await asyncio.wait((load,), timeout=LOAD_SECONDS)
        if not done:
            raise TimeoutError(
                f"the adapter {format_name(name)} is not loaded after {LOAD_SECONDS:g} s; its load "
                "continues, so wait until the list of models has it"
            )
        return load.result()

    def _note_end(self, load: asyncio.Task[LoadedAdapter]) -> None:
        self._loads.discard(load)
        if not load.cancelled() and (error := load.exception()) is not None:
            logger.warning("an adapter was not loaded: %s", error)

    async def _load(self, client: EngineClient, message: LoadAdapter) -> LoadedAdapter:
        text = msgspec.json.encode(message).decode()
        found = await client.call("load_adapter", text, timeout_seconds=None)
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
