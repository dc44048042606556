# SPDX-License-Identifier: Apache-2.0
"""Long chunks by a library: the same tokens, only where they are long, and only where it pays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.models.layer_attention import full, window
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.worker.forward.forward import step_order
from stratakv.engine.worker.forward.kernel_attention import (
    Chunks,
    ChunkSize,
    KernelAttention,
    KernelPlan,
    split_chunks,
)
from stratakv.engine.worker.forward.prefill_backend import PrefillChoice, library_bytes
from stratakv.engine.worker.runtime.placement import KERNELS, Placement
from stratakv.kernels.attention import gathered_prefill
from stratakv.kernels.attention.gathered_prefill import MIN_ROWS, SDPA, GatheredPrefill
from stratakv.kernels.kernel_choice import Hardware
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.settings.values import ConfigError

from .recording_runtime import RecordingRuntime

LAYOUT = BlockLayout(2, 16, 1, 16, "bfloat16")
MODEL_LEN = 1200
CUDA = torch.device("cuda:0")
FULL = (full(),)


# Which chunks


def chunks_of(*sizes: tuple[int, int]) -> Chunks:
    rows = [rows for rows, _ in sizes]
    starts = torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in sizes], dtype=torch.int32)
    tables = torch.arange(len(sizes), dtype=torch.int32)[:, None].expand(-1, 8)
    return Chunks(tables, lengths, starts, max(rows), [ChunkSize(*size) for size in sizes])


@pytest.mark.parametrize(
    ("sizes", "num_short"),
    [
        ([(7, 7)], 1),
        ([(8, 8)], 0),
        ([(2, 9), (7, 20), (9, 9), (8, 64)], 2),
        ([(9, 9), (8, 65)], 2),  # of a context that the buffers do not hold
        ([(8, 65), (9, 9)], 1),
        ([(9, 9), (3, 3)], 2),
    ],
)
def test_long_chunks_at_the_end_are_the_librarys(
    sizes: list[tuple[int, int]], num_short: int
) -> None:
    gathered = GatheredPrefill(SDPA, torch.zeros(4, 2, 16, 1, 8), 64, min_rows=8)
    num_rows = sum(rows for rows, _ in sizes)
    split = split_chunks(chunks_of(*sizes), gathered, num_rows)
    short_rows = sum(rows for rows, _ in sizes[:num_short])
    if num_short:
        assert split.by_kernel is not None and split.num_rows == short_rows
        assert split.by_kernel.query_starts.tolist()[-1] == short_rows
        assert len(split.by_kernel.seq_lens) == len(split.by_kernel.block_tables) == num_short
        assert split.by_kernel.max_query_len == max(rows for rows, _ in sizes[:num_short])
    else:
        assert split.by_kernel is None
    found = {(chunk.rows.start, chunk.rows.stop, chunk.length) for chunk in split.by_library}
    expected, end = set(), short_rows
    for rows, length in sizes[num_short:]:
        expected.add((end, end + rows, length))
        end += rows
    assert found == expected and len(split.by_library) == len(expected)
    assert split_chunks(chunks_of(*sizes), None, num_rows).num_rows == num_rows


def test_a_step_has_decodes_first_and_long_chunks_last() -> None:
    rows = np.array([4, 0, 3, 1, 2])
    counts = np.array([1, MIN_ROWS, 2, 1, MIN_ROWS - 1])
    assert rows[step_order(rows, counts)].tolist() == [1, 4, 2, 3, 0]


# Steps


def crowd(drive: Any, prompt_of: Any) -> dict[str, list[int]]:
    """Requests beside each other, in chunks of several lengths; what each answered."""
    drive.add("a", prompt_of(90, 1))
    drive.step(chunk=30)
    drive.add("b", prompt_of(17, 2))
    drive.add("c", prompt_of(70, 3))
    while any(len(life.output) < 4 for life in drive.lives.values()):
        drive.step(chunk=41)
    return {name: drive.finish(name)[:4] for name in ("a", "b", "c")}


def test_tokens_are_those_of_the_kernels(
    checkpoint: Any, driver: Any, prompt_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernels = Placement(attention_backend=KERNELS)
    options = {"block_size": 4, "num_blocks": 400, "placement": by_kernels}
    expected = crowd(driver(checkpoint(), **options), prompt_of)
    calls = note_calls(monkeypatch)
    monkeypatch.setattr(PrefillChoice, "choose", choose_sdpa)
    found = crowd(driver(checkpoint(), **options, runtime=RecordingRuntime()), prompt_of)
    assert found == expected
    assert calls and all(rows >= 20 for rows, _ in calls)


@pytest.mark.parametrize(("size", "taken"), [(None, [(30, 60), (25, 25)]), (9, [])])
def test_layers_with_a_window_stay_with_the_kernel(
    size: int | None, taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = BlockLayout(1, 16, 1, 16, "float32")
    pool = torch.randn(12, 1, 2, 16, 1, 16)
    attention = KernelAttention(pool, layout, num_heads=2, dtype=torch.float32, scale=0.25)
    sizes = [ChunkSize(3, 40), ChunkSize(25, 25), ChunkSize(30, 60)]
    tables = torch.tensor([[7, 2, 9, 0], [5, 1, 0, 0], [3, 11, 4, 8]], dtype=torch.int32)
    given = chunks_of(*sizes)
    chunks = Chunks(tables, given.seq_lens, given.query_starts, 30, sizes)
    q, k, v = torch.randn(58, 2, 16), torch.randn(58, 1, 16), torch.randn(58, 1, 16)
    nowhere = torch.full((58,), -1)

    def attend() -> torch.Tensor:
        plan = KernelPlan(nowhere, None, chunks, size)
        first = attention(q, k, v, 0, plan)
        assert torch.equal(attention(q, k, v, 0, plan), first), "the next layer of the plan"
        return first

    expected = attend()
    calls = note_calls(monkeypatch)
    attention.gathered = GatheredPrefill(SDPA, pool[:, 0], 64, min_rows=20)
    assert torch.allclose(attend(), expected, atol=1e-5)
    assert calls == 2 * taken


def choose_sdpa(choice: PrefillChoice, backend: str) -> GatheredPrefill:
    return GatheredPrefill(SDPA, choice.attention.layers[0], 200, min_rows=20)


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of each chunk that a library computes from now on."""
    calls: list[tuple[int, int]] = []
    run = GatheredPrefill.run

    def noted(self: GatheredPrefill, q: Any, kv: Any, table: Any, length: int, *rest: Any) -> Any:
        calls.append((len(q), length))
        return run(self, q, kv, table, length, *rest)

    monkeypatch.setattr(GatheredPrefill, "run", noted)
    return calls


