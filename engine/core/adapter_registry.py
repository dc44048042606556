# SPDX-License-Identifier: Apache-2.0
"""AdapterRegistry: the adapters of an engine by name, loaded and unloaded while the engine runs.

    load     files are read in a thread ──► the worker keeps the adapter ──► requests can name it
    unload   no request can name it ──► its last request ends ──► the worker drops it

Two names with equal adapters have one fingerprint, and the worker keeps one copy. A name that is
loaded again belongs to the new adapter; running requests keep the old adapter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...tiers.settings.format import format_name
from ...tiers.settings.sizes import show_size
from ...tiers.settings.values import ConfigError
from ..config.engine_config import EngineConfig, ModelConfig
from ..config.lora_config import LoraConfig
from ..request.adapter import Adapter
from ..request.core_messages import CallRefused, LoadAdapter, LoadedAdapter
from ..request.request import Request
from ..worker.adapter_slots import ReadAdapter
from .client_calls.deferred import Deferred
from .executor import Executor

logger = logging.getLogger(__name__)

# The codes of refused loads, also for clients.
NAME_IN_USE = "name_in_use"
TOO_MANY_ADAPTERS = "too_many_adapters"


class UnknownAdapter(ValueError):
    """No adapter has the name of a request."""


class AdapterRegistry:
    """The adapters of one engine core, whose thread calls this."""

    def __init__(self, config: LoraConfig, model: ModelConfig, executor: Executor) -> None:
        self._config, self._model, self._executor = config, model, executor
        self._by_name: dict[str, LoadedAdapter] = {}
        self._loading: set[str] = set()  # names
        self._unused: set[bytes] = set()  # unloaded; requests may still have them
        self._threads: set[threading.Thread] = set()  # each reads an adapter

    @property
    def loaded(self) -> list[LoadedAdapter]:
        return list(self._by_name.values())

    def stats(self) -> dict[str, Any]:
        """Return the names of the loaded adapters, and the most adapters of a step."""
        return {"loaded": list(self._by_name), "max_adapters": self._config.num_slots}

    def load_now(self, name: str, path: Path) -> LoadedAdapter:
        """Load an adapter before returning. Raises ConfigError for an unusable adapter."""
        self._check_name(name, replaces=False)
        return self._take(LoadAdapter(name, str(path)), self._executor.read_adapter(path))

    def begin_load(self, message: LoadAdapter) -> Deferred:
        """Load an adapter in parallel with steps. Raises ValueError for a name in use, or if the
        engine has no slots for adapters."""
        self._check_name(message.name, replaces=message.replaces)
        future: Future[ReadAdapter] = Future()
        self._loading.add(message.name)

        def read() -> None:
            try:
                future.set_result(self._executor.read_adapter(Path(message.path)))
            except BaseException as error:  # noqa: BLE001 - the future's reader raises it
                future.set_exception(error)

        thread = threading.Thread(target=read, name="adapter-load", daemon=True)
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        thread.start()
        return Deferred(future, lambda done: self._finish_load(message, done))

    def close(self, timeout_seconds: float) -> None:
        """Wait for reads under way, for `timeout_seconds` at most: a thread that is in torch when
        Python ends aborts the process."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def unload_adapter(self, name: str) -> LoadedAdapter:
        """Forget a name. Raises ValueError for an unknown name."""
        self.find_adapter(name)
        gone = self._by_name.pop(name)
        self._note_unused(bytes.fromhex(gone.fingerprint))
        logger.info("adapter %s is unloaded", format_name(name))
        return gone

    def find_adapter(self, name: str) -> Adapter:
        """Return the adapter named `name`. Raises ValueError for an unknown name."""
        found = self._by_name.get(name)
        if found is None:
            raise UnknownAdapter(f"the adapter {format_name(name)} is not loaded")
        return Adapter(name, bytes.fromhex(found.fingerprint))

    def check_held(self, adapter: Adapter) -> None:
        """Raise ValueError if the worker has dropped the adapter of a continued request."""
        if adapter.fingerprint in self._unused or any(
            each.fingerprint == adapter.fingerprint.hex() for each in self._by_name.values()
        ):
            return
        raise UnknownAdapter(
            f"the adapter {format_name(adapter.name)} was unloaded before the whole prompt came; "
            "load it and send the prompt again"
        )

    def release_unused(self, requests: Iterable[Request]) -> None:
        """Drop the unloaded adapters that none of the `requests` has from the worker."""
        for fingerprint in self.find_unused(requests):
            self._unused.discard(fingerprint)
            self._executor.drop_adapter(fingerprint)

    def find_unused(self, requests: Iterable[Request]) -> set[bytes]:
        """Return the unloaded adapters that none of the `requests` has."""
        if not self._unused:
            return self._unused
        held = {each.adapter.fingerprint for each in requests if each.adapter is not None}
        return self._unused - held

    def _check_name(self, name: str, *, replaces: bool) -> None:
        if not self._config.num_slots:
            raise ValueError(
                "this engine takes no adapters; start it with --lora-modules NAME=PATH, --lora-dir "
                "or --enable-lora"
            )
        if self._model.has_name(name):
            raise CallRefused(
                f"{format_name(name)} is the name of the model itself; give the adapter another",
                NAME_IN_USE,
            )
        if name in self._loading:
            raise CallRefused(
                f"the adapter {format_name(name)} is being loaded; wait for that", NAME_IN_USE
            )
        if name in self._by_name and not replaces:
            raise CallRefused(
                f"an adapter {format_name(name)} is loaded; unload it before, or replace it with "
                "load_inplace",
                NAME_IN_USE,
            )
        num_others = len(self._by_name.keys() | self._loading) - (name in self._by_name)
        if num_others >= self._config.max_loaded:
            raise CallRefused(
                f"{num_others} adapters are loaded and --max-cpu-loras is "
                f"{self._config.max_loaded}; unload one, or raise that",
                TOO_MANY_ADAPTERS,
            )

    def _finish_load(self, message: LoadAdapter, done: Future[ReadAdapter]) -> LoadedAdapter:
        self._loading.discard(message.name)
        return self._take(message, done.result())

    def _take(self, message: LoadAdapter, found: ReadAdapter) -> LoadedAdapter:
        self._executor.add_adapter(found)
        before = self._by_name.get(message.name)
        made = LoadedAdapter(
            message.name, message.path, found.fingerprint.hex(), found.rank, found.num_bytes
        )
        self._by_name[message.name] = made
        self._unused.discard(found.fingerprint)
        if before is not None:
            self._note_unused(bytes.fromhex(before.fingerprint))
        logger.info(
            "adapter %s is loaded from %s: rank %d, %s, fingerprint %s",
            format_name(message.name), message.path, found.rank, show_size(found.num_bytes),
            made.fingerprint[:16],
        )  # fmt: skip
        return made

    def _note_unused(self, fingerprint: bytes) -> None:
        if all(each.fingerprint != fingerprint.hex() for each in self._by_name.values()):
            self._unused.add(fingerprint)


def open_registry(config: EngineConfig, executor: Executor) -> AdapterRegistry:
    """Make the registry, and load the adapters that the settings name. Raises ConfigError, with the
    adapter's name, for an unusable adapter."""
    lora = config.lora
    if lora.folder is not None and not lora.folder.is_dir():
        raise ConfigError(f"--lora-dir {lora.folder} is no directory; make it, or give another")
    registry = AdapterRegistry(lora, config.model, executor)
    for module in lora.modules:
        try:
            registry.load_now(module.name, module.path)
        except ValueError as error:
            raise ConfigError(f"--lora-modules {format_name(module.name)}: {error}") from error
    return registry
