# SPDX-License-Identifier: Apache-2.0
"""The whole-engine sections: rehearsals, what a bound counts, and what stops a section."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stratakv.benchmarks.gpu.engine import model as engine_model
from stratakv.benchmarks.gpu.engine import phases as engine_phases
from stratakv.benchmarks.gpu.engine import step as engine_step
from stratakv.benchmarks.gpu.engine.phases import PHASES
from stratakv.benchmarks.gpu.section import Place, WrongResult
from stratakv.benchmarks.offload.workbench import MeasuredEngine, Run
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.models.dtypes import compute_dtype, kv_dtype_name, pool_dtype
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.worker.forward.kernel_attention import choose_kernels
from stratakv.engine.worker.model_runner import ModelRunner
from stratakv.kernels import kernel_choice as choice
from stratakv.kernels import pool_checks
from stratakv.kernels.kernel_choice import Hardware, KernelRefused

from .copy_rehearsal import is_plot, no_results, rehearsal, rehearse


def test_a_step_reads_its_weights_and_its_kv_once(tmp_path: Path) -> None:
    results = rehearse(engine_step.SECTION, tmp_path)
    rows = results.rows("engine-step")
    assert [row["case"] for row in rows] == [
        f"{way}, {batch}"
        for way in ("recorded", "launched", "fp8 KV")
        for batch in ("1 x 32", "3 x 64")
    ]
    hidden, mlp, kv, vocab, layers = 64, 96, 2 * 16, 512, 2
    layer = 2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * mlp + 2 * hidden
    weights = layers * layer + hidden + vocab * hidden
    for row in rows:
        middle = row["context"] + engine_step.WARM_UPS + 1
        token_bytes = 2 * kv * layers * (1 if row["way"] == "fp8 KV" else 8)
        assert row["read_bytes"] == 8 * weights + row["requests"] * middle * token_bytes
        assert row["tokens_per_second"] == pytest.approx(row["requests"] / row["seconds"])
    assert "engine_step_over_bound" not in results.report.ratios, "no ceiling was measured"
    results.set_ceiling("device_copy_gb_per_second", 10.0)
    rows[1]["bound_over_step"] = results.ratio_to_ceiling(5.0, "device_copy_gb_per_second")
    engine_step.set_ratio(results)
    assert results.report.ratios["engine_step_over_bound"] == 0.5
    assert is_plot(engine_step.SECTION.plot(results, tmp_path))


def test_a_step_that_answers_nothing_stops_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = ModelRunner.execute

    def silent(self: object, output: object) -> object:
        result = execute(self, output)  # type: ignore[arg-type]
        result.sampled_token_ids = {key: [] for key in result.sampled_token_ids}
        return result

    monkeypatch.setattr(ModelRunner, "execute", silent)
    with pytest.raises(WrongResult, match="a request got no token"):
        rehearse(engine_step.SECTION, tmp_path)


def test_phases_come_from_their_places(tmp_path: Path) -> None:
    results = rehearse(engine_phases.SECTION, tmp_path)
    rows = results.rows("engine-phases")
    assert [row["phase"] for row in rows] == list(PHASES)
    for row in rows:
        assert row["tokens"] == 320 and len(row["all_seconds"]) == 3
        assert row["cold_over_this"] == pytest.approx(rows[0]["seconds"] / row["seconds"])
    assert "ttft_cold_over_cpu" not in results.report.ratios, "another length was asked for"
    assert is_plot(engine_phases.SECTION.plot(results, tmp_path))


@pytest.mark.parametrize(
    ("fault", "message"),
    [("place", "320 tokens: 0 came from there"), ("token", "none of the 20 likeliest")],
)
def test_a_phase_from_elsewhere_or_an_unlikely_token_stops_the_section(
    fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MeasuredEngine.run

    def wrong(self: MeasuredEngine, prompts: object, params: object, **options: bool) -> Run:
        run = real(self, prompts, params, **options)  # type: ignore[arg-type]
        if fault == "place":
            run.cached_tokens.clear()
        else:
            run.token_ids = [[-1]]
        return run

    monkeypatch.setattr(MeasuredEngine, "run", wrong)
    with pytest.raises(WrongResult, match=message):
        rehearse(engine_phases.SECTION, tmp_path)


def test_a_load_is_held_against_the_link_it_comes_over() -> None:
    results = no_results()
    case = engine_phases.Case(engine_phases.TARGET_TOKENS)
    seconds = {"cold": [0.25], "pool": [0.01], "cpu": [0.04], "ssd": [0.4]}
    engine_phases.add_rows(results, case, seconds, 10**9)
    assert "ttft_cpu_load_over_transfer" not in results.report.ratios, "no ceiling was measured"
    results.set_ceiling("pinned_to_device_gb_per_second", 50.0)
    engine_phases.add_rows(results, case, seconds, 10**9)
    assert results.report.ratios["ttft_cpu_load_over_transfer"] == pytest.approx(1.5)
    assert results.report.ratios["ttft_cold_over_cpu"] == 6.25


def test_the_model_is_llama_3_1_8b_in_shape(tmp_path: Path) -> None:
    place = rehearsal()
    place.is_rehearsal = False
    with engine_model.model_directory(place) as path:
        spec = load_model_spec(path)
    assert spec.max_context == 131072
    assert spec.layout(16, "bfloat16").page_bytes == 2 * 2**20
    assert engine_model.read_weight_bytes(spec, 2) == pytest.approx(15.0e9, rel=0.01)


def test_nothing_measured_is_no_plot(tmp_path: Path) -> None:
    for section in (engine_step, engine_phases):
        assert section.SECTION.plot(no_results(), tmp_path) is None


def option_sets(tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that the whole-engine sections give an engine on a GPU, by the section's name."""
    place = Place(torch.device("cuda"), is_quick=True, is_rehearsal=False)
    with engine_model.model_directory(place) as model:
        documents = engine_phases._Documents(place, model, 1024)
        yield "engine-phases", engine_phases.make_options(place, documents, tmp_path)
        for way in engine_step.WAYS:
            given = engine_step.make_options(place, way, ((64, 8192),))
            yield f"engine-step, {way.name}", given