# The choice


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = Hardware("H100", (9, 0), has_triton=True)
    monkeypatch.setattr(gathered_prefill, "probe_hardware", lambda: hardware)


Choose = Callable[..., GatheredPrefill | None]


@pytest.fixture
def choose(caplog: pytest.LogCaptureFixture) -> Iterator[Choose]:
    """The choice for a small attention whose kernel and libraries take these seconds in turn."""
    pool = torch.zeros(80, 2, 2, 16, 1, 16, dtype=torch.bfloat16)
    attention = KernelAttention(pool, LAYOUT, num_heads=2, dtype=torch.bfloat16, scale=0.25)
    caplog.set_level(logging.INFO)

    def make(
        backend: str, *seconds: float, kinds: Any = FULL, max_tokens: int = 2048,
        max_model_len: int = MODEL_LEN, can_record: bool = True,
    ) -> GatheredPrefill | None:  # fmt: skip
        runtime = RecordingRuntime()
        runtime.seconds, runtime.can_record = iter(seconds), can_record
        choice = PrefillChoice(
            attention, runtime, kinds, max_model_len=max_model_len, max_tokens=max_tokens
        )
        found = choice.choose(backend)
        assert next(runtime.seconds, None) is None, "every time that was given was taken"
        return found

    yield make
    assert not pool.any(), "the blocks of the sample are zeros again"


