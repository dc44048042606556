# SPDX-License-Identifier: Apache-2.0
"""Whole engines over the Triton driver without a device: no refusal, no grid at fault, and what is
compiled when. No time is measured, and no answer means anything."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .nursery_site import nursery_client

pytest.importorskip("triton", reason="compiles with it")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROCESS_SECONDS = 600.0  # some thirty kernels, on a machine that does other things beside
ENGINES = (
    "64 blocks a table", "63 blocks a table", "9 blocks a table", "no tiers", "windows",
    "two cache groups", "heads of 128", "fp8", "capability 8.0",
    "long chunks by a library",
)  # fmt: skip
PLAIN_ENGINES = ("float64", "capability 7.0")
OF_DECODES = {"attend_split", "rms_norm_kernel", "rotate_write_kernel", "gate_kernel"}
KERNELS = OF_DECODES | {"paged_prefill_kernel"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Those of one process, in which all engines run."""
    cache = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = nursery_client.run(
        [sys.executable, "-P", "-m", "tests.deviceless_engine", "driver", *ENGINES, *PLAIN_ENGINES],
        timeout=PROCESS_SECONDS,
        env=environment,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def report_of(reports: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    def find(name: str) -> dict[str, Any]:
        report: dict[str, Any] = reports[name]
        assert "error" not in report, report["error"]
        return report

    return find


Reports = Callable[[str], dict[str, Any]]


def compiled_after_start(report: dict[str, Any]) -> list[str]:
    """The variants of kernels that requests met before they were compiled, each as its difference
    from the nearest one that was compiled before it."""
    known, found = list(report["start"]), []
    for variant in report["later"]:
        kernel, constants, arguments = variant
        traits = (constants | arguments).items()
        before = [(one | other).items() for name, one, other in known if name == kernel]
        known.append(variant)
        if before:
            nearest = max(before, key=lambda each: len(traits & each))
            found.append(f"{kernel} with {dict(traits - nearest)}")
        else:
            found.append(f"{kernel}, in no variant before")
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_refused(report_of: Reports, name: str) -> None:
    report = report_of(name)
    assert report["ends"] == {"length": 15}
    assert (report["loaded"] > 0) == (name != "no tiers"), "tokens of the cpu tier"
    assert set(report["launches"]) >= KERNELS, report["launches"]


@pytest.mark.parametrize("name", PLAIN_ENGINES)
def test_an_engine_of_plain_kernels_starts_and_records_nothing(
    report_of: Reports, name: str
) -> None:
    """Plain kernels read back, which is an error in a record."""
    report = report_of(name)
    assert report["ends"] == {"length": 15} and report["loaded"] > 0
    assert report["launches"] == {} and report["start"] == report["later"] == []


@pytest.mark.parametrize("name", ENGINES)
def test_requests_meet_no_compiler(report_of: Reports, name: str) -> None:
    later = compiled_after_start(report_of(name))
    assert later == [], "\n".join(["compiled after the start:", *later])


@pytest.mark.parametrize("name", ENGINES)
def test_a_start_compiles_what_decode_steps_take(report_of: Reports, name: str) -> None:
    started = {kernel for kernel, _, _ in report_of(name)["start"]}
    assert started >= OF_DECODES


def test_windows_and_float8_pools_have_kernels_of_their_own(report_of: Reports) -> None:
    def of_prefills(name: str, constant: str) -> set[bool]:
        report = report_of(name)
        compiled = [*report["start"], *report["later"]]
        return {each[constant] for kernel, each, _ in compiled if kernel == "paged_prefill_kernel"}

    assert of_prefills("windows", "HAS_WINDOW") == {False, True}
    assert of_prefills("63 blocks a table", "HAS_WINDOW") == {False}
    assert of_prefills("windows", "FP8") == {False}
    assert of_prefills("fp8", "FP8") == {True}


@pytest.mark.parametrize("name", ENGINES)
def test_a_library_computes_long_chunks_and_no_others(report_of: Reports, name: str) -> None:
    report = report_of(name)
    layers = 2
    long = [[1500, 1500], [1200, 1200]] if name == "long chunks by a library" else []
    assert report["by library"] == [each for each in long for _ in range(layers)]


def test_the_driver_refuses_what_a_gpu_refuses(report_of: Reports) -> None:
    refused = report_of("driver")["refused"]
    assert "invalid argument" in refused["second axis"] and "65536" in refused["second axis"]
    assert "invalid argument" in refused["third axis"]
    assert "OutOfResources" in refused["shared memory"] and "232448" in refused["shared memory"]
    assert "OutOfResources" in refused["threads"] and "2048" in refused["threads"]
    assert "KeyError" in refused["keyword"] and "warps" in refused["keyword"]
    assert "when stream is capturing" in refused["reading in a record"]


def test_the_driver_notes_launches_and_each_variant_once(report_of: Reports) -> None:
    report = report_of("driver")
    grids = [grid for _, grid, _ in report["launched"]]
    assert grids == [[2, 3, 1], [5, 1, 1], *[[1, 1, 1]] * 4]
    assert all(kernel == "store_number" for kernel, _, _ in report["launched"])
    variants = [(constants, arguments) for _, constants, arguments in report["compiled"]]
    assert variants == [
        ({"rows": 16}, {"out": "*i32/16", "number": "i32/16"}),
        ({"rows": 16}, {"out": "*i32/16", "number": "i32"}),
        ({"number": 1, "rows": 16}, {"out": "*i32/16"}),
        ({"rows": 16}, {"out": "*i32", "number": "i32/16"}),
        ({"rows": 32}, {"out": "*i32/16", "number": "i32/16"}),
    ]
