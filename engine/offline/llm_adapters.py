# SPDX-License-Identifier: Apache-2.0
"""`LlmAdapters`: loads and unloads the LoRA adapters of an `LLM`."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...tiers.settings.format import format_value
from ...tiers.settings.readers import path as read_path
from ..api.served_adapters import ServedAdapters
from ..client.base import EngineClient
from ..config.lora_config import adapter_name
from ..request.core_messages import LoadedAdapter

T = TypeVar("T")


class Waiter(Protocol):
    """The attributes of `LLM` that `LlmAdapters` uses."""

    @property
    def client(self) -> EngineClient: ...
    def wait_for(self, work: Coroutine[Any, Any, T]) -> T: ...


class LlmAdapters:
    """The LoRA adapters of one engine, by name."""

    def __init__(self, llm: Waiter, loaded: Iterable[LoadedAdapter]) -> None:
        self._llm, self._served = llm, ServedAdapters(loaded)

    @property
    def names(self) -> list[str]:
        return [each.name for each in self._served.loaded]

    def load(self, name: str, path: str | Path, *, replaces: bool = False) -> LoadedAdapter:
        """Load the adapter that PEFT has saved in the folder `path`. `replaces`: the name may be in
        use, and running requests keep the replaced adapter. Raises ValueError for an adapter that
        cannot be used."""
        name, folder = adapter_name("name", name), read_path("path", path)
        client = self._llm.client
        return self._llm.wait_for(
            self._served.load_adapter(client, name, folder, replaces=replaces)
        )

    def unload(self, name: str) -> None:
        """Remove an adapter, which running requests keep. Raises ValueError for an unknown name."""
        name = adapter_name("name", name)
        self._llm.wait_for(self._served.unload_adapter(self._llm.client, name))

    def check_name(self, name: object) -> None:
        """Raise ValueError for a name that is neither "" nor the name of an adapter."""
        if name != "" and (not isinstance(name, str) or name not in self._served):
            known = ", ".join(self.names) or "none"
            raise ValueError(
                f"adapter takes one of those loaded ({known}), not {format_value(name)}"
            )
