# SPDX-License-Identifier: Apache-2.0
"""What is read out of machine code, and what is predicted from it, for every kernel of the tables.

No compiler takes part: `test_ahead_of_time.py` holds the tables to what it says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from .ahead_of_time import TABLE, TOOLS, tables

PAGE = TOOLS.parent / "docs" / "gpu.md"
TABLES = sorted(TABLE.parent.glob("resources*.json"))
# Loops of three kinds: one that only counts, one around another, one that does the work; behind the
# end of the program the branch to itself with which every kernel ends.
CODE = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0020*/              @!P0 BRA 0x10 ;
        /*0030*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/              @!P2 LDGSTS.E.BYPASS.128 [R4], desc[UR4][R2.64], P1 ;
        /*0060*/                   LDGSTS.E [R4], desc[UR4][R2.64] ;
        /*0070*/               @P3 BRA 0xa0 ;
        /*0080*/                   LDS.U8 R5, [R4] ;
        /*0090*/                   LDSM.16.MT88.4 R8, [R4] ;
        /*00a0*/                   HMMA.16816.F32.BF16 R12, R8, R10, R12 ;
        /*00b0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0 ;
        /*00c0*/                   MUFU.EX2 R5, R5 ;
        /*00d0*/             @!UP1 BRA.U 0x40 ;
        /*00e0*/               @P0 BRA 0x30 ;
        /*00f0*/                   EXIT ;
        /*0100*/                   BRA 0x100;
        /*0110*/                   NOP;
"""
LENGTH = 18


def _moved(code: str) -> str:
    """The same kernel behind the first."""

    def place(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2], 16) + 16 * LENGTH:04x}"

    return re.sub(r"(/\*|BRA(?:\.U)? 0x)([0-9a-f]+)", place, code)


def _import(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        __import__(name)
    return sys.modules.pop(name)


@pytest.fixture(scope="module")
def machine_code() -> ModuleType:
    return _import("machine_code")


@pytest.fixture(scope="module")
def model() -> ModuleType:
    return _import("kernel_model")


def test_a_pass_is_one_of_the_inner_loop_that_does_the_work(machine_code: ModuleType) -> None:
    first, second = machine_code.read(CODE + _moved(CODE), [LENGTH, LENGTH])
    assert first == second
    assert machine_code.passes(first) == [
        {
            "instructions": 10,
            "barriers": 1,
            "narrow_shared": 1,
            "mufu": 1,
            "matrix": {"HMMA.16816": 1, "HGMMA.64x128x16": 1},
            "memory": {"LDGSTS.128": 1, "LDGSTS.32": 1},
            "shared_words": 4 + 1 + 1 + 4,
        }
    ]


def test_a_kernel_without_a_loop_is_one_pass_up_to_its_end(machine_code: ModuleType) -> None:
    straight = "\n".join(line for line in CODE.splitlines() if "BRA" not in line)
    (code,) = machine_code.read(straight, [LENGTH - 5])
    (one,) = machine_code.passes(code)
    assert one["instructions"] == 12 and one["memory"]["LDG.32"] == 1


def test_instructions_that_were_not_understood_are_no_small_loop(machine_code: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected 19 instructions, the disassembler has 18"):
        machine_code.read(CODE, [LENGTH + 1])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"instructions": 102}, None),
        ({"instructions": 103}, "expected 100 instructions in a pass of loop 0, got 103"),
        ({"barriers": 3}, "expected 2 barriers in a pass of loop 0, got 3"),
        ({"barriers": 1, "mufu": 9, "narrow_shared": 0, "instructions": 90}, None),
        ({"narrow_shared": 5}, "expected 4 narrow_shared in a pass of loop 0, got 5"),
        ({"mufu": 11}, "expected 10 mufu in a pass of loop 0, got 11"),
        ({"memory": {"LDGSTS.64": 16, "LDGSTS.32": 1}}, "expected 8 LDGSTS.128 in a pass"),
        ({"memory": {"LDG.128": 8}}, "expected 8 LDGSTS.128 in a pass"),
        ({"memory": {"LDGSTS.128": 9}}, None),
        ({"matrix": {"HMMA.16816": 64}}, "expected products {'HGMMA.64x128x16': 8} in a pass"),
        ({"matrix": {"HGMMA.64x64x16": 16}}, "expected products {'HGMMA.64x128x16': 8} in a pass"),
        ({"matrix": {}}, "expected products {'HGMMA.64x128x16': 8} in a pass"),
    ],
)
def test_what_costs_more_is_told(
    machine_code: ModuleType, changes: dict[str, Any], fault: str | None
) -> None:
    before: dict[str, Any] = {"instructions": 100, "barriers": 2, "narrow_shared": 4, "mufu": 10}
    before |= {"matrix": {"HGMMA.64x128x16": 8}, "memory": {"LDGSTS.128": 8, "LDGSTS.32": 1}}
    faults = list(machine_code.worse([before], [before | changes]))
    assert [one.startswith(fault or "") for one in faults] == [True] * (fault is not None), faults
    assert list(machine_code.worse([before], [before, before])) == ["expected 1 inner loops, got 2"]