def test_the_kernels_take_every_option_set_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsal computes in float64 on the CPU, which says nothing about a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    hopper = Hardware("a GPU", (9, 0), has_triton=True)
    for module in (choice, pool_checks):
        monkeypatch.setattr(module, "probe_hardware", lambda: hopper)
    for name, options in option_sets(tmp_path):
        # What a measured engine has where nothing is asked for.
        config = engine_config(None, {"dtype": "float32"} | options)
        dtype = compute_dtype(config.model.dtype, "cuda", None)
        pool_type = pool_dtype(kv_dtype_name(config.cache.kv_cache_dtype, dtype))
        assert config.model.strict_kernels, name
        with FakeTensorMode():
            q = torch.empty((0, 32, 128), dtype=dtype, device="cuda:0")
            kv = torch.empty((8, 2, 16, 8, 128), dtype=pool_type, device="cuda:0")
            assert choose_kernels(q, kv, 1.0, strict=True).can_record_decodes, name


def test_the_kernels_refuse_what_a_section_must_not_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    hopper = Hardware("a GPU", (9, 0), has_triton=True)
    monkeypatch.setattr(choice, "probe_hardware", lambda: hopper)
    for dtype, reason in ((torch.float32, "tensor cores"), (torch.float64, "float64")):
        with FakeTensorMode():
            q = torch.empty((0, 32, 128), dtype=dtype, device="cuda:0")
            kv = torch.empty((8, 2, 16, 8, 128), dtype=dtype, device="cuda:0")
            with pytest.raises(KernelRefused, match=reason):
                choose_kernels(q, kv, 1.0, strict=True)
