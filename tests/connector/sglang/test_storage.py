# SPDX-License-Identifier: Apache-2.0
"""The HiCache storage for SGLang, below a host that is made of recorded signatures."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.tiers.settings.values import ConfigError

from ...tiers.cache_server.rig import running_server, server_process
from ...tiers.ssd.stores import damage_records
from ..recorded_host import base_class, check_methods, install, read_record, set_version

RECORD = read_record("sglang")
TOKENS, PART = 16, 8192  # of a page; bytes of its K, and of its V
PAGES = 16


class Indices(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


class Pool:
    """SGLang's host pool with K and V of a page in a piece each."""

    dtype = "torch.bfloat16"
    layout = "page_first"
    page_size = TOKENS
    start_layer, end_layer = 0, 4
    head_num, head_dim = 2, 32

    def __init__(self, **other: Any) -> None:
        vars(self).update(other)
        self.memory = ctypes.create_string_buffer(2 * PAGES * PART)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        base, pointers = ctypes.addressof(self.memory), []
        for first in indices.tolist()[::TOKENS]:
            k = base + first // TOKENS * PART
            pointers += [k, k + PAGES * PART]
        return pointers, [PART] * len(pointers)

    def fill(self, seed: int) -> bytes:
        data = random.Random(seed).randbytes(len(self.memory))
        self.memory.raw = data
        return data


def config(extra: dict[str, Any], **other: Any) -> Any:
    fields = dict.fromkeys(RECORD["classes"]["HiCacheStorageConfig"]["fields"], 0)
    sizes = {"tp_size": 1, "pp_size": 1, "attn_cp_size": 1, "dcp_size": 1}
    given = {"model_name": "m", "is_storage_writer": True, "extra_config": extra}
    return SimpleNamespace(**{**fields, **sizes, **given, **other})


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    module = "sglang.srt.mem_cache.hicache_storage"
    install(
        monkeypatch, "sglang", {module: {"HiCacheStorage": base_class(RECORD, "HiCacheStorage")}}
    )
    from stratakv.connector import sglang

    made: list[Any] = []

    def make(pool: Any, about: dict[str, Any] | None = None, **params: Any) -> Any:
        extra = {"backend_name": "s", "module_path": "x", "class_name": "y", "interface_v1": 1}
        extra |= {"cpu_bytes": "1MiB", "shutdown_seconds": 10}
        if "ssd_path" in params:
            extra["ssd_bytes"] = "16MiB"
        made.append(sglang.StrataHiCacheStorage(config({**extra, **params}, **(about or {})), {}))
        made[-1].register_mem_pool_host(pool)
        return made[-1]

    yield make
    for each in made:
        each.close()


KEYS = [f"{i:064x}" for i in range(PAGES)]
ALL = Indices(range(PAGES * TOKENS))


def test_the_interface_is_the_recorded_one(storages: Callable[..., Any], tmp_path: Path) -> None:
    check_methods(type(storages(Pool(), ssd_path=str(tmp_path))), RECORD, "HiCacheStorage")
    assert ["storage_config", "kwargs"] in RECORD["calls"]["backend_class"]


@pytest.mark.parametrize("disks", [("a",), ("a", "b")])
def test_pages_outlive_the_engine(
    storages: Callable[..., Any], tmp_path: Path, disks: tuple[str, ...]
) -> None:
    pool = Pool()
    named = ",".join(str(tmp_path / disk) for disk in disks)
    first = storages(pool, ssd_path=named)
    data = pool.fill(1)
    assert first.batch_exists(KEYS) == 0
    assert first.batch_set_v1(KEYS, ALL) == [True] * PAGES
    assert first.batch_exists([*KEYS, "f" * 64]) == PAGES
    first.close()
    pool.fill(2)
    second = storages(pool, ssd_path=named)
    assert second.exists(KEYS[3])
    assert second.batch_get_v1(KEYS, ALL) == [True] * PAGES
    assert pool.memory.raw == data
    assert sorted(each.name for each in tmp_path.iterdir()) == list(disks)


