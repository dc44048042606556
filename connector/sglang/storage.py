# SPDX-License-Identifier: Apache-2.0
"""StrataHiCacheStorage: stores and loads pages for SGLang's cache controller, below SGLang's
memory.

The controller calls from two threads, one for loads and one for stores. A call waits at most until
its time limit. `batch_get_v1` and `batch_set_v1` move pages between the tiers and SGLang's host
pool, at addresses that the pool returns. The older methods (`get`, `set` and their batches) take
tensors.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from ...tiers.settings.values import ConfigError
from ..chunks.build import open_chunk_tiers
from ..chunks.chunk_settings import chunk_host
from ..chunks.supported_versions import Supported
from ..chunks.tiers import ChunkTiers
from .host_model import HOST, names_of
from .identity import PageKeys, read_identity

log = logging.getLogger(__name__)

SUPPORTED = Supported(HOST, "sglang", (0, 5, 23), (0, 6, 0))
# SGLang's own keys in the JSON configuration of a storage back end.
HOST_KEYS = ("backend_name", "module_path", "class_name", "interface_v1")
# How much longer a call waits than its time limit; only a stalled machine needs this time.
GRACE_SECONDS = 30.0


class StrataHiCacheStorage(HiCacheStorage):
    """A storage back end of SGLang's HiCache. The tiers are opened when SGLang registers its host
    pool. SGLang passes no `kwargs`. Raises ConfigError or TierConfigError for unusable settings."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        version = SUPPORTED.installed()
        given = dict(storage_config.extra_config or {})
        if not given.get("interface_v1"):
            raise ConfigError(
                'SGLang copies every page twice without "interface_v1": 1 in '
                "--hicache-storage-backend-extra-config; add it"
            )
        # Some versions of SGLang leave SGLang's own options in `extra_config`.
        for name in [*HOST_KEYS, *(name for name in given if name.startswith("prefetch_"))]:
            given.pop(name, None)
        self._settings = chunk_host(HOST).read(given)
        self._version = ".".join(map(str, version))
        self._config = storage_config
        self._tiers: ChunkTiers | None = None
        self._keys = PageKeys(b"")
        self._parts: tuple[int, ...] = ()
        self._page_tokens = 0
        self.mem_pool_host: Any = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tiers for the pages of `mem_pool_host`."""
        tokens = int(getattr(mem_pool_host, "logical_page_size", mem_pool_host.page_size))
        try:
            _, sizes = mem_pool_host.get_page_buffer_meta(_Indices(range(tokens)))
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"SGLang's {type(mem_pool_host).__name__} of layout {mem_pool_host.layout} does "
                f"not say where its pages lie ({error}); use --hicache-mem-layout page_first"
            ) from error
        own, parts = self._settings, tuple(map(int, sizes))
        if not self._config.model_name:
            raise ConfigError(
                "SGLang does not say which model its pages are of; give --served-model-name"
            )
        identity = read_identity(
            self._config,
            mem_pool_host,
            parts,
            names_of(self._config.model_name, own.revision),
            revision=own.revision or "",
            salt=own.salt or "",
            version=self._version,
        )
        config = self._config
        if identity.is_mla and config.tp_size > config.dcp_size and not own.cache_servers:
            raise ConfigError(
                f"of {config.tp_size} ranks that hold the same MLA pages SGLang has one write "
                "them, so the others can only find them on cache servers; give servers"
            )
        self.close()
        root = identity.root()
        # Ranks may share pages, but each rank has its own directory.
        folder = f"{root.hex()[:16]}-{config.dp_rank}-{config.tp_rank}"
        self._tiers = open_chunk_tiers(
            self._settings, identity.page_bytes, identity.namespace(), HOST, folder
        )
        self._keys, self._parts, self._page_tokens = PageKeys(root), parts, tokens
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register the pool of K and V. Raises ConfigError for any other pool."""
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != "kv":
            raise ConfigError(
                f"StrataKV keeps the pages of SGLang's pool kv, not those of {name}: hybrid models "
                "need another storage back end"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of leading pages that a tier has."""
        tiers = self._tiers
        if tiers is None or not keys:
            return 0
        found = _wait(tiers.lookup(self._tier_keys(keys)), tiers.limits.lookup_seconds)
        return found.index(False) if False in found else len(found)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into the host pool. Each page is checked against its stored digest."""
        return self._transfer_pages("load", keys, self._places(keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        if not self._config.is_storage_writer:
            return [True] * len(keys)  # another rank writes the same bytes
        return self._transfer_pages("store", keys, self._places(keys, host_indices))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location], None)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Load pages into `target_locations`. Return the tensors; None means a miss."""
        targets = list(target_locations or [])
        if len(targets) != len(keys) or any(each is None for each in targets):
            raise ValueError("StrataKV loads pages into tensors that are given, one for each key")
        views = [[_tensor_bytes(each)] for each in targets]
        answers = self._transfer_pages("load", keys, views)
        return [each if ok else None for each, ok in zip(targets, answers, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        if not self._config.is_storage_writer:
            return True
        held = [each.contiguous() for each in values or []]
        return all(self._transfer_pages("store", keys, [[_tensor_bytes(each)] for each in held]))

    def clear(self) -> None:
        if self._tiers is not None:
            self._tiers.clear()

    def get_stats(self) -> Any:
        """Return None, because SGLang reads no counters of a back end."""
        return None

    def close(self) -> None:
        tiers, self._tiers = self._tiers, None
        if tiers is not None:
            tiers.close(self._settings.shutdown_seconds)

    def _tier_keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self._keys.derive_page_key(key) for key in keys]

    def _transfer_pages(
        self, what: str, keys: Sequence[str], pages: Sequence[Sequence[memoryview]]
    ) -> list[bool]:
        tiers = self._tiers
        if tiers is None or not keys:
            return [False] * len(keys)
        if what == "load":
            return _wait(tiers.load(self._tier_keys(keys), pages), tiers.limits.read_seconds)
        return _wait(tiers.store(self._tier_keys(keys), pages), tiers.limits.store_seconds)

    def _places(self, keys: Sequence[str], host_indices: Any) -> list[list[memoryview]]:
        if self._tiers is None:
            return []
        if len(host_indices) != len(keys) * self._page_tokens:
            raise ValueError(
                f"{len(keys)} pages of {self._page_tokens} tokens were expected, not "
                f"{len(host_indices)} tokens"
            )
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        count = len(self._parts)
        if len(pointers) != len(keys) * count or tuple(sizes) != self._parts * len(keys):
            raise ValueError("SGLang's host pool has changed the way its pages lie")
        views = [_memory(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        return [views[i : i + count] for i in range(0, len(views), count)]


class _Indices(list[int]):
    """A list with `tolist`, the method of an index tensor that the host pool calls."""

    def tolist(self) -> list[int]:
        return list(self)


def _wait(future: Future[list[bool]], seconds: float) -> list[bool]:
    return future.result(timeout=seconds + GRACE_SECONDS)


@lru_cache(maxsize=256)
def _array_type(size: int) -> Any:
    """Return the ctypes array type of a size, cached because ctypes never frees array types."""
    return ctypes.c_ubyte * size


def _memory(pointer: int, size: int) -> memoryview:
    """Return a view of the host pool's memory, which outlives the call."""
    return memoryview(_array_type(size).from_address(pointer))


def _tensor_bytes(tensor: Any) -> memoryview:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("StrataKV takes pages as contiguous tensors in host memory")
    return _memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
