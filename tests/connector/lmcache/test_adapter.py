# SPDX-License-Identifier: Apache-2.0
"""The L2 adapter for LMCache, below a host that is made of recorded signatures."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import select
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.tiers.settings.values import ConfigError

from ...tiers.cache_server.rig import running_server, server_process
from ...tiers.ssd.stores import damage_records
from ..recorded_host import base_class, check_methods, install, read_record, set_version

RECORD = read_record("lmcache")
SHAPE, DTYPE = (2, 4, 16, 64), "torch.bfloat16"  # 16 KiB
CHUNK_BYTES = 16384


class Bitmap(list[bool]):
    """LMCache's, as far as the adapter uses it."""

    def __init__(self, size: int) -> None:
        super().__init__([False] * size)

    def set(self, index: int) -> None:
        self[index] = True


class StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)


def key(number: int, **other: Any) -> Any:
    fields = {"model_name": "m", "kv_rank": 1, "object_group_id": 0, "cache_salt": "", **other}
    return SimpleNamespace(chunk_hash=number.to_bytes(32, "big"), **fields)


class Object:
    """A MemoryObj: bytes with a shape and a dtype, at an address."""

    def __init__(self, data: bytes, shape: Any = SHAPE, dtype: Any = DTYPE) -> None:
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.metadata = SimpleNamespace(shape=shape, dtype=dtype, shapes=None, dtypes=None)

    @property
    def byte_array(self) -> memoryview:
        kind = ctypes.c_ubyte * len(self.memory)
        return memoryview(kind.from_address(ctypes.addressof(self.memory)))

    def get_size(self) -> int:
        return len(self.memory)


def objects(numbers: range) -> list[Object]:
    return [Object(random.Random(i).randbytes(CHUNK_BYTES)) for i in numbers]


DESC = {0: SimpleNamespace(shapes=[SHAPE], dtypes=[DTYPE])}


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    install(
        monkeypatch,
        "lmcache",
        {
            "lmcache.lmcache_native": {"Bitmap": Bitmap},
            "lmcache.v1.distributed.internal_api": {"L2StoreResult": StoreResult},
            "lmcache.v1.distributed.l2_adapters.base": {
                "AdapterUsage": SimpleNamespace,
                "L2AdapterInterface": base_class(RECORD, "L2AdapterInterface"),
            },
        },
    )
    from stratakv.connector import lmcache

    made: list[Any] = []

    def make(**params: Any) -> Any:
        given = {"cpu_bytes": "1MiB", "shutdown_seconds": 10}
        if "ssd_path" in params:
            given["ssd_bytes"] = "16MiB"
        made.append(lmcache.StrataL2Adapter({**given, **params}, l1_memory_desc=None))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _wait(fd: int, query: Callable[[], Any]) -> Any:
    """As LMCache's controllers: sleep on the fd, then ask."""
    end = time.monotonic() + 60
    while not (found := query()):
        assert time.monotonic() < end
        if select.select([fd], [], [], 1)[0]:
            os.eventfd_read(fd)
    return found


def store(adapter: Any, keys: list[Any], values: list[Object]) -> int:
    task = adapter.submit_store_task(keys, values)
    done = _wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    return int(done[task])


def lookup(adapter: Any, keys: list[Any], desc: Any = DESC) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, desc)
    found: list[bool] = _wait(
        adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task)
    )
    assert adapter.query_lookup_and_lock_result(task) is None  # once
    return found


def load(adapter: Any, keys: list[Any], values: list[Object]) -> list[bool]:
    task = adapter.submit_load_task(keys, values)
    found: list[bool] = _wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    adapter.submit_unlock(keys)
    return found


def read_equal(adapter: Any, keys: list[Any], values: list[Object]) -> list[bool]:
    """Load, and see that what came is what was stored."""
    targets = [Object(bytes(CHUNK_BYTES)) for _ in keys]
    answers = load(adapter, keys, targets)
    for answer, target, value in zip(answers, targets, values, strict=True):
        assert not answer or target.memory.raw == value.memory.raw
    return answers


def test_the_interface_is_the_recorded_one(adapters: Callable[..., Any], tmp_path: Path) -> None:
    adapter = adapters(ssd_path=str(tmp_path))
    check_methods(type(adapter), RECORD, "L2AdapterInterface")
    assert all(call[-1] == "**=" for call in RECORD["calls"]["adapter_cls"])
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    fields = RECORD["classes"]["ObjectKey"]["fields"]
    assert set(fields) >= set(vars(key(1)))


