# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of the CPU against float64 loops, in every variant that runs here, and the
library when it is missing, broken, or asked for in a form that this processor does not run."""

from __future__ import annotations

import ctypes
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratakv.kernels.attention import attention_checks
from stratakv.kernels.attention.paged_decode import paged_decode
from stratakv.kernels.cpu import library, paged_attention
from stratakv.kernels.cpu.library import VARIABLE, VARIANTS, CpuLibrary, Missing, open_library
from stratakv.kernels.cpu.paged_attention import CpuAttentionStep
from stratakv.kernels.cpu.thresholds import Worth
from stratakv.kernels.cpu.workspace import Workspace
from stratakv.kernels.kernel_choice import AUTO, NATIVE, KernelRefused

from .cpu_variants import DTYPES, PATH, variant
from .decode_batches import assert_right, make_case
from .prefill_batches import Case, make_batch

__all__ = ["variant"]  # a fixture

CPU = torch.device("cpu")
NATIVE_ONLY = pytest.mark.skipif(
    isinstance(open_library(PATH), Missing), reason=f"needs the library: {open_library(PATH)}"
)
# Query heads of a kv head, kv heads, head size, block size.
SHAPES = ((1, 1, 16, 1), (2, 2, 64, 16), (7, 1, 128, 32), (4, 2, 80, 5), (17, 1, 48, 4))
OPTIONS = ({}, {"window": 7}, {"window": 300}, {"softcap": 3.0}, {"softcap": 3.0, "window": 20})
# Each dtype meets each shape, and each shape most options.
CASES = [
    (dtype, shape, OPTIONS[number % len(OPTIONS)])
    for number, (dtype, shape) in enumerate(itertools.product(DTYPES, SHAPES))
]


@pytest.mark.parametrize(("dtype", "shape", "options"), CASES)
def test_decode_is_right(variant: str, dtype: torch.dtype, shape: tuple, options: dict) -> None:
    group, kv_heads, head_dim, block_size = shape
    lengths = [2 * block_size + 3, block_size + 1, 0, 1, block_size, 600]
    case = make_case(
        CPU, lengths, group=group, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=dtype, **options,
    )  # fmt: skip
    assert_right(case, case.run(NATIVE))


@pytest.mark.parametrize(("dtype", "shape", "options"), CASES)
def test_chunks_are_right(variant: str, dtype: torch.dtype, shape: tuple, options: dict) -> None:
    """Many rows and few, fresh and behind a context, shorter than their rows, and none at all."""
    group, kv_heads, head_dim, block_size = shape
    chunks = ((70, 0), (1, 65), (3, 260), (3, -1), (40, -20), (0, 5))
    case = Case(
        chunks, heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim,
        block_size=block_size, dtype=dtype, **options,
    )  # fmt: skip
    make_batch(case, CPU).check(NATIVE)


def bits_of(case: object, threads: int) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return case.run(NATIVE)  # type: ignore[attr-defined, no-any-return]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_requests_bits_depend_neither_on_threads_nor_on_other_requests(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough work that several threads are used where there are several, and as soon as there is
    anything to do."""
    case = make_case(CPU, [3000, 700, 2100, 5], group=2, kv_heads=2, dtype=dtype)
    alone, together = bits_of(case, 1), bits_of(case, 3)
    assert torch.equal(alone, together)
    monkeypatch.setattr(paged_attention, "worth_a_thread", lambda: Worth(1, 1, 1))
    assert torch.equal(alone, bits_of(case, 3))
    single = paged_decode(
        case.q[1:2], case.kv, case.block_tables[1:2], case.seq_lens[1:2], kernel=NATIVE,
        **case.options,
    )  # fmt: skip
    assert torch.equal(single[0], alone[1])
    chunks = ((300, 400), (1, 2000), (20, 0))
    long = make_batch(Case(chunks, heads=4, kv_heads=2, dtype=dtype), CPU)
    # Rows of no request stay NaN, which equals nothing.
    assert torch.equal(bits_of(long, 1).nan_to_num(9.0), bits_of(long, 3).nan_to_num(9.0))


