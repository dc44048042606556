# SPDX-License-Identifier: Apache-2.0
"""Our classes against what was recorded of each supported version of vLLM, and a life of each with
a host that is made from it."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.connector.vllm import lookups, metrics
from stratakv.connector.vllm.settings import OPTIONS, read_settings
from stratakv.connector.vllm.versions import NEWEST, OLDEST, check_version
from stratakv.engine.cli.main import main
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.hierarchy.hierarchy import Prefix
from stratakv.tiers.settings.values import ConfigError

from ...threads import WAIT_SECONDS
from .fake_host import VERSIONS, FakeHost, FakeManager, host, signature_of

__all__ = ["host"]  # the fixture

CHUNK = 8192


def extra(chunks: int = 16, **settings: Any) -> dict[str, Any]:
    return {
        "spec_name": "StrataSpec",
        "cpu_bytes_to_use": chunks * CHUNK,
        "stratakv": {"cpu_bytes": "1MiB", "load": "always"} | settings,
    }


def make_spec(host: FakeHost, given: dict[str, Any], **changes: Any) -> Any:
    from stratakv.connector.vllm import StrataSpec

    return StrataSpec(host.config(given, **changes))


def host_keys(count: int, seed: int = 0, group: int = 0) -> list[bytes]:
    numbers = np.random.default_rng(seed)
    return [numbers.bytes(32) + group.to_bytes(4, "big") for _ in range(count)]


class Life:
    """One engine, with its tier's jobs run to their end."""

    def __init__(self, host: FakeHost, given: dict[str, Any], **changes: Any) -> None:
        self.spec = make_spec(host, given, **changes)
        self.manager: FakeManager = self.spec.get_manager()
        self.region = self.manager.region
        self.tier = self.manager.tier
        self.knows_positions = "_offload_key_positions" in host._fields("ReqContext")
        self._count = 0

    def fill(self, keys: list[bytes], seed: int) -> np.ndarray[Any, Any]:
        """Compute chunks, and have the tier take them; their bytes."""
        content = np.random.default_rng(seed).integers(
            -128, 128, (len(keys), self.region.shape[1]), np.int8
        )
        self.region[: len(keys)] = content
        context = self.request(keys)
        self.manager.submit(keys, list(range(len(keys))), context, is_load=False)
        [result] = self.until_ended()
        assert result.success
        self.tier.on_request_finished(context)
        return content

    def request(self, keys: list[bytes]) -> Any:
        """A new request."""
        self._count += 1
        return self.manager.begin(f"request-{self._count}", keys)

    def find(self, keys: list[bytes], context: Any = None) -> int:
        """The leading chunks the tier says it has, to a request that ends then unless given."""
        if context is not None:
            return self.manager.find(keys, context, self.step)
        context = self.request(keys)
        found = self.manager.find(keys, context, self.step)
        self.tier.on_request_finished(context)
        return found

    def load(self, keys: list[bytes]) -> tuple[np.ndarray[Any, Any], Any]:
        """Look chunks up and load them; their rows, and the job's result."""
        context = self.request(keys)
        assert self.find(keys, context) == len(keys)
        self.region[:] = 0
        self.manager.submit(keys, list(range(len(keys))), context, is_load=True)
        [result] = self.until_ended()
        self.tier.on_request_finished(context)
        return self.region[: len(keys)].copy(), result

    def until_ended(self) -> list[Any]:
        """The results of the jobs under way."""
        results: list[Any] = wait_for(self.manager.ended)
        return results

    def step(self) -> bool:
        """Something may change until the next question."""
        self.manager.end_step()
        time.sleep(0.002)
        return True

    def stop(self) -> None:
        """An orderly stop; vLLM can let go of its region then."""
        self.tier.shutdown()
        self.tier.shutdown()
        self.tier._primary_kv_view.release()  # raises where somebody still has it
        self.spec._hold.release()


