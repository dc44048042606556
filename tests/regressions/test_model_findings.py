# SPDX-License-Identifier: Apache-2.0
"""Findings about models, their memory and their device; tests/regressions/README.md has the ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.cli.main import main
from stratakv.engine.config.engine_config import EngineConfig
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.core import engine_core
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.setup import model_check
from stratakv.engine.core.setup import resolve_placement as device_config
from stratakv.engine.models import dtypes
from stratakv.engine.models.dtypes import choose_dtype, quick_cpu_types
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.sampling import copies
from stratakv.engine.worker import model_runner
from stratakv.engine.worker.pool_demand import PoolDemand, check_pool_size
from stratakv.engine.worker.runtime.cuda_runtime import CudaRuntime
from stratakv.engine.worker.runtime.pool_sizing import context_that_fits
from stratakv.tiers.settings.values import GIB, ConfigError

from ..connector.device import cuda_headers
from ..real_models import LLAMA_3_1_8B, QWEN3_8B, SMALL, write_config

pytestmark = pytest.mark.regression

BLOCK_BYTES = 2**21  # of Llama-3.1-8B in bfloat16: 16 tokens


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_config(tmp_path / "Llama-3.1-8B", LLAMA_3_1_8B)


@pytest.fixture
def quick_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with units for bfloat16, whatever this one has."""
    monkeypatch.setattr(dtypes, "quick_cpu_types", lambda: frozenset({"bfloat16"}))


def sized(model: Path, free_gib: float, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    """The blocks of the pool and the context, with so much memory free, as an engine finds them."""
    monkeypatch.setattr(model_check, "available_memory_bytes", lambda: int(free_gib * GIB))
    config: EngineConfig = engine_config(model, given)
    spec = load_model_spec(model)
    groups = plan_groups(spec.layout(config.cache.block_size, "bfloat16"))
    demand = PoolDemand(groups, config.scheduler.max_num_batched_tokens)
    blocks = model_check.blocks_of_pool(config, spec, demand)
    assert blocks is not None
    asked = config.model.max_model_len
    if asked is None:
        return blocks, context_that_fits(demand, blocks, spec.max_context)
    monkeypatch.setattr("stratakv.engine.worker.pool_demand.available_memory_bytes", lambda: None)
    check_pool_size(demand, blocks, asked)
    return blocks, asked


@pytest.mark.usefixtures("quick_cpu")
def test_u01_the_pool_comes_from_free_memory(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what weights and steps leave, and no more than four times the weights."""
    blocks, context = sized(llama, 64, monkeypatch)
    assert blocks * BLOCK_BYTES == pytest.approx((64 - 15.0) / 2 * GIB, rel=0.02)
    assert context == 131072
    with_tier, _ = sized(llama, 64, monkeypatch, kv_offload="cpu", kv_offload_cpu_bytes="16GiB")
    assert (blocks - with_tier) * BLOCK_BYTES == pytest.approx(8 * GIB, rel=0.01)
    most, _ = sized(llama, 4096, monkeypatch)
    assert most * BLOCK_BYTES == pytest.approx(4 * 15.0 * GIB, rel=0.01)


@pytest.mark.usefixtures("quick_cpu")
def test_u01_the_context_is_cut_to_the_pool_and_said(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks, context = sized(llama, 24, monkeypatch)
    assert context == (blocks - 1) * 16 < 131072
    [line] = [record.getMessage() for record in caplog.records]
    assert f"the context is {context} tokens instead of the model's 131072" in line
    assert "16 GiB would hold all" in line and "--max-model-len" in line


@pytest.mark.usefixtures("quick_cpu")
def test_u01_a_length_asked_for_is_kept_or_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have more of the memory than the half."""
    share = (22 - 15.0) / 2 * GIB / BLOCK_BYTES * 16
    blocks, context = sized(llama, 22, monkeypatch, max_model_len=40000)
    assert context == 40000 > share and blocks == 2501
    with pytest.raises(ConfigError) as refusal:
        sized(llama, 22, monkeypatch, max_model_len=131072)
    text = str(refusal.value)
    assert "one request of 131072 tokens, which takes 8193 blocks (16 GiB)" in text
    assert "lower --max-model-len to " in text
    with pytest.raises(ConfigError, match=r"weights take 15 GiB.* leaves no room for a KV pool"):
        sized(llama, 15, monkeypatch)


def test_u01_an_engine_takes_a_shorter_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole engine, of a pool that is too small for what the model allows."""
    shape = SMALL | {"hidden_size": 64, "intermediate_size": 64}
    path = write_config(tmp_path / "model", LLAMA_3_1_8B | shape)
    core = EngineCore(engine_config(path, {"num_blocks": 65, "load_format": "dummy"}))
    core.shutdown(1.0)
    assert core.ready().max_model_len == 1024
    assert "the context is 1024 tokens" in caplog.text


def test_u01_a_gpu_takes_a_shorter_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the size of the pool is known after the weights are loaded."""

    class Sizer:
        def blocks(self, model: object, demand: PoolDemand, **limits: int) -> int:
            assert limits["max_model_len"] < 37 * 16, "nobody asked for more"
            return 37

    monkeypatch.setattr(engine_core, "blocks_of_pool", lambda *_: None)
    monkeypatch.setattr(model_runner, "open_sizer", lambda placement: Sizer())
    core = EngineCore(engine_config(None, {}))
    core.shutdown(1.0)
    assert core.ready().max_model_len == 36 * 16


def test_u01_the_embedded_model_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "available_memory_bytes", lambda: 512 * GIB)
    config = engine_config(None, {})
    spec = load_model_spec(config.model.path)
    layout = spec.layout(16, "float32")
    demand = PoolDemand(plan_groups(layout), 2048)
    assert model_check.blocks_of_pool(config, spec, demand) == GIB // layout.page_bytes
    assert choose_dtype("auto", stored=spec.stored_dtype).name == "float32"


def test_u01_auto_is_the_checkpoints_type_where_the_device_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"slow": "fpu avx2 avx512f", "quick": "fpu avx512_bf16", "arm": "fp asimd bf16 asimdhp"}
    found = {}
    for name, words in flags.items():
        cpuinfo = tmp_path / name
        kind = "Features" if name == "arm" else "flags\t"
        cpuinfo.write_text(f"processor\t: 0\n{kind}\t: {words}\n\nprocessor\t: 1\n")
        found[name] = quick_cpu_types(cpuinfo)
    assert found == {"slow": set(), "quick": {"bfloat16"}, "arm": {"bfloat16", "float16"}}
    assert quick_cpu_types(tmp_path / "none") == set()

    monkeypatch.setattr(dtypes, "quick_cpu_types", lambda: found["quick"])
    assert choose_dtype("auto", stored="bfloat16").name == "bfloat16"
    monkeypatch.setattr(dtypes, "quick_cpu_types", lambda: found["slow"])
    slow = choose_dtype("auto", stored="bfloat16")
    assert slow.name == "float32" and "no avx512_bf16 or amx_bf16" in slow.reason
    assert choose_dtype("bfloat16", stored="float32").name == "bfloat16", "asked for"
    on_gpu = [choose_dtype("auto", "cuda", stored).name for stored in ("float16", "float32", None)]
    assert on_gpu == ["float16", "bfloat16", "bfloat16"]