@pytest.mark.usefixtures("_hopper")
def test_auto_takes_a_library_from_a_quarter_more_speed_on(
    choose: Choose, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = choose("auto", 5.1, 4.0, 5.0, 4.2, 5.3, 4.1)
    assert chosen is not None and chosen.name == SDPA
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("long chunks are computed by sdpa; by the prefill kernel those shorter")
    assert "sdpa took 4000.00 ms for 1200 tokens, the last of 1200" in told
    assert "the prefill kernel 5000.00 ms" in told and "fa3: fa3-fwd is not installed" in told
    caplog.clear()
    assert choose("auto", 4.99, 4.0, 5.0, 4.2, 5.3, 4.1) is None
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("long chunks are computed by the prefill kernel (")
    assert "sdpa took 4000.00 ms" in told


@pytest.mark.usefixtures("_hopper")
def test_auto_measures_nothing_where_no_library_may_be_used(
    choose: Choose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = note_calls(monkeypatch)
    assert choose("auto", max_tokens=MIN_ROWS - 1) is None
    assert choose("auto", kinds=(window(21), window(30))) is None
    assert choose("auto", can_record=False) is None
    assert choose("kernels") is choose("triton") is None
    assert not calls


@pytest.mark.usefixtures("_hopper")
def test_auto_drops_a_library_whose_results_differ_or_that_fails(
    choose: Choose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = GatheredPrefill.run
    monkeypatch.setattr(GatheredPrefill, "run", lambda *given: run(*given).mul_(1.1))
    assert choose("auto") is None
    assert "its results are off by 0.1 of the kernel's" in caplog.text

    def fail(*given: Any) -> Any:
        raise RuntimeError("no kernel image is\n available")

    monkeypatch.setattr(GatheredPrefill, "run", fail)
    assert choose("auto") is None
    assert "sdpa: it failed: no kernel image is available" in caplog.text
    with pytest.raises(ConfigError, match=r"sdpa can compute no chunk .*no kernel image"):
        choose("sdpa")


@pytest.mark.usefixtures("_hopper")
def test_a_library_that_is_named_is_used_unmeasured(
    choose: Choose, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = choose("sdpa", kinds=(window(21), full()))
    assert chosen is not None and chosen.name == SDPA and chosen.min_rows == MIN_ROWS
    [told] = [record.getMessage() for record in caplog.records]
    assert told == (
        "long chunks are computed by sdpa; by the prefill kernel those shorter than 1024 tokens, "
        "those of layers with a window"
    )


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kinds": (window(21),)}, "it knows no windows, and every layer has one"),
        ({"max_tokens": 1000}, "a step has up to 1000 .--max-num-batched-tokens"),
        ({"max_model_len": 900}, "a step has up to 900"),
        ({"backend": "fa3"}, "fa3-fwd is not installed"),
    ],
)
def test_a_library_that_can_compute_no_chunk_is_refused(
    choose: Choose, options: dict[str, Any], expected: str
) -> None:
    backend = options.pop("backend", "sdpa")
    with pytest.raises(ConfigError, match=rf"--attention-backend {backend} can .*{expected}") as no:
        choose(backend, **options)
    assert "give --attention-backend kernels or auto" in str(no.value)


# Memory


def test_the_pool_leaves_room_for_a_library() -> None:
    spec = load_model_spec(EMBEDDED_MODEL)
    layout = plan_groups(spec.layout(16, "bfloat16"), 1, spec.layer_attention).layout
    tokens = -(-spec.max_context // 16) * 16
    buffers = 2 * tokens * spec.num_kv_heads * spec.head_dim * 2
    results = 4096 * spec.num_heads * (spec.head_dim * 2 + 4)

    def asked(backend: str, device: torch.device = CUDA, tokens: int = 4096) -> int:
        placement = Placement(device=device, attention_backend=backend)
        return library_bytes(placement, spec, layout, tokens)

    assert asked("sdpa") == asked("fa3") == asked("auto") == buffers + results
    assert asked("kernels") == asked("triton") == asked("auto", torch.device("cpu")) == 0
    assert asked("auto", tokens=MIN_ROWS - 1) == 0
    wide = BlockLayout(2, 16, 1024, 256, "bfloat16")
    placement = Placement(device=CUDA)
    assert library_bytes(placement, spec, wide, 4096) < gathered_prefill.MAX_BYTES + 2**30
    for kv_dtype in ("fp8_e4m3", "float32"):
        other = BlockLayout(2, 16, 8, 128, kv_dtype)
        assert library_bytes(placement, spec, other, 4096) == 0