def wait_for(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return answer


@pytest.fixture
def live(host: FakeHost) -> Any:
    """Makes engines, and stops them."""
    made: list[Life] = []

    def make(given: dict[str, Any], **changes: Any) -> Life:
        made.append(Life(host, given, **changes))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_every_supported_version_was_recorded() -> None:
    recorded = {check_version(version) for version in VERSIONS}
    assert recorded == {(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)}


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        ("tier.StrataTier", "SecondaryTierManager"),
        ("worker.CpuWorker", "OffloadingWorker"),
        ("spec.StrataSpec", "TieringOffloadingSpec"),
    ],
)
def test_methods_take_what_the_host_gives(host: FakeHost, ours: str, base: str) -> None:
    import importlib

    module, _, name = ours.partition(".")
    kind = getattr(importlib.import_module(f"stratakv.connector.vllm.{module}"), name)
    recorded = host.record["classes"][base]["methods"]
    missing = [
        method
        for method, each in recorded.items()
        if each["is_abstract"] and getattr(getattr(kind, method), "__isabstractmethod__", False)
    ]
    assert not missing
    overridden = [m for m in vars(kind) if m in recorded and not m.startswith("__")]
    assert overridden
    for method in overridden:
        mine = inspect.signature(inspect.unwrap(getattr(kind, method)))
        names = [each for each in mine.parameters if each != "self"]
        theirs = list(signature_of(recorded[method]["parameters"]).parameters)
        # As many and more: 0.33 gives `expedited`, of which older ones know nothing.
        assert names[: len(theirs)] == theirs, f"{ours}.{method} of {host.version}"
        more = [mine.parameters[each] for each in names[len(theirs) :]]
        assert all(each.default is not inspect.Parameter.empty for each in more)


def test_what_is_read_of_the_host_is_there(host: FakeHost) -> None:
    """The fields of the configuration that the identity is made of."""
    config = host.record["classes"]
    assert {"tokens_per_block", "layer_names", "group_id"} <= set(
        config["OffloadingGroupConfig"]["fields"]
    )
    assert {"world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "rank"} <= set(
        config["OffloadingParallelConfig"]["fields"]
    )
    assert {"block_ids"} <= set(config["BlockIDsLoadStoreSpec"]["attributes"])


def test_the_settings_that_a_host_cannot_give_are_refused(host: FakeHost) -> None:
    with pytest.raises(ConfigError, match="did you mean cpu_bytes"):
        make_spec(host, extra(cpu_byte="1GiB"))
    with pytest.raises(ConfigError, match="takes an object of settings"):
        make_spec(host, extra() | {"stratakv": ["cpu"]})
    with pytest.raises(ConfigError, match="holds no chunk of"):
        make_spec(host, extra(chunks=0))
    with pytest.raises(ConfigError, match="leave it out"):
        make_spec(host, extra(), canonical_layout=True)


@pytest.mark.parametrize("version", ["0.29.4", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused(host: FakeHost, version: str) -> None:
    sys.modules["vllm"].__version__ = version
    with pytest.raises(ConfigError, match=r"versions 0\.30 to 0\.33, not"):
        make_spec(host, extra())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_layout": "NHD"}, "lays its KV cache out as NHD"),
        ({"kv_cache_layout": None}, "lays its KV cache out as None"),
        ({"dtype": "nvfp4"}, "nvfp4 of vLLM cannot be shared"),
    ],
)
def test_layouts_and_dtypes_that_nobody_knows_are_refused(
    host: FakeHost, changes: dict[str, Any], words: str
) -> None:
    if "dtype" in changes:
        changes = {"model": host.new("OffloadingModelConfig", **model_fields(host, "nvfp4"))}
    spec = make_spec(host, extra(), **changes)
    with pytest.raises(ConfigError, match=words):
        spec.get_manager()


def model_fields(host: FakeHost, dtype: str) -> dict[str, Any]:
    fields = {"name": "some/model", "dtype": dtype, "max_model_len": 0}
    return {k: v for k, v in fields.items() if k in host._fields("OffloadingModelConfig")}


