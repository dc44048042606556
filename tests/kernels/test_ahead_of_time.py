# SPDX-License-Identifier: Apache-2.0
"""Every shipped configuration compiles for sm_80 and sm_90 within what those GPUs have.

No device takes part. CI compiles one configuration of each kernel, drawn by the seed;
`--scale long` compiles all. Both with the Triton of the environment and those that OTHER_TRITONS
names; every version that has a table of its own is held to it. Planted kernels show that the gate
closes.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratakv.kernels.attention.paged_decode_launch import (
    FP8_PROGRAMS_PER_MULTIPROCESSOR,
    PROGRAMS_PER_MULTIPROCESSOR,
)

from .ahead_of_time import OTHER_TRITONS, TABLE, Report, Tool, tables

pytestmark = pytest.mark.slow

PLANTED = Path(__file__).with_name("planted_kernels.py")
TARGETS = ("sm_80", "sm_90")
SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448}
# Of another compiler than the table's, which allots registers in its own way: Triton 3.6.0 keeps 24
# to 120 bytes of eight heavy prefill kernels in local memory (heads of 256, or scales of tokens).
SPILLED_BYTES_OF_OTHERS = 128

pytest.importorskip("triton", reason="compiles with it")


@pytest.fixture(scope="module", params=["", *OTHER_TRITONS])
def tool(request: pytest.FixtureRequest) -> Iterator[Tool]:
    with Tool(request.param) as tool:
        yield tool


@pytest.fixture(scope="module")
def shipped(tool: Tool) -> list[str]:
    return tool.names()


@pytest.fixture(scope="module")
def planted(tool: Tool, scale: str) -> Report:
    """Compiled by other Tritons in the long form alone: the gate is the same."""
    if tool.folder and scale == "ci":
        pytest.skip("takes minutes; run with --scale long")
    names = ["planted.sound", "planted.spills", "planted.shared", "planted.lacks"]
    return tool.compile_some(names, "--from", str(PLANTED))


def test_the_gate_tells_a_sound_kernel_from_each_planted_fault(planted: Report) -> None:
    report = planted
    assert report.status == 1
    kinds = {
        "planted.spills": ("no spill", TARGETS),
        "planted.shared": ("bytes of shared memory", TARGETS),
        "planted.lacks": ("expected LDGSTS in the machine code", TARGETS[1:]),
    }
    for name, (text, targets) in kinds.items():
        found = [fault for fault in report.faults if fault.startswith(name)]
        assert [text in fault for fault in found] == [True] * len(targets), report.faults
        for target, fault in zip(targets, found, strict=True):
            assert fault.startswith(f"{name} {target}: ")
    assert not [fault for fault in report.faults if "planted.sound" in fault]
    assert report.resources["planted.spills"]["sm_90"]["spilled_bytes"] > 0
    sound = report.resources["planted.sound"]["sm_90"]
    assert 32 < sound["registers"] < 255 and sound["spilled_bytes"] == 0
    # Three stages of two tiles of 64 rows, 64 values of two bytes each, or fewer where the
    # compiler joins a stage.
    assert sound["shared_bytes"] % (2 * 64 * 64 * 2) == 0 and sound["shared_bytes"] > 0


def test_the_gate_tells_what_costs_more_than_the_table_says(
    tool: Tool, planted: Report, tmp_path: Path
) -> None:
    """Each planted kernel differs from the sound one in one way, and the table has the sound one
    under all their names."""
    sound = planted.resources["planted.sound"]["sm_90"]
    (one_pass,) = sound["passes"]
    # A tile of 64 x 64 numbers of two bytes twice, 128 threads: eight copies of 16 bytes each.
    assert one_pass["memory"] == {"LDGSTS.128": 8}
    assert one_pass["matrix"] == {"HGMMA.64x64x16": 4}
    assert 0 < one_pass["barriers"] < 4 and one_pass["mufu"] == one_pass["narrow_shared"] == 0
    kinds = {
        "barrier": f"expected {one_pass['barriers']} barriers in a pass of loop 0, got ",
        "instructions": f"expected {one_pass['instructions']} instructions in a pass of loop 0, ",
        "narrow": "expected 8 LDGSTS.128 in a pass of loop 0, got {",
        "room": f"expected room for {sound['programs']} programs on a multiprocessor as before, ",
    }
    names = [f"planted.dearer.{kind}" for kind in kinds]
    against = tmp_path / "table.json"
    rows = {name: {"sm_90": sound} for name in names}
    against.write_text(json.dumps({"triton": planted.triton, "configurations": rows}))
    report = tool.compile_some(names, "--from", str(PLANTED), "--against", str(against))
    assert report.status == 1
    for name, text in zip(names, kinds.values(), strict=True):
        assert any(fault.startswith(f"{name} sm_90: {text}") for fault in report.faults), name
    few = [fault for fault in report.faults if "room for 4 programs on a multiprocessor, " in fault]
    assert len(few) == 1 and few[0].startswith("planted.dearer.room"), report.faults


def test_a_file_of_its_own_never_reaches_the_table(tool: Tool) -> None:
    before = TABLE.read_bytes()
    done = tool.run("--from", str(PLANTED))
    assert done.returncode == 2 and "add --print" in done.stderr
    assert TABLE.read_bytes() == before


def test_the_table_has_every_configuration_and_no_other(shipped: list[str]) -> None:
    pinned = json.loads(TABLE.read_text())["triton"]
    assert shipped, "kernels/shipped.py lists none"
    for version, table in tables().items():
        # Other versions have the rows that the launch tables were chosen by.
        known = shipped if version == pinned else [name for name in shipped if name in table]
        assert list(table) == known, f"run tools/compile_kernels.py with Triton {version}"
        for name, row in table.items():
            assert set(row) in ({*TARGETS}, {"sm_90"}), name
            for target, found in row.items():
                spilled = 0 if version == pinned else SPILLED_BYTES_OF_OTHERS
                assert found["spilled_bytes"] <= spilled and 0 < found["registers"] <= 255, name
                assert found["shared_bytes"] <= SHARED_BYTES[target], name
                assert found["programs"] >= 1, name


def test_as_many_programs_run_side_by_side_as_splits_are_chosen_for() -> None:
    """Of the shapes that splits matter for, on the devices that they were chosen for."""
    assert len(tables()) >= 2
    for version, table in tables().items():
        for pool, scales, programs in (
            ("bf16", "", PROGRAMS_PER_MULTIPROCESSOR),
            ("fp8e4nv", ".head-scales", FP8_PROGRAMS_PER_MULTIPROCESSOR),
            ("fp8e4nv", ".token-scales", FP8_PROGRAMS_PER_MULTIPROCESSOR),
        ):
            for group in (4, 8):
                name = f"paged_decode.{pool}.d128.g{group}{scales}"
                assert table[name]["sm_90"]["programs"] == programs, (version, name)


@pytest.mark.timeout(1800)
def test_configurations_compile_as_the_table_says(
    tool: Tool, shipped: list[str], scale: str, rng: random.Random
) -> None:
    chosen = shipped
    if scale != "long":
        kernels = itertools.groupby(shipped, key=lambda name: name.partition(".")[0])
        chosen = [rng.choice(list(names)) for _, names in kernels]
    report = tool.compile_some(chosen)
    assert sorted(report.resources) == sorted(chosen)
    if report.triton == json.loads(TABLE.read_text())["triton"]:
        assert report.faults == [] and report.status == 0
    if table := tables().get(report.triton):
        known = {name: table[name] for name in chosen if name in table}
        found = {name: report.resources[name] for name in known}
        assert found == known, "run tools/compile_kernels.py and look at the difference"
    for fault in report.faults:
        spill = re.search(r"expected no spill, got (\d+) bytes$", fault)
        assert spill and int(spill[1]) <= SPILLED_BYTES_OF_OTHERS, fault