def _rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of all tables, those whose tiles are known."""
    for version, table in tables().items():
        for name, row in table.items():
            if row["sm_90"]["tile_bytes"]:
                yield version, name, row["sm_90"]


def test_a_pass_of_every_attention_kernel_is_one_tile() -> None:
    """By the bytes that it copies: no loop is unrolled, no tile is copied twice."""
    assert {version for version, _, _ in _rows()} == set(tables())
    for version, name, found in _rows():
        head_dim = int(name.split(".")[2][1:])
        padded = 1 << (head_dim - 1).bit_length()
        for one_pass in found["passes"]:
            kinds = ([*key.split("."), count] for key, count in one_pass["memory"].items())
            # By four bytes come block tables and scales.
            wide = sum(int(bits) // 8 * count for kind, bits, count in kinds if int(bits) > 32)
            copied = 32 * found["warps"] * wide
            assert copied * head_dim == found["tile_bytes"] * padded, (version, name)
            if "paged_prefill" in name:
                assert all(key.startswith("HGMMA") for key in one_pass["matrix"]), (version, name)


def test_targets_are_within_reach(model: ModuleType) -> None:
    """Of what docs/gpu.md asks for, where everything overlaps; by what both compilers make."""
    for path in TABLES:
        rows = model.read_rows(path)
        shares = {}
        for kind in ("bf16.d128.g4", "fp8e4nv.d128.g4.head-scales"):
            name = f"paged_decode.{kind}"
            best = model.predict(name, rows[name], "H200").best
            for case, requests, tokens in model.CASES:
                shares[kind, case] = best * model.used(name, rows[name], requests, tokens)[1]
        bf16, fp8 = sorted({kind for kind, _ in shares})
        least = {"4k x 32": 0.88, "8k x 64": 0.88, "32k x 8": 0.88, "128k x 1": 0.80}
        for case, share in (least | {"1k x 64": 0.75}).items():
            assert shares[bf16, case] >= share, (path, case)
        assert 2 * shares[fp8, "8k x 64"] / shares[bf16, "8k x 64"] >= 1.6, path
        name = "paged_prefill.bf16.d128.g4.b16.s0"
        assert model.predict(name, rows[name], "H200").best * 989 >= 400, path


def test_terms_are_those_of_a_hand_computed_tile(model: ModuleType) -> None:
    """128 rows by 128 keys of heads of 128 in eight warps: 2 x 2 x 128^3 operations, at 4,096 a
    cycle; sixteen products of four warps each are all of them."""
    one_pass = {"instructions": 600, "mufu": 64, "shared_words": 80}
    one_pass |= {"matrix": {"HGMMA.64x128x16": 16}}
    found = {"warps": 8, "tile_bytes": 65536, "tile_flops": 4 * 128**3, "programs": 1}
    found["passes"] = [one_pass | {"instructions": 900}, one_pass]
    got = model.predict("paged_prefill.bf16.d128.g4.b16.s0", found, "H200")
    terms = {"tensor": 2048, "issue": 1200, "mufu": 1024, "shared": 640}
    assert {term: got.cycles[term] for term in terms} == terms
    assert got.limit == "tensor" and got.best == 1
    assert got.worst == 2048 / (2048 + 1200 + 1024 + 640 + got.cycles["bytes"])
    # Memory carries 4.8e12 bytes a second, nine tenths of it for a copy, 132 multiprocessors of
    # 1.83 GHz: 17.88 bytes a cycle each.
    got = model.predict("paged_decode.bf16.d128.g4", found, "H200")
    assert got.cycles["bytes"] == pytest.approx(65536 / 17.88, rel=1e-3)
    assert got.limit == "bytes" and got.best == 1


def test_waves_are_those_of_the_chosen_splits(model: ModuleType) -> None:
    """64 requests of 8,192 tokens: 512 pairs of 128 tiles on 528 places, uncut in one wave."""
    found = {"tile_bytes": 2 * 64 * 128 * 2, "programs": 4}
    got = model.used("paged_decode.bf16.d128.g4", found, 64, 8192)
    assert got == (1, 512 * 128 / (528 * 129))
    # With room for fewer programs than the splits are chosen for, a second wave begins.
    got = model.used("paged_decode.bf16.d128.g4", found | {"programs": 3}, 64, 8192)
    assert got == (1, 512 * 128 / (396 * 2 * 129))


def test_the_page_has_what_the_tool_prints(model: ModuleType) -> None:
    assert model.report(model.read_rows(TABLE)) in PAGE.read_text()
