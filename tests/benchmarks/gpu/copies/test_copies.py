# SPDX-License-Identifier: Apache-2.0
"""Copies: a rehearsal of every method, jobs that lie as they should, wrong bytes, the targets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.benchmarks.gpu.copies import methods as copy_methods
from stratakv.benchmarks.gpu.copies import methods_section as copies
from stratakv.benchmarks.gpu.copies.methods import (
    BLOCKS,
    DIRECTIONS,
    METHODS,
    Field,
    Job,
    Method,
    check_jobs,
    count_jobs,
    job_addresses,
    scattered_ids,
)
from stratakv.benchmarks.gpu.plots import bytes_name
from stratakv.benchmarks.gpu.section import Place, Row, SectionOver, WrongResult
from stratakv.kernels.copy.copy_engine import merge_neighbours
from stratakv.kernels.kernel_choice import KernelRefused

from ..copy_rehearsal import forbid_timing, is_plot, no_results, rehearsal, rehearse

BLOCK = 512
HALF = 4 * BLOCKS * BLOCK


def make_field() -> Field:
    return Field.make(rehearsal(), torch.zeros(2 * HALF, dtype=torch.uint8))


@pytest.mark.parametrize("quick", [True, False])
def test_a_rehearsal(tmp_path: Path, quick: bool) -> None:
    results = no_results(tmp_path)
    for direction in DIRECTIONS:
        results.set_ceiling(f"pinned_{direction}_gb_per_second", 1000.0)
    results = rehearse_into(results, quick)
    rows = results.rows("copies")
    cases = [(row["method"], row["block_bytes"], row["direction"]) for row in rows]
    assert sorted(cases) == sorted(
        itertools.product([method.name for method in METHODS], (128, 256), DIRECTIONS)
    )
    for row in rows:
        assert (
            row["over_pinned"] == pytest.approx(row["gb_per_second"] / 1000) and row["over_pinned"]
        )
        assert (row.get("submit_microseconds", 0) > 0) == (row["direction"] != "both")
        assert ("merge_microseconds" in row) == (
            "merged" in row["method"] and row["direction"] != "both"
        )
    assert set(results.report.ratios) - {"both_ways_over_one_way"} == {
        target.name for target in copies.TARGETS
    }
    assert "notes" not in results.report.figures["copies"]
    assert is_plot(copies.SECTION.plot(results, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-copies.png"]


def rehearse_into(results: Any, quick: bool) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copies.SECTION.run(rehearsal(quick), results)
    finally:
        torch.set_num_threads(threads)
    return results


def test_without_ceilings_there_is_no_ratio_to_them(tmp_path: Path) -> None:
    results = rehearse(copies.SECTION, tmp_path)
    assert all(row["over_pinned"] is None for row in results.rows("copies"))
    assert set(results.report.ratios) == {"submit_64_blocks_microseconds", "both_ways_over_one_way"}
    assert is_plot(copies.SECTION.plot(results, tmp_path))


def test_nothing_measured_is_no_plot(tmp_path: Path) -> None:
    assert copies.SECTION.plot(no_results(), tmp_path) is None


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_jobs_share_no_block_and_no_slot(method: Method) -> None:
    field = make_field()
    out, back = field.jobs(
        BLOCK, run_length=method.run_length, slots_in_order=method.slots_in_order
    )
    assert len(out) == len(back) == 4
    ids = torch.cat([job.block_ids for job in out + back])
    assert len(ids.unique()) == len(ids) == 8 * BLOCKS
    slots = torch.cat([job.slots for job in out + back])
    assert torch.equal(slots.sort().values, torch.arange(8 * BLOCKS))
    assert all(int(job.slots.max()) < 4 * BLOCKS for job in out)
    assert ids.max() < len(out[0].pool) == 16 * BLOCKS
    for job in out + back:
        is_step = job.block_ids.diff() == 1
        if method.run_length > 1:
            assert is_step.view(-1).sum() >= BLOCKS - BLOCKS // method.run_length
            merged = merge_neighbours(*job_addresses(job))
            assert merged.count <= BLOCKS // method.run_length
            assert merged.sizes.sum() == BLOCKS * BLOCK == job.num_bytes
        else:
            assert is_step.sum() < 4, "scattered"
        if method.slots_in_order:
            assert torch.equal(job.slots, job.slots[0] + torch.arange(BLOCKS))


def test_ids_in_runs() -> None:
    ids = scattered_ids(64, 16, torch.Generator().manual_seed(1))
    assert torch.equal(ids.sort().values, torch.arange(64))
    assert all(torch.equal(run, run[0] + torch.arange(16)) for run in ids.view(4, 16))


@pytest.mark.parametrize(
    ("half", "block", "jobs"),
    [(640 << 20, 5 << 20, 2), (640 << 20, 2 << 20, 5), (640 << 20, 64 << 10, 64), (1, 64, 1)],
)
def test_how_many_jobs(half: int, block: int, jobs: int) -> None:
    assert count_jobs(half, block) == jobs


def test_addresses_of_a_job() -> None:
    pool, slab = (torch.zeros(4, 100, dtype=torch.uint8) for _ in range(2))
    block_ids, slots = torch.tensor([3, 0]), torch.tensor([1, 2])
    for is_to_host in (True, False):
        job = Job(pool, slab, block_ids, slots, is_to_host)
        sources, targets, sizes = job_addresses(job)
        in_pool, in_slab = (sources, targets) if is_to_host else (targets, sources)
        assert (in_pool - pool.data_ptr()).tolist() == [300, 0]
        assert (in_slab - slab.data_ptr()).tolist() == [100, 200]
        assert sizes.tolist() == [100, 100] and job.num_bytes == 200


@pytest.mark.parametrize("is_to_host", [True, False])
def test_one_wrong_byte_is_found(is_to_host: bool) -> None:
    field = make_field()
    jobs = field.jobs(BLOCK)[0 if is_to_host else 1]
    for job in jobs:
        copy_methods.prepare_single(rehearsal(), job, None)()
    check_jobs("right", jobs)
    jobs[2].slab[jobs[2].slots[5], BLOCK - 1] += 1
    with pytest.raises(WrongResult, match="wrong: 1 of the 64 blocks of job 2 differ"):
        check_jobs("wrong", jobs)


def test_what_was_copied_before_is_no_result() -> None:
    field = make_field()
    for jobs in field.jobs(BLOCK):
        for job in jobs:
            copy_methods.prepare_single(rehearsal(), job, None)()
    field.spoil(rehearsal())
    for jobs in field.jobs(BLOCK):
        with pytest.raises(WrongResult, match="64 of the 64 blocks"):
            check_jobs("old", jobs)


@pytest.mark.parametrize(
    ("name", "wrong", "case"),
    [
        ("gather_blocks", lambda *_, **__: None, "kernel, 12 programs, 256 B, to_host"),
        ("scatter_blocks", lambda *_, **__: None, "kernel, 12 programs, 256 B, to_device"),
        ("copy_batch_plain", lambda batch: None, "batched, 256 B, to_host"),
    ],
)
def test_a_wrong_copy_stops_the_section(
    name: str, wrong: object, case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(copy_methods, name, wrong)
    method = copy_methods.BATCHED if "batch" in name else copy_methods.FEW
    if case.endswith("to_device"):
        monkeypatch.setattr(copies, "DIRECTIONS", ("to_device",))
    monkeypatch.setattr(copies, "METHODS", (method,))
    forbid_timing(monkeypatch, copies)
    results = no_results(tmp_path)
    with pytest.raises(WrongResult, match=f"^{case}: 64 of the 64 blocks of job 0"):
        copies.SECTION.run(rehearsal(), results)
    assert results.rows("copies") == [] and results.report.ratios == {}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), KernelRefused("no runtime 12.8")]
)
def test_a_method_that_cannot_run_is_a_note(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise error

    methods = (Method("none", refuse), copy_methods.BATCHED)  # type: ignore[arg-type]
    monkeypatch.setattr(copies, "METHODS", methods)
    results = rehearse(copies.SECTION, tmp_path)
    assert {row["method"] for row in results.rows("copies")} == {"batched"}
    assert results.report.figures["copies"]["notes"] == [
        f"none, 256 B: left out: {error}",
        f"none, 128 B: left out: {error}",
    ]


def test_what_was_measured_in_time_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = itertools.count()

    def check_time(place: Place) -> None:
        if next(checks) == len(DIRECTIONS):
            raise SectionOver

    monkeypatch.setattr(Place, "check_time", check_time)
    results = no_results(tmp_path)
    with pytest.raises(SectionOver):
        copies.SECTION.run(rehearsal(), results)
    assert len(results.rows("copies")) == len(DIRECTIONS)
    assert "both_ways_over_one_way" in results.report.ratios


def row(direction: str, rate: float, submit: float = 0.0, **other: Any) -> Row:
    entries: Row = {"direction": direction, "gb_per_second": rate, "block_bytes": 2048}
    entries |= {"submit_microseconds": submit, "is_for_any_blocks": True, "method": "m"}
    return entries | other


def test_the_targets_by_hand() -> None:
    results = no_results()
    results.set_ceiling("pinned_to_host_gb_per_second", 50.0)
    results.set_ceiling("pinned_to_device_gb_per_second", 40.0)
    results.set_ceiling("pinned_both_gb_per_second", 75.0)
    for one in (
        row("to_host", 48.0, 150.0),
        row("to_host", 47.5, 30.0),  # within 2 % of the fastest
        row("to_host", 40.0, 5.0),  # too slow to count
        row("to_host", 49.9, 2.0, is_for_any_blocks=False),
        row("to_host", 49.9, 2.0, block_bytes=4096),
        row("to_device", 39.0, 8.0),
        row("both", 72.0),
        row("both", 60.0),
    ):
        results.add_row("copies", one)
    copies.set_ratios(results, 2048)
    assert results.report.ratios == pytest.approx(
        {
            "blocks_to_host_over_pinned": 0.96,
            "blocks_to_device_over_pinned": 0.975,
            "submit_64_blocks_microseconds": 30.0,
            "both_ways_over_one_way": 1.5,
            "blocks_both_over_pinned": 0.96,
        }
    )
    met = {
        target.name: target.is_met(results.report.ratios[target.name]) for target in copies.TARGETS
    }
    assert met == {
        "blocks_to_host_over_pinned": True,
        "blocks_to_device_over_pinned": True,
        "submit_64_blocks_microseconds": False,
        "blocks_both_over_pinned": True,
    }


def test_targets_of_half_a_run() -> None:
    results = no_results()
    results.set_ceiling("pinned_to_host_gb_per_second", 50.0)
    results.add_row("copies", row("to_host", 48.0, 9.0))
    copies.set_ratios(results, 2048)
    assert results.report.ratios == {"blocks_to_host_over_pinned": 0.96}


def test_names_of_sizes() -> None:
    sizes = {512: "512 B", 64 << 10: "64 KiB", 5 << 20: "5 MiB", 3 << 29: "1.5 GiB"}
    assert {size: bytes_name(size) for size in sizes} == sizes