def test_chunks_outlive_the_daemon(adapters: Callable[..., Any], tmp_path: Path) -> None:
    keys, values = [key(i) for i in range(24)], objects(range(24))
    first = adapters(ssd_path=str(tmp_path))
    assert lookup(first, keys) == [False] * 24
    assert store(first, keys, values) == 24 * CHUNK_BYTES
    assert read_equal(first, keys, values) == [True] * 24
    assert first.report_status()["is_healthy"]
    first.close()
    second = adapters(ssd_path=str(tmp_path))
    assert lookup(second, keys) == [True] * 24
    assert read_equal(second, keys, values) == [True] * 24
    assert second.get_usage().total_bytes_used


def test_several_disks(adapters: Callable[..., Any], tmp_path: Path) -> None:
    """Each chunk lies on one of them, and of two one serves on alone."""
    keys, values = [key(i) for i in range(24)], objects(range(24))
    disks = [tmp_path / "a", tmp_path / "b"]
    named = ",".join(map(str, disks))
    first = adapters(ssd_path=named)
    assert store(first, keys, values) == 24 * CHUNK_BYTES
    first.close()
    (folder,) = {each.name for disk in disks for each in disk.iterdir()}
    second = adapters(ssd_path=named)
    assert read_equal(second, keys, values) == [True] * 24
    assert lookup(second, [key(1, model_name="n")]) == [False]
    second.close()
    shutil.rmtree(disks[1] / folder)
    third = adapters(ssd_path=named)
    found = lookup(third, keys)
    assert 0 < found.count(True) < 24
    there = [number for number, is_there in enumerate(found) if is_there]
    assert all(read_equal(third, [keys[i] for i in there], [values[i] for i in there]))
    third.close()
    (disks[1] / "00000000deadbeef").mkdir()
    fourth = adapters(ssd_path=named)
    assert read_equal(fourth, keys, values) == [False] * 24
    (layout,) = fourth.report_status()["layouts"]
    assert f"{disks[1]} holds chunks of 1 other layouts" in layout["refused_because"]


