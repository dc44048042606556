# SPDX-License-Identifier: Apache-2.0
"""The section that measures the GPU's limits: copies within, to and from the GPU, and products.

The figures of the other sections are compared with the limits of the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .copies.methods import (
    Lanes,
    copy_pairs,
    make_lanes,
    on,
    page_locked,
    time_both_ways,
    time_one_way,
)
from .plots import draw_ceilings
from .section import Launch, Place, Results, Section, WrongResult, check_close, time_launches

NAME = "ceilings"
SEED = 20260
CHECKED_ROWS = 64  # rows of the matrix product that are compared


def run(place: Place, results: Results) -> None:
    """Measure every limit; add a note for each limit that needs more memory than the GPU has."""
    for measure in (measure_device_copy, measure_pinned, measure_matmul):
        place.check_time()
        try:
            measure(place, results)
        except torch.OutOfMemoryError:
            results.add_note(NAME, f"{measure.__name__}: not enough memory on the device")
        place.release_memory()


def measure_device_copy(place: Place, results: Results) -> None:
    """Measure the bytes per second, read and written, of a copy on the GPU."""
    size = place.choose(2 << 30, 1 << 30, 16 << 10)
    sources = [_random_bytes(place, size, number) for number in range(2)]
    targets = [torch.zeros_like(source) for source in sources]
    pairs = list(zip(targets, sources, strict=True))
    launches = [_copy_pieces(pair, size) for pair in pairs]
    _run_and_check(place, "a copy on the device", launches, pairs)
    seconds = time_launches(place, launches).median
    _set(results, "device_copy_gb_per_second", 2 * size / seconds / 1e9, piece_bytes=size)


def measure_pinned(place: Place, results: Results) -> None:
    """Measure copies to page-locked host memory, from page-locked host memory, and in the two
    directions at the same time, in pieces and whole."""
    size = place.choose(1 << 30, 256 << 20, 16 << 10)
    pieces = place.choose((2 << 20, 32 << 20, size), (2 << 20, size), (4 << 10, size))
    lanes = make_lanes(place)
    with page_locked(place, 2 * size, lambda note: results.add_note(NAME, note)) as host:
        out = (host[:size], _random_bytes(place, size, 2))
        back = (torch.zeros_like(out[1]), host[size:])
        back[1].copy_(_random_bytes(place, size, 3))
        for piece in pieces:
            place.check_time()
            for name, seconds, moved in _time_pinned(place, lanes, out, back, piece):
                _set(results, name, moved / seconds / 1e9, piece_bytes=piece)


Pair = tuple[torch.Tensor, torch.Tensor]


def _time_pinned(
    place: Place, lanes: Lanes, out: Pair, back: Pair, piece: int
) -> list[tuple[str, float, int]]:
    """Return the name of each limit, its seconds and its bytes."""
    size = out[0].numel()
    out[1].add_(1)
    back[0].zero_()
    place.synchronise()
    launch_out, launch_back = _copy_pieces(out, piece), _copy_pieces(back, piece)
    for what, stream, launch, pair in (
        ("a copy to the host", lanes.to_host, launch_out, out),
        ("a copy to the device", lanes.to_device, launch_back, back),
    ):
        with on(stream):
            _run_and_check(place, what, [launch], [pair])
    to_host = time_one_way(place, lanes.to_host, [launch_out])
    to_device = time_one_way(place, lanes.to_device, [launch_back])
    both = time_both_ways(place, lanes, [launch_out], [launch_back])
    return [
        ("pinned_to_host_gb_per_second", to_host, size),
        ("pinned_to_device_gb_per_second", to_device, size),
        ("pinned_both_gb_per_second", both, 2 * size),
    ]


def measure_matmul(place: Place, results: Results) -> None:
    """Measure a bf16 product of random matrices, which need more power and time than zeros."""
    size = place.choose(8192, 8192, 64)
    generator = torch.Generator(place.device).manual_seed(SEED)
    a, b = (
        torch.randn(size, size, generator=generator, device=place.device).to(torch.bfloat16)
        for _ in range(2)
    )
    c = torch.empty_like(a)
    launch = partial(torch.mm, a, b, out=c)
    launch()
    expected = a[:CHECKED_ROWS].double() @ b.double()
    check_close(
        "a matrix product", c[:CHECKED_ROWS], expected, absolute=0.02 * size**0.5, relative=0.01
    )
    # No CUDA graph is needed, because a product takes a millisecond, longer than a launch.
    seconds = time_launches(place, [launch], in_graph=False).median
    _set(results, "matmul_bf16_tflops", 2 * size**3 / seconds / 1e12, size=size)


def _set(results: Results, name: str, value: float, **sizes: int) -> None:
    """Add a row, and set the limit to the highest value of all piece sizes."""
    results.add_row(NAME, {"case": name, "value": value, **sizes})
    results.set_ceiling(name, max(value, results.ceilings.get(name, 0.0)))


def _random_bytes(place: Place, size: int, number: int) -> torch.Tensor:
    generator = torch.Generator(place.device).manual_seed(SEED + number)
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, device=place.device, generator=generator
    )


def _copy_pieces(pair: Pair, piece: int) -> Launch:
    target, source = pair
    return copy_pairs(zip(torch.split(target, piece), torch.split(source, piece), strict=True))


def _run_and_check(
    place: Place, what: str, launches: list[Callable[[], object]], pairs: list[Pair]
) -> None:
    for launch in launches:
        launch()
    place.synchronise()
    for target, source in pairs:
        if not torch.equal(target.to(place.device), source.to(place.device)):
            raise WrongResult(f"{what}: the bytes on the two sides differ")


SECTION = Section(NAME, "Ceilings of the device", run, draw_ceilings)
