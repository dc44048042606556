# SPDX-License-Identifier: Apache-2.0
"""Adapters identifies the LoRA adapters of vLLM's requests by the content of their files.

vLLM's block hash covers an adapter's name and path, not its content. For a request with an adapter
this module makes other hashes: vLLM's hasher runs on a view of the request, in which the adapter's
name is a label made from its content and the path is empty. So equal content has equal keys in any
folder, and different content has different keys. Requests without adapters keep vLLM's hashes.

vLLM reads the files when it loads an adapter, without a call to the connector. This module records
the content by vLLM's id of the adapter (`lora_int_id`):

    a new id                       its files are hashed, in a thread; its first request waits
    a request with load_inplace    vLLM reads the files again in each step; if they have changed,
                                   this module hashes them again
    other changed files            the content that vLLM has is not known: its requests are refused,
                                   until the adapter comes with another id
    files that cannot be read      its requests are refused, as those of an adapter on the Hub are

A refused request neither stores nor loads blocks.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import types
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from ....tiers.settings.values import ConfigError
from ...chunks.adapter_name import AdapterName, name_adapter
from ...chunks.model_name import settings_text

log = logging.getLogger(__name__)

_LABEL = b"stratakv.vllm.adapter"
CHANGED = (
    "its files have changed since vLLM loaded it; unload the adapter and load it again, best from "
    "a folder of its own"
)
OTHER_PATH = "vLLM has another folder loaded under its id; give each adapter an id of its own"


@dataclass(slots=True, eq=False)
class _Content:
    """The content of the adapter with one of vLLM's ids."""

    adapter_id: int
    path: str
    hashing: Future[AdapterName]
    fault: str = ""  # why blocks of the content are not stored

    @property
    def fingerprint(self) -> bytes | None:
        """Return the fingerprint; None until it is made, and for files that cannot be read."""
        if self.fault or not self.hashing.done():
            return None
        error = self.hashing.exception()
        if error is None:
            return self.hashing.result().fingerprint
        self.fault = str(error) if isinstance(error, ConfigError) else repr(error)
        return None

    def check_unchanged(self) -> bool:
        """Whether the files are unchanged; files that are not hashed yet count as unchanged."""
        return self.fingerprint is None or self.hashing.result().is_unchanged


@dataclass(slots=True, eq=False)
class RequestAdapter:
    """The adapter of one request."""

    content: _Content
    settings: str
    fault: str = ""  # why this request alone is refused
    # Whether vLLM computed the request's blocks after blocks of another content.
    is_mixed: bool = False
    cached_ends: dict[int, int] = field(default_factory=dict)  # cache group → cached blocks
    is_counted: bool = False  # whether counted as refused
    _hashes: list[bytes] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # the tiers' thread calls too

    @property
    def adapter_id(self) -> int:
        return self.content.adapter_id

    @property
    def is_pending(self) -> bool:
        """Whether the adapter's files are still being hashed."""
        return not (self.fault or self.content.fault or self.content.hashing.done())

    @property
    def fingerprint(self) -> bytes | None:
        """The fingerprint of the adapter's content; None if the request is pending or refused."""
        return None if self.fault else self.content.fingerprint

    def hashes_of(self, request: Any) -> Sequence[bytes]:
        """Return the hashes of the request's blocks; empty without a fingerprint."""
        fingerprint = self.fingerprint
        hasher = getattr(request, "_block_hasher", None)
        if fingerprint is None or hasher is None:
            return []
        with self._lock:
            num_hashes = len(request.block_hashes)
            if len(self._hashes) < num_hashes:
                label = hashlib.sha256(_LABEL + fingerprint + self.settings.encode()).hexdigest()
                try:
                    self._hashes += hasher(_Labelled(request, label, self._hashes))
                except Exception as error:
                    log.exception("a request of vLLM goes on without StrataKV")
                    self.fault = f"vLLM cannot hash its blocks with another name ({error!r})"
                    return []
            del self._hashes[num_hashes:]
            return self._hashes