@pytest.mark.parametrize("place", [3, 300, 599])
def test_the_largest_score_by_far_may_be_in_any_part(variant: str, place: int) -> None:
    """Weights relative to that of another part would be larger than any number."""
    case = make_case(CPU, [600], group=1, kv_heads=1, head_dim=16)
    block, q = int(case.block_tables[0, place // 16]), case.q[0, 0]
    case.kv[block, 0, place % 16, 0] = q * (300 / (q.dot(q) * case.options["scale"]))
    assert_right(case, case.run(NATIVE))


def step_of(**changes: Any) -> CpuAttentionStep:
    arguments = {
        "pool": torch.zeros(4, 2, 16, 2, 16),
        "num_tokens": 2,
        "num_heads": 4,
        "block_tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([20], dtype=torch.int32),
        "query_starts": torch.tensor([0, 2], dtype=torch.int32),
        "slots": torch.tensor([18, 19]),
    }
    return CpuAttentionStep(**{"scale": 1.0, "workspace": Workspace(), **arguments, **changes})


# Requests that begin alike: rows, length, the request whose blocks it has, and how many tokens of
# them. Parts of a context have 256 tokens.
ALIKE = (
    (1, 900, 0, 0), (1, 700, 0, 512), (1, 901, 0, 900), (1, 500, 0, 300), (1, 600, 4, 0),
    (1, 256, 0, 256), (1, 800, 1, 700), (3, 514, 0, 512), (3, 513, 0, 513), (40, 600, 0, 512),
    (1, 0, 0, 0), (2, 770, 2, 768), (1, 257, 4, 256), (0, 600, 13, 0), (1, 600, 13, 512),
    (3, 402, 0, 400),  # with a window of 400 its last rows do not see all of the first part
    (2, 400, 16, 0), (1, 390, 16, 300),  # nor would a third row of the first of these
    *[(1, 530 + n, 0, 512) for n in range(40)],
    (1, 600, 0, 512), (1, 656, 0, 512), (1, 600, 0, 255), (12, 600, -5, 0), (1, 560, -5, 512),
    (1, 256, -3, 0), (1, 900, -3, 256), (1, 900, -2, 512),
)  # fmt: skip


class Dirty(Workspace):
    """What nobody has written there is no number of anything."""

    def at_least(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [(torch.float32, 16), (torch.bfloat16, 48), (torch.float64, 256), (torch.float16, 300)],
)
def test_requests_that_begin_alike_have_the_bits_of_requests_apart(
    variant: str, dtype: torch.dtype, block_size: int
) -> None:
    width = -(-max(length for _, length, _, _ in ALIKE) // block_size)
    apart = torch.arange(len(ALIKE) * width, dtype=torch.int32).view(-1, width)
    pool = torch.randn(apart.numel(), 2, block_size, 2, 16).to(dtype)
    together = apart.clone()
    for request, (_, _, origin, alike) in enumerate(ALIKE):
        whole, rest = divmod(alike, block_size)
        pool[apart[request, :whole].long()] = pool[apart[origin, :whole].long()]
        if rest:
            blocks = apart[[request, origin], whole].long()
            pool[blocks[0], :, :rest] = pool[blocks[1], :, :rest]
        together[request, :whole] = together[origin, :whole]
    starts = torch.tensor([0, *(rows for rows, _, _, _ in ALIKE)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length, _, _ in ALIKE]).int()
    q = torch.randn(int(starts[-1]), 6, 16).to(dtype)
    found: list[Tensor] = []
    before = torch.get_num_threads()
    try:
        for options in ({}, {"window": 400}, {"softcap": 3.0}):
            for tables, threads in ((apart, 1), (together, 1), (together, 3)):
                torch.set_num_threads(threads)
                step = step_of(
                    pool=pool, block_tables=tables, query_starts=starts, seq_lens=lengths,
                    num_tokens=len(q), num_heads=6, slots=None, workspace=Dirty(), **options,
                )  # fmt: skip
                found.append(torch.full_like(q, torch.nan))
                step.run(q, pool, found[-1])
            assert torch.equal(found[-3], found[-2])
            assert torch.equal(found[-3], found[-1])
    finally:
        torch.set_num_threads(before)


def test_what_requests_share_is_one_task(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads a task is at most a sixth of all parts, here of four requests; all begin
    with the same part, and behind it the first request has blocks of its own."""
    tasks: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(work: int, data: int, threads: int, _: int) -> None:
        tasks.append(ctypes.c_int64.from_address(data + 48).value)  # num_tasks of a Team's layout
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)(data)

    address = ctypes.cast(parallel, ctypes.c_void_p).value
    monkeypatch.setattr(library, "_torch_parallel", lambda: address)
    found = open_library(PATH, variant)
    monkeypatch.setattr(paged_attention, "cpu_library", lambda: found)
    monkeypatch.setattr(paged_attention, "worth_a_thread", lambda: Worth(1, 1, 1))
    tables, pool = torch.tensor([[1, 2]]).repeat(12, 1).int(), torch.zeros(4, 2, 256, 1, 16)
    tables[0, 1] = 3
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        step_of(
            pool=pool, block_tables=tables, seq_lens=torch.full((12,), 512).int(), slots=None,
            query_starts=None, num_tokens=12, num_heads=2,
        ).run(q := torch.zeros(12, 2, 16), pool, torch.empty_like(q))  # fmt: skip
    finally:
        torch.set_num_threads(before)
    assert tasks == [3 + 1 + 3]


def test_a_step_writes_and_then_attends(variant: str) -> None:
    pool = torch.zeros(4, 2, 16, 2, 16)
    k, v = torch.randn(2, 2, 2, 16)
    out = torch.empty(2, 4, 16)
    step_of(slots=torch.tensor([18, -1])).run(torch.randn(2, 4, 16), pool, out, (k, v))
    assert torch.equal(pool[1, 0, 2], k[0]) and torch.equal(pool[1, 1, 2], v[0])
    assert int(pool.count_nonzero()) == 2 * k[0].numel()
    assert bool(out.isfinite().all())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"slots": torch.tensor([18, 64])}, "slots from -1 to the last one"),
        ({"slots": torch.tensor([18, -2])}, "slots from -1 to the last one"),
        ({"block_tables": torch.tensor([[1, 4]], dtype=torch.int32)}, "block ids of the pool"),
        ({"block_tables": torch.tensor([[-1, 2]], dtype=torch.int32)}, "block ids of the pool"),
        ({"seq_lens": torch.tensor([33], dtype=torch.int32)}, "lengths that the block tables hold"),
        ({"query_starts": torch.tensor([0, 3], dtype=torch.int32)}, "query_starts that ascend"),
        ({"query_starts": torch.tensor([2, 0], dtype=torch.int32)}, "query_starts that ascend"),
        # What the library would read as something else, or past its end.
        (
            {
                "block_tables": torch.ones(2, 9, dtype=torch.int32)[:, :2],
                "seq_lens": torch.tensor([140, 20], dtype=torch.int32),
                "query_starts": torch.tensor([0, 1, 2], dtype=torch.int32),
            },
            r"block_tables of .* \[2, 2\], contiguous",
        ),
        ({"block_tables": torch.ones(1, 2, dtype=torch.int64)}, "block_tables of torch.int32"),
        ({"seq_lens": torch.tensor([20])}, "seq_lens of torch.int32"),
        ({"query_starts": torch.tensor([0], dtype=torch.int32)}, r"query_starts of .* \[2\]"),
        ({"slots": torch.tensor([18])}, r"slots of torch.int64 \[2\]"),
        ({"slots": torch.tensor([18, 19], dtype=torch.int32)}, "slots of torch.int64"),
        ({"num_heads": 3}, "a multiple of the 2 kv heads"),
        ({"num_heads": 1}, "a multiple of the 2 kv heads"),
        ({"window": 0}, "a window of 1 token or more"),
        ({"pool": torch.zeros(4, 2, 16, 2, 32)[..., ::2]}, "its last axis contiguous"),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    variant: str, changes: dict[str, torch.Tensor], expected: str
) -> None:
    with pytest.raises(KernelRefused, match=expected):
        step_of(**changes)


def test_what_a_step_was_not_laid_down_for_is_refused(variant: str) -> None:
    pool, q, kv = torch.zeros(4, 2, 16, 2, 16), torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    right = {"q": q, "pool": pool, "out": torch.empty_like(q), "written": (kv, kv)}
    wrong = {
        "q": (q[:1], q.half(), q.transpose(1, 2).contiguous().transpose(1, 2)),
        "pool": (pool[:3], pool.double(), torch.zeros(4, 3, 16, 2, 16)[:, :2]),
        "out": (torch.empty(2, 4, 32), torch.empty(2, 4, 16).double()),
        "written": ((kv[:1], kv), (kv, q)),
    }
    for name, others in wrong.items():
        for other in others:
            with pytest.raises(KernelRefused, match="expected"):
                step_of().run(**{**right, name: other})
    step_of().run(**right)


@NATIVE_ONLY
def test_auto_takes_the_library_on_the_cpu_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    case, odd = make_case(CPU, [20]), make_case(CPU, [20], head_dim=20)
    called = []
    run = CpuAttentionStep.run
    monkeypatch.setattr(
        CpuAttentionStep, "run", lambda self, *given: called.append(1) or run(self, *given)
    )
    assert_right(case, case.run(AUTO))
    assert called
    assert_right(odd, odd.run(AUTO))
    assert len(called) == 1
    with pytest.raises(KernelRefused, match="up to 512, and these are 20"):
        odd.run(NATIVE)


def test_without_the_library_the_plain_twin_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(CPU, [20, 0, 7])
    monkeypatch.setattr(paged_attention, "cpu_library", lambda: Missing("it was eaten"))
    assert attention_checks.reason_against_native(case.q, case.kv, 1.0) == "it was eaten"
    assert_right(case, case.run(AUTO))
    with pytest.raises(KernelRefused, match="cannot run: it was eaten; use the plain one"):
        case.run(NATIVE)


def test_a_missing_a_broken_and_another_library_are_told_apart(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF" + bytes(100))
    other = Path(torch.__file__).parent / "lib" / "libc10.so"
    for path, reason in (
        (tmp_path / "none.so", "they were not built; install again where there is a C"),
        (broken, "broken.so cannot be used"),
        (other, "libc10.so cannot be used"),
    ):
        found = open_library(path)
        assert isinstance(found, Missing) and reason in found.reason


@NATIVE_ONLY
def test_half_a_library_and_one_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tmp_path / "half.so"
    half.write_bytes(PATH.read_bytes()[: PATH.stat().st_size // 2])
    found = open_library(half)
    assert isinstance(found, Missing) and "half.so cannot be used" in found.reason
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    found = open_library(PATH)
    assert isinstance(found, Missing) and "is of another version" in found.reason


@NATIVE_ONLY
def test_a_processor_without_what_the_variants_need(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library._function
    monkeypatch.setattr(
        library,
        "_function",
        lambda file, name: (lambda _: 0) if name == "runs" else found(file, name),
    )
    assert open_library(PATH) == Missing("this processor has no AVX2 with FMA and F16C")
    assert open_library(PATH, "avx2") == open_library(PATH)


@NATIVE_ONLY
@pytest.mark.parametrize("runs", [1, 2, 3])
def test_the_last_variant_that_the_processor_runs_is_taken(
    monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    found = library._function
    monkeypatch.setattr(
        library,
        "_function",
        lambda file, name: (lambda it: it < runs) if name == "runs" else found(file, name),
    )
    chosen = open_library(PATH)
    assert isinstance(chosen, CpuLibrary) and chosen.variant == VARIANTS[runs - 1]
    assert chosen.lanes == (8 if runs == 1 else 16)
    for name in VARIANTS[runs:]:
        named = ", ".join(VARIANTS[:runs])
        reason = f"{VARIABLE} says {name}, and this processor runs {named}"
        assert open_library(PATH, name) == Missing(reason)


@NATIVE_ONLY
def test_the_variable_names_a_variant() -> None:
    assert isinstance(open_library(PATH), CpuLibrary)
    assert open_library(PATH, "none") == Missing(f"{VARIABLE} says none")
    found = open_library(PATH, "sse")
    expected = "takes auto, avx2, avx512, avx512_bf16, none, not 'sse'"
    assert isinstance(found, Missing) and expected in found.reason
    narrow = open_library(PATH, "avx2")
    assert isinstance(narrow, CpuLibrary) and (narrow.variant, narrow.lanes) == ("avx2", 8)


def test_the_choice_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    library.cpu_library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert isinstance(library.cpu_library(), Missing)
        assert [message for message in caplog.messages if VARIABLE in message] == caplog.messages
        assert len(caplog.messages) == 1
    finally:
        library.cpu_library.cache_clear()
