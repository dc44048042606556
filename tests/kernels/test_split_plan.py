# SPDX-License-Identifier: Apache-2.0
"""Split plans: every tile once, no processor left idle for long, and the kernel follows them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stratakv.kernels.attention.paged_decode import (
    choose_decode_kernel,
    paged_decode,
    split_planner,
)
from stratakv.kernels.attention.paged_decode_launch import PROGRAM_TILES, choose_splits
from stratakv.kernels.attention.split_plan import NO_REQUEST, PlanArray, SplitPlan, SplitPlanner
from stratakv.kernels.kernel_choice import PLAIN, TRITON, KernelRefused

from .decode_batches import Case, assert_right, make_case

# bf16 on an H100, of a model of 8 kv heads: tiles of 64 tokens, splits of 256 tokens or more.
H100 = SplitPlanner(tile=64, slots=132 * 4 // 8, min_tiles=4)


def laid_down(
    planner: SplitPlanner, lengths: list[int], window: int | None = None, room: int | None = None
) -> SplitPlan:
    """In an array that held another plan."""
    room = room or len(lengths)
    words = PlanArray(planner, room)
    array = np.full(planner.num_words(room), 7, np.int32)
    words.lay_down(array, planner.tiles(np.array(lengths), window))
    return words.view_plan(torch.from_numpy(array), len(lengths))


def programs(planner: SplitPlanner, plan: SplitPlan, tiles: list[int]) -> list[int]:
    """The tiles of each program, as the kernel shares them out."""
    share, taken = int(plan.share), []
    for request, split in zip(plan.requests.tolist(), plan.splits.tolist(), strict=True):
        if request != NO_REQUEST:
            taken.append(min(share, tiles[request] - split * share))
    return taken


@pytest.mark.parametrize("window", [None, 100, 5000])
def test_every_tile_has_one_program(window: int | None) -> None:
    draw = random.Random(window)
    for requests in (1, 2, 7, 66, 200):
        lengths = [draw.choice((0, 1, 63, 64, 65, 3000, 131072)) for _ in range(requests)]
        plan = laid_down(H100, lengths, window, requests + 3)
        tiles = H100.tiles(np.array(lengths), window).tolist()
        seen = [
            (request, split)
            for request, split in zip(plan.requests.tolist(), plan.splits.tolist(), strict=True)
            if request != NO_REQUEST
        ]
        share = int(plan.share)
        assert seen == [
            (request, split)
            for request, count in enumerate(tiles)
            for split in range(-(-count // share))
        ]
        firsts = plan.first_items.tolist()
        for row, (first, count) in enumerate(zip(firsts, tiles, strict=True)):
            assert not count or seen[first] == (row, 0)
        assert sum(programs(H100, plan, tiles)) == sum(tiles)
        for tensor in plan:
            assert tensor.data_ptr() % 16 == plan.share.data_ptr() % 16


def makespan(planner: SplitPlanner, taken: list[int]) -> int:
    """When the last program ends, where each begins as soon as one of the slots is free."""
    slots = [0] * planner.slots
    for tiles in taken:
        first = min(range(len(slots)), key=slots.__getitem__)
        slots[first] += tiles + PROGRAM_TILES
    return max(slots)


@pytest.mark.parametrize(
    ("requests", "context"),
    [(64, 8192), (32, 4096), (64, 1024), (8, 32768), (128, 2048), (256, 1024), (16, 8192)],
)
def test_a_wide_table_costs_nothing(requests: int, context: int) -> None:
    """By width, 64 requests of 8k in tables of 128k were cut into 36 splits each."""
    lengths = [context] * requests
    plan = laid_down(H100, lengths)
    tiles = context // 64
    splits = choose_splits(8 * requests, context, 132, 64)
    share = -(-tiles // splits)
    by_own_width = [share] * (requests * -(-tiles // share))
    planned = makespan(H100, programs(H100, plan, [tiles] * requests))
    assert planned <= 1.06 * makespan(H100, by_own_width)


def test_one_long_context_beside_short_ones_is_cut_small() -> None:
    for long in (32768, 131072):
        lengths = [long] + [1024] * 63
        tiles = H100.tiles(np.array(lengths), None).tolist()
        taken = programs(H100, laid_down(H100, lengths), tiles)
        ideal = (sum(tiles) + len(taken) * PROGRAM_TILES) / H100.slots
        assert makespan(H100, taken) <= 1.6 * ideal


def test_the_room_of_a_plan_holds_any_lengths() -> None:
    draw = random.Random(3)
    for _ in range(200):
        requests = draw.randint(1, 300)
        lengths = [int(2 ** draw.uniform(0, 17)) for _ in range(requests)]
        plan = laid_down(H100, lengths)
        assert len(plan.requests) == H100.num_items(requests) <= requests + 2 * H100.slots + 3
        assert int(plan.share) >= H100.min_tiles


def with_plan(case: Case, room: int = 0, window: int | None = None) -> Callable[..., torch.Tensor]:
    """`paged_decode` under a plan of its lengths, whatever its table's width."""
    chosen = choose_decode_kernel(case.q, case.kv, 1.0, kernel=TRITON)
    planner = split_planner(case.q, case.kv, case.options.get("kv_scales"), chosen)
    assert planner is not None
    planner = SplitPlanner(planner.tile, 3, 1)
    plan = laid_down(planner, case.seq_lens.tolist(), window, len(case.q) + room)
    plan = SplitPlan(*[tensor.to(case.q.device) for tensor in plan])

    def run(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        return paged_decode(*tensors, **options, plan=plan)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize("window", [None, 150])
def test_the_kernel_follows_a_plan(window: int | None, device: torch.device) -> None:
    """Contexts of several splits, of one, of none; results of one are written without a
    combination."""
    options = {} if window is None else {"window": window}
    case = make_case(device, [700, 10, 0, 64, 330], kv_heads=1, **options)
    case.block_tables = torch.nn.functional.pad(case.block_tables, (0, 400))
    assert_right(case, case.run(TRITON, with_plan(case, room=2, window=window)))


def test_a_float8_pool_follows_a_plan(device: torch.device) -> None:
    case = make_case(
        device, [300, 20], dtype=torch.bfloat16, pool_dtype=torch.float8_e4m3fn, scales="head"
    )
    assert_right(case, case.run(TRITON, with_plan(case)))


def test_a_plan_of_another_batch_is_refused(device: torch.device) -> None:
    case = make_case(device, [300, 20])
    run = with_plan(case)
    other = make_case(device, [300, 20, 5])
    with pytest.raises(KernelRefused, match="expected a plan of 3 requests and no num_splits"):
        other.run(TRITON, run)
    with pytest.raises(KernelRefused, match="expected a plan of 2 requests and no num_splits"):
        make_case(device, [300, 20], num_splits=2).run(TRITON, run)


def test_other_kernels_take_no_plan(device: torch.device) -> None:
    case = make_case(device, [30])
    assert split_planner(case.q, case.kv, None, PLAIN) is None
