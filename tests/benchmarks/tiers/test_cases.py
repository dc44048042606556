# SPDX-License-Identifier: Apache-2.0
"""The cases of `stratakv bench tiers`: each does what its figure claims, or says it did not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.benchmarks.harness.comparison import (
    LEAST_ROUNDS,
    Comparison,
    Outcome,
    WrongWork,
    quartiles,
    take_rounds,
)
from stratakv.benchmarks.harness.gate import Gate
from stratakv.benchmarks.harness.report import Report
from stratakv.benchmarks.tiers import disk_limit, store_case
from stratakv.benchmarks.tiers.index_case import IndexCase
from stratakv.benchmarks.tiers.scale import MIB, QUICK, SIZES, key_of, layout_of
from stratakv.benchmarks.tiers.slab_case import SlabCase, footprint_bytes
from stratakv.benchmarks.tiers.store_case import StoreCase
from stratakv.tiers import record
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.ssd import SsdStore, reader, record_writer


def test_both_sides_take_turns_after_a_warm_up() -> None:
    seen: list[str] = []

    def noting(name: str, rates: list[float]) -> float:
        seen.append(name)
        return rates.pop(0)

    ours, limits = [90.0, 3.0, 1.0, 4.0], [90.0, 2.0, 1.0, 2.0]
    besides = [6.0, 4.0, 4.0]
    comparison = Comparison(
        "one",
        "bytes/s",
        "other",
        lambda: noting("a", ours),
        lambda: noting("b", limits),
        lambda: noting("c", besides),
    )
    outcome = take_rounds(comparison, 3)
    assert "".join(seen) == "ab" + "cab" + "bac" + "cab"
    assert outcome.figures()["beside_ratio"] == 0.5
    assert outcome.ratios == [1.5, 1.0, 2.0], "the warm-up is not among them"
    assert outcome.ratio == 1.5
    assert outcome.figures()["median"] == 3.0


def test_after_its_time_a_comparison_has_the_least_rounds() -> None:
    comparison = Comparison("one", "bytes/s", "other", lambda: 1.0, lambda: 1.0)
    assert len(take_rounds(comparison, 16, 0.0).ours) == LEAST_ROUNDS
    assert len(take_rounds(comparison, 2, 0.0).ours) == 2
    assert len(take_rounds(comparison, 16, 60.0).ours) == 16


def test_the_limit_against_itself() -> None:
    comparison = Comparison("one", "bytes/s", "other", lambda: 1.0, lambda: 1.0)
    outcome = Outcome(comparison, [1.0] * 5, [4.0, 2.0, 2.0, 4.0, 9.0])
    assert outcome.limit_twice == [2.0, 2.0], "once the earlier above, once the later"


def test_quartiles() -> None:
    assert quartiles([5.0, 1.0, 2.0, 3.0, 4.0]) == (2.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0)


def test_a_cost_is_the_time_that_is_added() -> None:
    comparison = Comparison("one", "bytes/s", "other", lambda: 1.0, lambda: 1.0)
    report = Report("tiers", "stratakv bench tiers")
    report.figures |= {"contests": {}, "spreads": {}}
    Outcome(comparison, [4.0, 2.0], [5.0, 2.0]).add_to(report, store_case.cost)
    assert report.ratios["one"] == pytest.approx(1 / 0.9 - 1)
    assert report.figures["spreads"]["one"] == pytest.approx((0.0625, 0.1875))
    assert report.figures["spreads"]["one_aa"] == pytest.approx((-0.6, 1.5 - 2.1))


def test_gates() -> None:
    least, most = Gate(least=0.8), Gate(most=1.5)
    assert (least.wanted, most.wanted) == (">= 0.8", "<= 1.5")
    assert [least.is_met(0.79), least.is_met(0.8), most.is_met(1.5), most.is_met(1.6)] == [
        False,
        True,
        True,
        False,
    ]


def test_the_footprint_is_four_caches(tmp_path: Path) -> None:
    for index, text in enumerate(("32K", "1024K", "48M", "512")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{text}\n")
    assert footprint_bytes(64 * MIB, tmp_path) == 192 * MIB
    assert footprint_bytes(256 * MIB, tmp_path) == 256 * MIB
    assert footprint_bytes(64 * MIB, tmp_path / "nothing") == 64 * MIB


def test_layouts_and_keys_are_what_they_say() -> None:
    assert [layout_of(size).page_bytes for size in SIZES.values()] == list(SIZES.values())
    assert len({key_of(number) for number in range(1000)}) == 1000
    assert {len(key_of(number)) for number in range(10)} == {40}


@pytest.fixture
def slab() -> Iterator[CpuSlab]:
    slab = CpuSlab(layout_of(2**18), 4 * MIB)
    yield slab
    slab.close()


@pytest.mark.parametrize("choice", ["fio", "loop"])
def test_the_limit_of_a_disk(tmp_path: Path, choice: str, slab: CpuSlab) -> None:
    if choice == "fio" and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    path = tmp_path / "limit"
    limit = disk_limit.make_limit(choice, path, 2**18, 8 * MIB, slab)
    assert limit.name == choice
    assert path.stat().st_blocks * 512 >= 8 * MIB, "laid out"
    before = path.read_bytes()
    assert limit.read(8 * MIB) > 0
    assert path.read_bytes() == before
    assert limit.write(8 * MIB) > 0
    assert path.read_bytes() != before
    assert path.stat().st_size == 8 * MIB
    limit.close()
    assert not path.exists()


@pytest.mark.parametrize("choice", ["fio", "loop"])
def test_the_buffers_of_a_limit_are_the_slab(tmp_path: Path, choice: str, slab: CpuSlab) -> None:
    """fio is told the place by an option that is documented as something else."""
    if choice == "fio" and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    limit = disk_limit.make_limit(choice, tmp_path / "limit", 2**18, 8 * MIB, slab)
    assert limit.most_buffers == 16
    slab.memory()[:] = bytes(4 * MIB)
    limit.read(32 * MIB)
    assert all(any(slab.memory()[at : at + 4096]) for at in range(0, 4 * MIB, 4096))
    limit.close()


def test_a_slab_too_small_for_the_limit_is_refused(tmp_path: Path, slab: CpuSlab) -> None:
    with pytest.raises(ValueError, match="take 8388608 bytes and the slab has 4194304"):
        disk_limit.make_limit("loop", tmp_path / "limit", MIB, 8 * MIB, slab)
    assert list(tmp_path.iterdir()) == []


def test_without_fio_the_loop_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: CpuSlab
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    limit = disk_limit.make_limit(None, tmp_path / "limit", 2**18, MIB, slab)
    assert limit.name == "loop"
    limit.close()


def test_a_failing_fio_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: CpuSlab
) -> None:
    fio = tmp_path / "fio"
    fio.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    limit = disk_limit.make_limit(None, tmp_path / "limit", 2**18, MIB, slab)
    with pytest.raises(WrongWork, match="status 3: no such engine"):
        limit.write(MIB)


def test_the_slab_case_moves_every_block() -> None:
    case = SlabCase(SIZES["5MiB"], 64 * MIB)
    before = case.slab.stats()
    assert case.put() > 0 and case.get() > 0 and case.copy() > 0
    after = case.slab.stats()
    assert after.stored_blocks - before.stored_blocks == case.num_blocks == 12
    assert after.loaded_blocks - before.loaded_blocks == case.num_blocks
    assert after.evicted_blocks == 0
    assert after.pinned_blocks == after.reserved_blocks == 0
    case.close()


def test_the_store_case_keeps_its_share_and_checks(tmp_path: Path) -> None:
    case = StoreCase(tmp_path / "case", SIZES["256KiB"], QUICK, "loop")
    assert case.write() > 0 and case.churn() > 0
    assert case.store.stats().blocks == case.num_live
    assert case.read() > 0
    assert case.look_ups_while_churning() > 0
    assert case.store.stats().blocks == case.num_live
    case.store.drop(case.store._state.index.keys())
    with pytest.raises(WrongWork, match="did not have a block"):
        case.read()
    case.close()


def test_hashing_is_left_out_for_the_comparison_only(tmp_path: Path) -> None:
    case = StoreCase(tmp_path / "case", SIZES["2MiB"], QUICK, "loop")
    real = record.payload_digest, record_writer.payload_digest, reader.verify_record
    reads, writes = store_case.checksum_comparisons(case)
    assert reads.limit() > 0 and writes.limit() > 0
    assert (record.payload_digest, record_writer.payload_digest, reader.verify_record) == real
    with pytest.raises(WrongWork, match="did not have a block"):
        reads.ours()  # what was written without a checksum is refused
    case.store.close(10)
    case.slab.close()


def test_codecs_are_measured_with_what_they_save(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("tiers", "stratakv bench tiers")
    report.figures["codecs"] = found = store_case.measure_codecs(1)
    assert len(found) == 2 * 3
    assert {name.split("_")[0] for name in found} == {"lossless", "fp8"}
    assert all(0.2 < each["ratio"] < 0.9 for each in found.values())
    assert all(min(each["encode"] + each["decode"]) > 0 for each in found.values())
    store_case.print_codecs(report)
    assert "lossless bfloat16" in capsys.readouterr().out


def test_the_index_case_opens_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = IndexCase(tmp_path / "index", 5000)
    comparison = case.comparison()
    assert comparison.ours() > 0 and comparison.limit() > 0
    assert 50 < case.bytes_per_entry() < 5000
    assert min(case.look_ups(2)) > 0
    blocks = tmp_path / "index" / "blocks"
    assert blocks.stat().st_size >= 5000 * 8192 > 100 * blocks.stat().st_blocks * 512
    monkeypatch.setattr(SsdStore, "lookup", lambda _self, _keys: [])
    with pytest.raises(WrongWork, match="0 keys were found"):
        case.look_ups(1)
    case.entries += 1
    with pytest.raises(WrongWork, match="5000 rows, not 5001"):
        case.pass_over()
