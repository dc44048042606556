# SPDX-License-Identifier: Apache-2.0
"""Our classes against what was recorded of each supported version of vLLM, and what they refuse."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.connector.vllm import tier_metrics as metrics
from stratakv.connector.vllm.settings import HOST, OPTIONS
from stratakv.connector.vllm.versions import NEWEST, OLDEST, check_version
from stratakv.engine.cli.main import main
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.settings.values import ConfigError

from .fake_host import VERSIONS, FakeHost, host, signature_of
from .tier_life import extra, make_spec, model_fields

__all__ = ["host"]  # the fixture


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
        HOST.read({"ssd_bytes": "1GiB"})
    with pytest.raises(ConfigError, match="without ssd_path"):
        HOST.read({"faults": "ssd:load:error=1", "ssd_bytes": "1GiB"})
    with pytest.raises(ConfigError, match="use lossless or none"):
        HOST.read({"ssd_path": "/x", "ssd_codec": "fp8"})
    with pytest.raises(ConfigError, match="with and without TLS"):
        HOST.read({"servers": ["grpc://a", "grpcs://b"]})
    with pytest.raises(ConfigError, match="faults 'ssd:load:hang=1'"):
        HOST.read({"faults": "ssd:load:hang=1"})
    with pytest.raises(ConfigError, match="at least"):
        HOST.read({"cpu_bytes": "1KiB"})
    with pytest.raises(ConfigError, match="read_seconds takes seconds above 0"):
        HOST.read({"read_seconds": 0})
    settings = HOST.read({"servers": "grpc://a:1,grpc://b:2", "cpu_bytes": 1 << 20})
    assert [str(each) for each in settings.cache_servers] == ["grpc://a:1", "grpc://b:2"]
    assert not settings.has_ssd


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
    hold[0].release_lock()
    assert region.sweep(tmp_path) == []
    for place in places("living"):
        place.unlink()  # as vLLM does
    for _ in range(2):
        hold[1].release_lock()
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
    own = [option for option in OPTIONS if not OPTIONS[option].section]
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
    spec._hold.release_lock()
    assert main(["config", "vllm", "--ssd-bytes", "1GiB"]) == 2
    assert "without ssd_path" in capsys.readouterr().err
    assert main(["config", "vllm", "--region-bytes", "1KiB"]) == 2
