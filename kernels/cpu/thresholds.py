# SPDX-License-Identifier: Apache-2.0
"""The least work for which another thread is woken, measured once before the first step.

Another thread must save several times the time that waking it takes. The threshold is computed from
two measurements: the time until a woken thread runs, and the speed at which a thread reads the
weights of a matrix."""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from dataclasses import astuple, dataclass

import torch

from .library import ELEMENTS, CpuLibrary, Matrix, Product, cpu_library

logger = logging.getLogger(__name__)

# The least work of a thread, in multiples of the work that a thread does while another is woken.
# With less work, the embedded model was slower with two threads, which wait for each other in every
# layer, than with one.
_TIMES = 5
_MOST_CHANGE = 8  # the largest factor between a threshold and its default
_SAMPLES, _FEWEST = 12, 4
_SECONDS = 0.008  # limit of the time of a measurement
_PAUSE_SECONDS = 1e-4  # a pause after which threads sleep again
# A thread that runs after a shorter time was not asleep: some OpenMP libraries let threads spin.
_AWAKE_SECONDS = 2e-6
_OUTS, _INS = 512, 1024  # a float32 matrix that fits into the second or third cache


@dataclass(frozen=True, slots=True)
class Worth:
    """The least number of multiplications per thread for which another thread is woken. The
    defaults, which were measured on two cores of an AMD EPYC, are used if nothing is measured."""

    network: int = 3 << 20  # weights, each multiplied by four rows
    product: int = 3 << 18  # weights of one matrix, each multiplied by four rows
    attention: int = 1 << 19


def chosen(wake_seconds: float, weights_per_second: float) -> Worth:
    """Return the thresholds for a time to wake a thread and a speed of a thread."""
    share = _TIMES * wake_seconds * weights_per_second / Worth().network
    share = min(max(share, 1 / _MOST_CHANGE), _MOST_CHANGE)
    return Worth(*(round(share * products) for products in astuple(Worth())))


def worth_a_thread() -> Worth:
    """Return the thresholds, measured once for each number of torch's threads."""
    threads = torch.get_num_threads()
    return Worth() if threads == 1 else _of_threads(threads)


@functools.cache
def _of_threads(threads: int) -> Worth:
    library = cpu_library()
    return measured(library, threads) if isinstance(library, CpuLibrary) else Worth()


def measured(library: CpuLibrary, threads: int) -> Worth:
    """Measure the thresholds, within some milliseconds. The shortest of several samples is used,
    because other work of the machine only adds time. The defaults are returned if there are too few
    samples, or if a thread was still awake in a sample of the waking time."""
    wake = _seconds_to_wake(library, threads)
    speed = _weights_per_second(library)
    if wake is None or speed is None:
        logger.debug("what waking %d threads takes was not measured", threads)
        return Worth()
    found = chosen(wake, speed)
    logger.debug(
        "%d threads come within %.0f us and one goes through %.1f G weights/s: a pass wakes "
        "another one for %.2f M weights each",
        *(threads, wake * 1e6, speed / 1e9, found.network / 1e6),
    )
    return found


def _seconds_to_wake(library: CpuLibrary, threads: int) -> float | None:
    library.wake(None, threads)  # creates the threads
    samples: list[float] = []
    end = time.monotonic() + _SECONDS
    while len(samples) < _SAMPLES and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        samples.append(library.wake(None, threads) / 1e9)
        if samples[-1] < _AWAKE_SECONDS:
            return None
    return min(samples) if len(samples) >= _FEWEST else None


def _weights_per_second(library: CpuLibrary) -> float | None:
    weights, x, out = torch.zeros(_OUTS * _INS), torch.zeros(_INS), torch.empty(_OUTS)
    product = Product(
        x=x.data_ptr(),
        out=out.data_ptr(),
        rows=1,
        x_row=_INS,
        out_row=_OUTS,
        element=ELEMENTS[torch.float32],
        worth_a_thread=Worth().product,
        matrix=Matrix(packed=weights.data_ptr(), ins=_INS, outs=_OUTS),
    )
    address = ctypes.addressof(product)
    memory = torch.empty(library.product_workspace(address, 1), dtype=torch.uint8)
    product.workspace, product.workspace_bytes = memory.data_ptr(), memory.numel()
    samples: list[float] = []
    end = time.monotonic() + _SECONDS
    while len(samples) < _SAMPLES and time.monotonic() < end:
        before = time.monotonic()
        library.multiply(address, 1)
        samples.append(time.monotonic() - before)
    return weights.numel() / min(samples) if len(samples) >= _FEWEST else None