def test_chunks_come_back_as_they_were(live: Any) -> None:
    engine = live(extra())
    keys = host_keys(9)
    assert engine.find(keys) == 0
    content = engine.fill(keys, seed=1)
    rows, result = engine.load(keys)
    assert result.success
    assert np.array_equal(rows, content)
    # A prompt that goes on elsewhere has the same beginning.
    assert engine.find(keys[:4] + host_keys(3, seed=9)) == 4
    # Another group's chunk of the same tokens is another one.
    assert engine.find([key[:-4] + (1).to_bytes(4, "big") for key in keys]) == 0


@pytest.mark.parametrize("disks", [1, 2])
def test_they_come_from_the_disk_after_a_restart(live: Any, tmp_path: Path, disks: int) -> None:
    named = ",".join(str(tmp_path / f"ssd{number}") for number in range(disks))
    given = extra(ssd_path=named, ssd_bytes="32MiB", ssd_admission="all")
    keys = host_keys(9)
    first = live(given)
    content = first.fill(keys, seed=1)
    first.stop()
    second = live(given)
    rows, result = second.load(keys)
    assert result.success
    assert np.array_equal(rows, content)
    assert all((tmp_path / f"ssd{number}" / "blocks").exists() for number in range(disks))


def test_what_is_stored_is_on_the_disk_before_any_stop(live: Any, tmp_path: Path) -> None:
    disk = {"ssd_bytes": "16MiB", "ssd_admission": "all"}
    engine = live(extra(ssd_path=str(tmp_path / "ssd"), **disk))
    other = live(extra(ssd_path=str(tmp_path / "other"), write_through=False, **disk))
    for each in (engine, other):
        each.fill(host_keys(5), seed=1)

    def on_disk(life: Life) -> int:
        tiers = life.tier._tiers
        with tiers.transfers.lock:
            return tiers.hierarchy.stats()["ssd"].blocks

    wait_for(lambda: on_disk(engine) == 5)
    assert on_disk(other) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 2},
        {"model": "another/model"},
        {"kv_cache_layout": "BLHNC"},
        {"salt": "theirs"},
        {"revision": "2"},
    ],
)
def test_a_store_of_another_identity_is_refused(
    host: FakeHost, live: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB"}
    first = live(extra(**settings))
    first.fill(host_keys(3), seed=1)
    first.stop()
    more = {name: changes.pop(name) for name in ("salt", "revision") if name in changes}
    if "model" in changes:
        fields = model_fields(host, "float32") | {"name": changes["model"]}
        changes["model"] = host.new("OffloadingModelConfig", **fields)
    spec = make_spec(host, extra(chunks=32, **settings, **more), **changes)
    with pytest.raises(TierConfigError):
        spec.get_manager()


@pytest.mark.parametrize("how", ["zero", "flip"])
def test_bytes_that_changed_in_the_slab_are_a_miss_from_then_on(live: Any, how: str) -> None:
    engine = live(extra())
    keys = host_keys(5)
    engine.fill(keys, seed=1)
    transfers = engine.tier._tiers.transfers
    slab = transfers._slab
    slots = np.frombuffer(slab.memory(), np.uint8).reshape(slab.num_slots, -1)
    if how == "zero":
        slots[:] = 0
    else:
        slots[:, 4000] ^= 1
    del slots
    _, result = engine.load(keys)
    assert not result.success
    assert result.successful_keys is None
    assert transfers.damaged == 5
    assert engine.find(keys) == 0
    engine.fill(keys, seed=2)  # computed anew
    assert engine.find(keys) == 5


def test_a_load_that_fails_is_not_offered_again(live: Any, tmp_path: Path) -> None:
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB", "ssd_admission": "all"}
    keys = host_keys(6)
    first = live(extra(**settings))
    first.fill(keys, seed=1)
    first.stop()
    engine = live(extra(**settings, faults="ssd:load:error=1"))
    _, result = engine.load(keys)
    assert not result.success
    assert engine.find(keys) == 0
    engine.manager.end_step()
    assert engine.find(keys) == 0  # nor another request
    assert engine.tier.has_pending_work() is False


def test_a_request_whose_load_found_no_room_is_not_offered_it_again(
    live: Any, tmp_path: Path
) -> None:
    """Nothing in the tiers changes by such a load, and vLLM asked for it for ever."""
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB", "ssd_admission": "all"}
    keys = host_keys(6)
    first = live(extra(**settings))
    first.fill(keys, seed=1)
    first.stop()
    engine = live(extra(**settings))
    slab = engine.tier._tiers.transfers._slab
    others = [bytes(36) + number.to_bytes(4, "big") for number in range(slab.num_slots)]
    assert None not in slab.reserve(others)  # as stores do whose copies take long
    context = engine.request(keys)
    assert engine.find(keys, context) == 6
    engine.manager.submit(keys, list(range(6)), context, is_load=True)
    [result] = engine.until_ended()
    assert not result.success
    assert engine.find(keys, context) == 0
    engine.tier.on_request_finished(context)
    slab.commit(others, [False] * len(others))


def test_a_store_whose_answers_never_come_is_not_waited_for_for_ever(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each answer of a server is damaged on its way, and each is asked for again."""
    monkeypatch.setattr(lookups, "MOST_RETRY_SECONDS", 0.1)
    engine, keys = live(extra()), host_keys(6)
    hierarchy = engine.tier._tiers.lookups._hierarchy
    monkeypatch.setattr(hierarchy, "find", lambda _keys: Prefix([], False, True))
    context = engine.request(keys)
    assert engine.tier.lookup(keys[0], context).name == "RETRY"
    assert engine.find(keys, context) == 0
    engine.tier.on_request_finished(context)


def test_a_hung_disk_holds_up_nobody(live: Any, tmp_path: Path) -> None:
    settings = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB", "ssd_admission": "all"}
    keys = host_keys(6)
    first = live(extra(**settings))
    first.fill(keys, seed=1)
    first.stop()
    engine = live(extra(**settings, read_seconds=0.3, faults="ssd:load:hang=1"))
    _, result = engine.load(keys)
    assert not result.success
    assert engine.find(keys) == 0
    engine.manager.submit(keys, list(range(6)), engine.request(keys), is_load=True)
    engine.tier.drain_jobs()  # a reset of vLLM's waits for the same
    assert [each.success for each in engine.manager.ended()] == [False]


def test_no_more_is_promised_than_the_region_holds(live: Any) -> None:
    engine = live(extra(chunks=16))
    long = host_keys(32)
    for start in (0, 16):
        engine.fill(long[start : start + 16], seed=start)
    context = engine.request(long)
    assert engine.find(long, context) == 12
    other = engine.request(long)
    assert engine.find(long, other) == 0  # what waits has the room
    engine.manager.end_step((context.req_id,))
    assert engine.find(long, other) == 12
    engine.tier.on_request_finished(other)


def test_chunks_that_are_quicker_to_compute_are_not_loaded(live: Any) -> None:
    engine = live(extra(load="auto"))
    keys = host_keys(8)
    engine.fill(keys, seed=1)
    assert engine.find(keys) == 8  # nothing is known of computing yet
    tiers = engine.tier._tiers
    tiers.prefill.note(10_000, 0, 1e-4)
    assert engine.find(keys) == 0
    # Without positions a tier is asked key by key, and vLLM stops at the first miss.
    declined = 8 if engine.knows_positions else 1
    assert tiers.economics.declined_tokens == {"cpu": declined * 32}
    tiers.prefill.note(100_000_000, 0, 1e6)
    assert engine.find(keys) == 8


def test_what_computing_costs_is_learned_from_steps(live: Any) -> None:
    engine = live(extra(load="auto"))
    keys = host_keys(8)
    context = engine.request(keys)
    engine.manager.end_step((context.req_id,))
    engine.region[:8] = 1
    engine.manager.submit(keys, list(range(8)), context, is_load=False)
    engine.until_ended()
    engine.manager.end_step()
    known = engine.tier._tiers.prefill.seconds_per_token
    assert (known is not None) == engine.knows_positions


def test_metrics_have_names_and_grow_by_what_happened(live: Any) -> None:
    engine = live(extra())
    keys = host_keys(4)
    engine.fill(keys, seed=1)
    data = engine.tier.get_stats().data
    assert data["stratakv:tier_blocks", ("cpu",)] == 4
    assert data["stratakv:tier_stored_bytes", ("cpu",)] == 4 * CHUNK
    assert engine.tier.get_stats() is None  # too soon
    engine.tier._metrics._next = 0.0
    assert ("stratakv:tier_stored_bytes", ("cpu",)) not in engine.tier.get_stats().data
    defined = type(engine.spec).build_metric_definitions(engine.spec.extra_config)
    assert {name for name, _ in data} <= defined.keys()
    assert "vllm:its_own" in defined


@pytest.mark.parametrize("part", ["transfers", "hierarchy"])
def test_the_thread_that_fails_leaves_misses(
    live: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    engine = live(extra())
    keys = host_keys(4)
    engine.fill(keys, seed=1)
    transfers = engine.tier._tiers.transfers
    if part == "transfers":
        monkeypatch.setattr(transfers, "_copy_out", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(transfers._hierarchy, "end_load", lambda *_: 1 / 0)
    context = engine.request(keys)
    assert engine.find(keys, context) == 4
    engine.manager.submit(keys, [0, 1, 2, 3], context, is_load=True)
    wait_for(lambda: transfers.is_broken)
    [result] = engine.until_ended()
    assert not result.success
    assert engine.find(keys) == 0
    engine.manager.submit(keys, [0, 1, 2, 3], context, is_load=False)
    assert len(engine.until_ended()) == 1
    assert "everything is computed from now on" in caplog.text


def caches(host: FakeHost, sizes: list[int], blocks: int) -> Any:
    tensors = [torch.randint(-128, 128, (blocks, size), dtype=torch.int8) for size in sizes]
    refs = [new_ref(host, i, size) for i, size in enumerate(sizes)]
    return host.new(
        "CanonicalKVCaches",
        tensors=[
            host.new("CanonicalKVCacheTensor", tensor=tensor, page_size_bytes=size)
            for tensor, size in zip(tensors, sizes, strict=True)
        ],
        group_data_refs=[refs],
    )


def new_ref(host: FakeHost, tensor: int, size: int) -> Any:
    return host.new("CanonicalKVCacheRef", tensor_idx=tensor, page_size_bytes=size)


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_the_worker_copies_blocks_to_chunks_and_back(host: FakeHost, per_chunk: int) -> None:
    cache = host.new("OffloadingCacheConfig", tokens_per_hash=32, blocks_per_chunk=per_chunk)
    spec = make_spec(host, extra(chunks=8 * per_chunk), cache=cache)
    kv = caches(host, [4096, 4096], blocks=20)
    before = [each.tensor.clone() for each in kv.tensors]
    worker = spec.get_worker(kv)
    assert spec.get_worker(kv) is worker
    spec_of = host.classes["GPULoadStoreSpec"]
    # Five blocks that begin in the middle of a chunk where a chunk has several.
    first = 4
    count = 5
    chunks = [6, 2, 5, 1, 3][: -(-(first % per_chunk + count) // per_chunk)]
    blocks = spec_of(block_ids=[7, 3, 11, 2, 19], group_sizes=[count], block_indices=[first])
    places = spec_of(block_ids=chunks, group_sizes=[len(chunks)], block_indices=[0])
    assert worker.submit_store(1, blocks, places)
    for each in kv.tensors:
        each.tensor.zero_()
    assert worker.submit_load(2, places, blocks, expedited=True)
    for each, old in zip(kv.tensors, before, strict=True):
        assert torch.equal(each.tensor[[7, 3, 11, 2, 19]], old[[7, 3, 11, 2, 19]])
        assert not each.tensor[[0, 1, 4]].any()
    assert [(each.job_id, each.success) for each in worker.get_finished()] == [(1, True), (2, True)]
    assert worker.get_finished() == []
    region = worker._region
    worker.shutdown()
    worker.shutdown()
    assert region.is_cleaned


def test_ranks_that_disagree_are_refused(host: FakeHost) -> None:
    spec = make_spec(host, extra())
    with pytest.raises(TierConfigError, match="the ranks disagree"):
        spec.get_worker(caches(host, [4096, 4096, 4096], blocks=4))


def test_settings_that_belong_together() -> None:
    with pytest.raises(ConfigError, match="without ssd_path"):
        read_settings({"ssd_bytes": "1GiB"})
    with pytest.raises(ConfigError, match="use lossless or none"):
        read_settings({"ssd_path": "/x", "ssd_codec": "fp8"})
    with pytest.raises(ConfigError, match="with and without TLS"):
        read_settings({"servers": ["grpc://a", "grpcs://b"]})
    with pytest.raises(ConfigError, match="faults 'ssd:load:hang=1'"):
        read_settings({"faults": "ssd:load:hang=1"})
    with pytest.raises(ConfigError, match="at least"):
        read_settings({"cpu_bytes": "1KiB"})
    with pytest.raises(ConfigError, match="read_seconds takes seconds above 0"):
        read_settings({"read_seconds": 0})
    settings = read_settings({"servers": "grpc://a:1,grpc://b:2", "cpu_bytes": 1 << 20})
    assert [str(each) for each in settings.own.servers] == ["grpc://a:1", "grpc://b:2"]
    assert settings.tiers().ssd is None


def test_regions_of_engines_that_are_gone_are_removed(tmp_path: Path) -> None:
    from stratakv.connector.vllm import region

    def places(engine: str) -> list[Path]:
        name = f"vllm_offload_{region.marked(engine)}"
        return [tmp_path / f"{name}.mmap", tmp_path / f"{name}.mmap.1"]

    other = tmp_path / "vllm_offload_e9.mmap"  # vLLM's without us
    for place in (*places("gone"), *places("living"), other):
        place.touch()
    hold = [region.Hold("living", tmp_path) for _ in range(2)]  # scheduler and worker
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys; from pathlib import Path; from stratakv.connector.vllm import region; "
            "region.Hold('gone', Path(sys.argv[1])); os._exit(0)",
            str(tmp_path),
        ],
        check=False,
    )
    assert killed.returncode == 0
    lock = tmp_path / f"vllm_offload_{region.marked('gone')}.lock"
    assert lock.exists()
    assert set(region.sweep(tmp_path)) == {*places("gone"), lock}
    assert region.sweep(tmp_path) == []
    hold[0].release()
    assert region.sweep(tmp_path) == []
    for place in places("living"):
        place.unlink()  # as vLLM does
    for _ in range(2):
        hold[1].release()
    assert list(tmp_path.iterdir()) == [other]


def test_a_start_that_was_refused_leaves_no_region(tmp_path: Path) -> None:
    from stratakv.connector.vllm import region

    place = tmp_path / f"vllm_offload_{region.marked('e')}.mmap"
    holds = [region.Hold("e", tmp_path) for _ in range(2)]
    place.touch()
    holds[0].abandon()
    assert place.exists()  # the other one may still use it
    holds[1].abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_page_has_every_setting_and_metric() -> None:
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    _, _, rest = page.partition("## Settings")
    table, _, _ = rest.partition("## When something fails")
    own = [option.removeprefix("own.") for option in OPTIONS if OPTIONS[option].section == "own"]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == own
    told = set(re.findall(r"`stratakv:(\w+)`", page))
    assert told == {*metrics.GAUGES, *metrics.COUNTERS, *metrics.CONNECTOR_COUNTERS}


def test_what_to_paste(capsys: pytest.CaptureFixture[str], host: FakeHost) -> None:
    flags = ["--cpu-bytes", "2MiB", "--salt", "s", "--no-require-tiers", "--region-bytes", "1MiB"]
    assert main(["config", "vllm", *flags]) == 0
    pasted = json.loads(capsys.readouterr().out)
    given = pasted["kv_connector_extra_config"]
    assert given["spec_module_path"] == "stratakv.connector.vllm"
    assert given["stratakv"] == {"cpu_bytes": "2MiB", "salt": "s", "require_tiers": False}
    spec = make_spec(host, given)
    assert spec.num_chunks == 128
    spec._hold.release()
    assert main(["config", "vllm", "--ssd-bytes", "1GiB"]) == 2
    assert "without ssd_path" in capsys.readouterr().err
    assert main(["config", "vllm", "--region-bytes", "1KiB"]) == 2