def test_a_disk_that_cannot_be_looked_at_leaves_the_others(
    adapters: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks of the layout were refused for good, though one of two disks worked."""
    for disk in ("a", "b"):
        (tmp_path / disk).mkdir()
    real = Path.iterdir

    def iterdir(self: Path) -> Iterator[Path]:
        if self == tmp_path / "b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    adapter = adapters(ssd_path=f"{tmp_path}/a,{tmp_path}/b")
    keys, values = [key(i) for i in range(4)], objects(range(4))
    assert store(adapter, keys, values) == 4 * CHUNK_BYTES
    assert [each["refused_because"] for each in adapter.report_status()["layouts"]] == [""]


def test_who_asks_is_in_the_key(adapters: Callable[..., Any], tmp_path: Path) -> None:
    adapter = adapters(ssd_path=str(tmp_path))
    store(adapter, [key(1)], objects(range(1)))
    others = [
        key(1, cache_salt="x"),
        key(1, model_name="n"),
        key(1, kv_rank=2),
        key(1, object_group_id=1),
    ]
    descs = {**DESC, 1: DESC[0]}
    assert lookup(adapter, [key(1), *others], descs) == [True, False, False, False, False]


def test_object_groups_of_a_hybrid_model(adapters: Callable[..., Any], tmp_path: Path) -> None:
    """Of full layers every chunk, of those with a window the last ones, in a layout of their own:
    each is found, or not, by itself."""
    shape, every = (1, 4, 16, 64), range(8)
    descs = {**DESC, 1: SimpleNamespace(shapes=[shape], dtypes=[DTYPE])}
    full, windowed = [[key(i, object_group_id=group) for i in every] for group in (0, 1)]
    last = [Object(random.Random(-i).randbytes(CHUNK_BYTES // 2), shape) for i in (6, 7)]
    first = adapters(ssd_path=str(tmp_path), layouts=2)
    stored = store(first, [*full, *windowed[6:]], [*objects(every), *last])
    assert stored == 9 * CHUNK_BYTES
    first.close()
    second = adapters(ssd_path=str(tmp_path), layouts=2)
    assert read_equal(second, full, objects(every)) == [True] * 8
    found = lookup(second, [*full, *windowed], descs)
    assert found == [True] * 8 + [False] * 6 + [True] * 2
    targets = [Object(bytes(CHUNK_BYTES // 2), shape) for _ in last]
    assert load(second, windowed[6:], targets) == [True, True]
    assert [bytes(target.byte_array) for target in targets] == [bytes(e.byte_array) for e in last]


def test_another_layout_gets_nothing(adapters: Callable[..., Any], tmp_path: Path) -> None:
    adapter = adapters(ssd_path=str(tmp_path))
    store(adapter, [key(1)], objects(range(1)))
    other = Object(bytes(CHUNK_BYTES), dtype="torch.float16")
    assert load(adapter, [key(1)], [other]) == [False]
    assert "`layouts`" in adapter.report_status()["refused"][0]
    assert load(adapter, [key(1)], [Object(bytes(8), (8,), "torch.int4x2")]) == [False]
    small = Object(bytes(100))
    assert store(adapter, [key(2)], [small]) == -1
    assert any("serde" in reason for reason in adapter.report_status()["refused"])


def test_damaged_bytes_are_a_miss(adapters: Callable[..., Any], tmp_path: Path) -> None:
    keys, values = [key(i) for i in range(8)], objects(range(8))
    first = adapters(ssd_path=str(tmp_path))
    store(first, keys, values)
    first.close()
    damage_records(tmp_path)
    second = adapters(ssd_path=str(tmp_path))
    assert read_equal(second, keys, values) == [False] * 8
    assert lookup(second, keys) == [False] * 8  # nobody asks for them again
    store(second, keys, values)
    assert read_equal(second, keys, values) == [True] * 8


def test_a_full_disk_evicts(adapters: Callable[..., Any], tmp_path: Path) -> None:
    adapter = adapters(ssd_path=str(tmp_path))
    keys, values = [key(i) for i in range(1500)], objects(range(1500))
    for i in range(0, 1500, 100):
        store(adapter, keys[i : i + 100], values[i : i + 100])
    size = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert size < 24 * 2**20
    answers = read_equal(adapter, keys[-32:], values[-32:])
    assert any(answers)


def test_a_killed_cache_server_costs_misses(adapters: Callable[..., Any]) -> None:
    with server_process("--cpu-bytes", "4MiB") as server:
        adapter = adapters(servers=[f"grpc://{server.address}"], lookup_seconds=0.5, read_seconds=2)
        keys, values = [key(i) for i in range(4)], objects(range(4))
        store(adapter, keys, values)
        assert read_equal(adapter, keys, values) == [True] * 4
        server.kill()
        more = [key(i) for i in range(100, 104)]
        assert lookup(adapter, more) == [False] * 4
        assert read_equal(adapter, more, values) == [False] * 4
        assert store(adapter, more, values) > 0  # in memory


def test_a_server_of_another_layout_is_refused(adapters: Callable[..., Any]) -> None:
    with running_server(cpu_bytes=1 << 20) as server:
        server.attach(server.stub())
        address = f"grpc://{server.host}:{server.port}"
        with pytest.raises(ConfigError, match="a tenant of its own"):
            adapters(servers=[address], chunk_bytes=CHUNK_BYTES)
        late = adapters(servers=[address])  # known with the first chunk only
        assert store(late, [key(1)], objects(range(1))) == -1
        assert "refuses" in late.report_status()["layouts"][0]["refused_because"]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "ssd_path"),
        ({"ssd_pth": "/tmp/x"}, "ssd_path"),
        ({"ssd_path": "/tmp/x", "layouts": 99}, "1 to 16"),
        ({"servers": 5}, "addresses"),
        ({"ssd_path": "/tmp/x", "ssd_codec": "fp8"}, "lossless"),
    ],
)
def test_bad_settings(adapters: Callable[..., Any], params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapters(**params)


@pytest.mark.parametrize("version", ["0.5.5", "0.6.0", "unknown"])
def test_other_versions_are_refused(
    adapters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    set_version(monkeypatch, "lmcache", version)
    with pytest.raises(ConfigError, match=r"lmcache>=0\.5\.6,<0\.6\.0"):
        adapters(ssd_path="/tmp/x")


def test_without_lmcache_one_sentence_says_so() -> None:
    from stratakv.connector import lmcache

    with pytest.raises(ImportError, match="where `lmcache server` runs"):
        _ = lmcache.StrataL2Adapter
