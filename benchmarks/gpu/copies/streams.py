# SPDX-License-Identifier: Apache-2.0
"""What copies between the device and the CPU run on: page-locked memory and a stream each way.

A rehearsal has ordinary memory and no streams.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ....kernels.choice import KernelRefused
from ....kernels.copy.copy_engine import CudaError, PageLockedMemory, cuda_runtime
from ..place import Launch, Place, time_launches


class Lanes(NamedTuple):
    """A stream for each direction, both of the lowest priority. None in a rehearsal."""

    to_host: torch.cuda.Stream | None
    to_device: torch.cuda.Stream | None


def make_lanes(place: Place) -> Lanes:
    """Two new streams. Neither waits for the default stream: synchronise between the two."""
    if place.is_rehearsal:
        return Lanes(None, None)
    return Lanes(new_stream(), new_stream())


def new_stream(priority: int = 0) -> torch.cuda.Stream:
    """0 is the lowest priority, and less is higher."""
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Queue what follows in `stream`."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def page_locked(
    place: Place, num_bytes: int, note: Callable[[str], None]
) -> Iterator[torch.Tensor]:
    """uint8 `[bytes]` that the device reaches; everything on the device has ended when it goes.

    `note` is told where it had to be torch's page-locked memory.
    """
    if place.is_rehearsal:
        yield torch.zeros(num_bytes, dtype=torch.uint8)
        return
    with contextlib.ExitStack() as stack:
        try:
            owner = stack.enter_context(PageLockedMemory(num_bytes, cuda_runtime()))
            memory = owner.tensor()
        except (CudaError, KernelRefused) as error:
            note(f"the page-locked memory is torch's own, for want of another: {error}")
            memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        stack.callback(place.synchronise)
        yield memory


def time_one_way(
    place: Place, stream: torch.cuda.Stream | None, launches: Sequence[Launch]
) -> float:
    """Seconds of one launch, all in `stream`. Includes submitting where that takes longer."""
    with on(stream):
        return time_launches(place, launches, in_graph=False).median


def time_both_ways(
    place: Place, lanes: Lanes, to_host: Sequence[Launch], to_device: Sequence[Launch]
) -> float:
    """Seconds of one launch each way, side by side. The slower direction ends the clock."""

    def wait(waiting: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
        if waiting is not None and other is not None:
            waiting.wait_stream(other)

    def launch_pair(out: Launch, back: Launch) -> None:
        out()
        with on(lanes.to_device):
            back()

    pairs = [
        functools.partial(launch_pair, out, back)
        for out, back in zip(to_host, to_device, strict=True)
    ]
    # The events of the clock are in the stream to the host, so the other starts and ends with it.
    begin = functools.partial(wait, lanes.to_device, lanes.to_host)
    end = functools.partial(wait, lanes.to_host, lanes.to_device)
    launches: list[Launch] = [begin, *pairs, end]
    with on(lanes.to_host):
        timing = time_launches(place, launches, in_graph=False)
    return timing.median * len(launches) / len(pairs)