@pytest.mark.usefixtures("quick_cpu")
def test_u01_the_choice_is_said_in_a_line(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = engine_config(llama, {})
    device_config.dtype_for(config, load_model_spec(llama), torch.device("cpu"))
    assert "computing in bfloat16: the checkpoint's" in caplog.text


def test_u01_a_plan_of_a_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path / "Qwen3-8B", QWEN3_8B)
    assert main(["plan", str(path), "--memory", "24GiB", "--no-probe", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["model"]["dtype"] == "bfloat16"
    assert made["tiers"]["pool"]["requests_of_max_model_len"] >= 1
    assert main(["plan", str(path), "--memory", "8GiB", "--no-probe"]) == 2
    text = capsys.readouterr().err
    assert "8 GiB of memory cannot hold the weights (15.3 GiB)" in text


@contextmanager
def set_devices() -> Iterator[list[int]]:
    """What torch is told to make current, on a build without CUDA too."""
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._C, "_cuda_setDevice", told.append, raising=False)
        yield told


def test_gpu_review_1_cuda_without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks at the index in Python, before it asks CUDA for anything."""
    monkeypatch.setattr(device_config, "probe_cuda", lambda: None)
    monkeypatch.setattr(
        device_config, "choose_gpu", lambda placement, state: SimpleNamespace(name="one")
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: object())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    for name, index in (("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)):
        device = device_config.placement_of(engine_config(None, {"device": name})).device
        assert device == torch.device("cuda", index)
        with set_devices() as told:
            runtime = CudaRuntime(torch.device(name))
            assert runtime.device == device
            runtime.enter_thread()
        assert told == [index]


def test_gpu_review_3_results_are_waited_for_by_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for a stream is one that torch's search for unmeant waits refuses."""
    happened: list[Any] = []

    class Event:
        def record(self, stream: object) -> None:
            happened.append(("recorded", stream))

        def synchronize(self) -> None:
            happened.append("waited")

    class Copy:
        def copy_(self, tensor: object, non_blocking: bool) -> Copy:
            assert non_blocking
            happened.append("copied")
            return self

    cuda = SimpleNamespace(Event=Event, current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(copies, "torch", SimpleNamespace(cuda=cuda, empty=lambda *_, **__: Copy()))
    there = SimpleNamespace(device=torch.device("cuda", 0), shape=(2,), dtype=torch.float32)
    assert len(copies.to_host([there, there])) == 2  # type: ignore[list-item]
    assert happened == ["copied", "copied", ("recorded", "stream of cuda:0"), "waited"]


def test_gpu_review_7_the_headers_of_cuda_13_0() -> None:
    source = cuda_headers.source_of_check(13000)
    assert "static_assert(CUDART_VERSION == 13000);" in source
    assert "size_t *, size_t, cudaStream_t) = cudaMemcpyBatchAsync;" in source