class _Labelled:
    """A view of a vLLM request for vLLM's hasher, with a label as the adapter's name."""

    def __init__(self, request: Any, label: str, block_hashes: list[bytes]) -> None:
        self._request = request
        self.block_hashes = block_hashes
        self.lora_request = types.SimpleNamespace(
            lora_name=label, name=label, lora_path="", path="", lora_int_id=1, adapter_id=1
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class Adapters:
    """The adapters of one engine. `settings` is a digest of vLLM's settings for adapters."""

    def __init__(self, settings: str = "") -> None:
        self._settings = settings
        self._contents: dict[int, _Content] = {}  # by vLLM's id
        self._adapted: WeakKeyDictionary[Any, RequestAdapter] = WeakKeyDictionary()
        self._changed: set[int] = set()
        self._logged: set[str] = set()
        self._hasher: ThreadPoolExecutor | None = None
        self.num_refused = 0

    def adapter_of(self, request: Any) -> RequestAdapter | None:
        """Return the adapter of a request; None for a request without an adapter."""
        lora = request.lora_request
        if lora is None:
            return None
        adapted = self._adapted.get(request)
        if adapted is None:
            adapted = self._adapted[request] = self._admit(lora)
        return adapted

    def is_refused(self, adapted: RequestAdapter) -> bool:
        """Whether a request, not pending, may neither store nor load. Log the reason once."""
        if adapted.fingerprint is not None:
            return False
        if not adapted.is_counted:
            adapted.is_counted = True
            self.num_refused += 1
        fault = adapted.fault or adapted.content.fault
        if fault not in self._logged:
            self._logged.add(fault)
            log.warning(
                "vLLM's adapter %d in %s is computed without StrataKV: %s",
                adapted.adapter_id,
                adapted.content.path,
                fault,
            )
        return True

    def take_changed(self) -> set[int]:
        """Return the ids of adapters in use whose content has changed since the last call. From
        then on the adapters' requests are refused."""
        for content in {each.content for each in self._adapted.values()}:
            if not content.check_unchanged():
                self._replace(content)
        changed, self._changed = self._changed, set()
        return changed

    def close(self) -> None:
        """Stop hashing. Idempotent."""
        hasher, self._hasher = self._hasher, None
        if hasher is not None:
            hasher.shutdown(wait=False, cancel_futures=True)

    def _admit(self, lora: Any) -> RequestAdapter:
        settings = f"{self._settings} {bool(getattr(lora, 'is_3d_lora_weight', False))}"
        content = self._contents.get(lora.lora_int_id)
        if content is not None:
            is_same = content.path == lora.lora_path
            if is_same and not content.check_unchanged():
                self._replace(content)
            if getattr(lora, "load_inplace", False) and not (is_same and not content.fault):
                self._replace(content)
                content = None
            elif not is_same:
                return RequestAdapter(content, settings, OTHER_PATH)
        if content is None:
            content = self._contents[lora.lora_int_id] = self._bind(lora)
        return RequestAdapter(content, settings)

    def _bind(self, lora: Any) -> _Content:
        if self._hasher is None:
            self._hasher = ThreadPoolExecutor(1, thread_name_prefix="stratakv-vllm-adapters")
        return _Content(
            lora.lora_int_id, lora.lora_path, self._hasher.submit(name_adapter, lora.lora_path)
        )

    def _replace(self, content: _Content) -> None:
        """Refuse the requests of a content from now on, and remove the keys of its blocks."""
        content.fault = content.fault or CHANGED
        self._changed.add(content.adapter_id)


def adapter_settings(vllm_config: Any) -> str:
    """Return a digest of vLLM's settings for adapters' results; empty without adapters."""
    config = getattr(vllm_config, "lora_config", None)
    if config is None:
        return ""
    names = ("lora_dtype", "target_modules", "enable_mixed_moe_lora_format")
    numbers = {name: getattr(config, name, None) for name in names}
    if isinstance(numbers["target_modules"], list):
        numbers["target_modules"] = sorted(numbers["target_modules"])
    return settings_text({name: _shown(value) for name, value in numbers.items()})


def _shown(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | list) else str(value)