def test_another_engine_gets_nothing(storages: Callable[..., Any], tmp_path: Path) -> None:
    pool = Pool()
    pool.fill(1)
    storages(pool, ssd_path=str(tmp_path)).batch_set_v1(KEYS, ALL)
    for other, about in (
        (Pool(dtype="torch.float16"), {}),
        (Pool(layout="page_first_direct"), {}),
        (Pool(), {"model_name": "n"}),
        (Pool(), {"tp_size": 2, "tp_rank": 1}),
    ):
        storage = storages(other, about, ssd_path=str(tmp_path))
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_get_v1(KEYS, ALL) == [False] * PAGES


def test_damaged_bytes_are_a_miss(storages: Callable[..., Any], tmp_path: Path) -> None:
    pool = Pool()
    pool.fill(1)
    first = storages(pool, ssd_path=str(tmp_path))
    first.batch_set_v1(KEYS, ALL)
    first.close()
    damage_records(tmp_path)
    second = storages(pool, ssd_path=str(tmp_path))
    assert second.batch_get_v1(KEYS, ALL) == [False] * PAGES
    assert second.batch_exists(KEYS) == 0


def test_a_killed_cache_server_costs_misses(storages: Callable[..., Any]) -> None:
    with server_process("--cpu-bytes", "4MiB") as server:
        pool = Pool()
        data = pool.fill(1)
        storage = storages(
            pool, servers=[f"grpc://{server.address}"], lookup_seconds=0.5, read_seconds=2
        )
        assert all(storage.batch_set_v1(KEYS, ALL))
        assert all(storage.batch_get_v1(KEYS, ALL))
        assert pool.memory.raw == data
        server.kill()
        more = ["e" + key[1:] for key in KEYS]
        assert storage.batch_exists(more) == 0
        assert storage.batch_get_v1(more, ALL) == [False] * PAGES


def test_a_server_of_another_layout_is_refused(storages: Callable[..., Any]) -> None:
    with running_server(cpu_bytes=1 << 20) as server:
        server.attach(server.stub())
        with pytest.raises(ConfigError, match="a tenant of its own"):
            storages(Pool(), servers=[f"grpc://{server.host}:{server.port}"])


@pytest.mark.parametrize(
    ("pool", "about", "params", "said"),
    [
        (Pool(layout="layer_first"), {}, {}, "--hicache-mem-layout page_first"),
        (Pool(dtype="torch.int4"), {}, {}, "--kv-cache-dtype"),
        (Pool(), {}, {"interface_v1": 0}, '"interface_v1": 1'),
        (Pool(), {"model_name": None}, {}, "--served-model-name"),
        (Pool(), {"should_split_heads": True}, {}, "tp_lcm_size"),
        (Pool(), {"is_mla_model": True, "tp_size": 2}, {}, "give servers"),
        (Pool(), {}, {"ssd_byte": 5}, "did you mean ssd_bytes"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_the_start(
    storages: Callable[..., Any], tmp_path: Path, pool: Pool, about: Any, params: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        storages(pool, about, ssd_path=str(tmp_path), **params)


@pytest.mark.parametrize("name", ["swa", "mamba", SimpleNamespace(value="indexer")], ids=str)
def test_the_other_pools_of_a_hybrid_model_are_refused(
    storages: Callable[..., Any], tmp_path: Path, name: Any
) -> None:
    storage = storages(Pool(), ssd_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"not those of (swa|mamba|indexer): hybrid models"):
        storage.register_mem_host_pool_v2(Pool(), name)


def test_other_versions_are_refused(
    storages: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_version(monkeypatch, "sglang", "0.5.22")
    with pytest.raises(ConfigError, match=r"sglang>=0\.5\.23"):
        storages(Pool(), ssd_path=str(tmp_path))


def test_without_sglang_one_sentence_says_so() -> None:
    from stratakv.connector import sglang

    with pytest.raises(ImportError, match="where SGLang runs"):
        _ = sglang.StrataHiCacheStorage
