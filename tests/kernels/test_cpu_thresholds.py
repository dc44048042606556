# SPDX-License-Identifier: Apache-2.0
"""From how much work on another thread is woken: what follows from a measurement, that a disturbed
one changes little, and that the library does what was chosen."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stratakv.kernels.cpu import library as cpu
from stratakv.kernels.cpu import matrix, paged_attention, thresholds
from stratakv.kernels.cpu.library import CpuLibrary, Missing, cpu_library
from stratakv.kernels.cpu.matrix import PackedMatrix
from stratakv.kernels.cpu.paged_attention import CpuAttentionStep
from stratakv.kernels.cpu.thresholds import Worth, chosen, measured, worth_a_thread

DEFAULT = Worth()
SPEED = 20e9
US = 1000  # ns


@pytest.fixture
def library() -> CpuLibrary:
    found = cpu_library()
    if isinstance(found, Missing):
        pytest.skip(f"needs the compiled kernels: {found.reason}")
    return found


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def waking(library: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worth]:
    """What is measured where threads come in these times, in ns, one after the other and again, on
    a clock of their own."""

    def measure(*times: int) -> Worth:
        now, left = [0.0], itertools.cycle(times)

        def wake(_: None, threads: int) -> int:
            assert threads == 3
            taken = next(left)
            now[0] += taken / 1e9
            return taken

        def sleep(seconds: float) -> None:
            now[0] += seconds

        clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
        monkeypatch.setattr(thresholds, "time", clock)
        monkeypatch.setattr(thresholds, "_weights_per_second", lambda _: SPEED)
        found = measured(dataclasses.replace(library, wake=wake), 3)
        assert now[0] < 0.03, "a measurement takes some milliseconds"
        return found

    return measure


def test_what_is_chosen_follows_both_measurements_within_bounds() -> None:
    found = chosen(30e-6, SPEED)
    assert found.network == round(5 * 30e-6 * SPEED)
    for slower, faster in ((60e-6, SPEED), (30e-6, 2 * SPEED)):
        assert chosen(slower, faster).network == 2 * found.network
    for part in ("product", "attention"):
        share = getattr(found, part) / getattr(DEFAULT, part)
        assert share == pytest.approx(found.network / DEFAULT.network, rel=1e-5)
    assert chosen(1.0, SPEED) == Worth(*(8 * n for n in dataclasses.astuple(DEFAULT)))
    assert chosen(1e-9, SPEED) == Worth(*(n // 8 for n in dataclasses.astuple(DEFAULT)))


def test_slow_threads_are_woken_for_more(waking: Callable[..., Worth]) -> None:
    assert waking(10 * US) == chosen(10e-6, SPEED)
    assert waking(200 * US) == chosen(200e-6, SPEED)
    assert waking(10 * US).network < waking(30 * US).network < waking(200 * US).network


def test_other_work_on_the_machine_changes_nothing(waking: Callable[..., Worth]) -> None:
    assert waking(900 * US, 1300 * US, 30 * US, 2000 * US) == chosen(30e-6, SPEED)


@pytest.mark.parametrize(
    "times", [(3500 * US,), (30 * US, 12_000 * US), (700,), (30 * US, 30 * US, 500)]
)
def test_what_says_nothing_leaves_the_defaults(
    waking: Callable[..., Worth], times: tuple[int, ...]
) -> None:
    """Too few samples in the time there is, and threads that had not gone to sleep."""
    assert waking(*times) == DEFAULT


def test_measured_once_where_there_are_several_threads(
    library: CpuLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    thresholds._of_threads.cache_clear()
    try:
        with caplog.at_level(logging.DEBUG, "stratakv.kernels.cpu.thresholds"):
            torch.set_num_threads(1)
            assert worth_a_thread() == DEFAULT and not caplog.messages
            torch.set_num_threads(2)
            found = worth_a_thread()
            assert worth_a_thread() is found
    finally:
        torch.set_num_threads(before)
        thresholds._of_threads.cache_clear()
    assert len(caplog.messages) == 1 and "2 threads" in caplog.messages[0]
    least, most = dataclasses.astuple(chosen(0.0, 0.0)), dataclasses.astuple(chosen(1.0, 1e12))
    for low, products, high in zip(least, dataclasses.astuple(found), most, strict=True):
        assert low <= products <= high


def test_waking_takes_until_the_last_thread_has_come(
    library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for OpenMP, whose second thread comes a millisecond after the first."""

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(work: int, data: int, threads: int, _: int) -> None:
        for _ in range(threads):
            time.sleep(1e-3)
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)(data)

    address = ctypes.cast(parallel, ctypes.c_void_p).value
    monkeypatch.setattr(cpu, "_torch_parallel", lambda: address)
    own = cpu.open_library(Path(cpu.__file__).with_name(cpu.FILE_NAME), library.variant)
    assert isinstance(own, CpuLibrary)
    before = time.monotonic_ns()
    taken = own.wake(None, 2)
    assert 2_000_000 <= taken <= time.monotonic_ns() - before
    assert own.wake(None, 1) == 0


def products_that_take(
    seconds: list[float], library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> CpuLibrary:
    """On a clock of their own. They are computed."""
    now, left = [0.0], itertools.cycle(seconds)

    def multiply(address: int, threads: int) -> int:
        now[0] += next(left)
        return library.multiply(address, threads)

    monkeypatch.setattr(thresholds, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return dataclasses.replace(library, multiply=multiply)


def test_the_quickest_product_tells_how_fast_a_thread_is(
    library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = products_that_take([1e-3, 5e-5, 9e-4], library, monkeypatch)
    assert thresholds._weights_per_second(usual) == pytest.approx(512 * 1024 / 5e-5)


def test_a_process_that_gets_no_processor_leaves_the_defaults(
    library: CpuLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a container's quota is used up: a single product, of 90 ms."""
    starved = products_that_take([0.09], library, monkeypatch)
    monkeypatch.setattr(thresholds, "_seconds_to_wake", lambda *_: 2e-5)
    assert measured(starved, 2) == DEFAULT


def test_a_product_and_attention_take_the_threads_that_are_worth_it(
    library: CpuLibrary, three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library asks OpenMP for them; here for a stand-in, which does the work alone."""
    asked: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(work: int, data: int, threads: int, _: int) -> None:
        asked.append(threads)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)(data)

    address = ctypes.cast(parallel, ctypes.c_void_p).value
    monkeypatch.setattr(cpu, "_torch_parallel", lambda: address)
    own = cpu.open_library(Path(cpu.__file__).with_name(cpu.FILE_NAME), library.variant)
    for module in (matrix, paged_attention):
        monkeypatch.setattr(module, "cpu_library", lambda: own)

    def threads_of(worth: int) -> list[int]:
        for module in (matrix, paged_attention):
            monkeypatch.setattr(module, "worth_a_thread", lambda: Worth(worth, worth, worth))
        asked.clear()
        PackedMatrix((torch.ones(64, 64),))(torch.ones(8, 64))  # 8192 for every four rows
        CpuAttentionStep(
            pool := torch.zeros(16, 2, 16, 1, 16),
            torch.arange(16, dtype=torch.int32).view(2, 8),
            torch.tensor([128, 128], dtype=torch.int32),
            None,
            num_tokens=2,
            num_heads=2,
            scale=1.0,
            workspace=paged_attention.Workspace(),
        ).run(q := torch.ones(2, 2, 16), pool, torch.empty_like(q))  # 2 * 128 * 2 * 16 = 8192
        return list(asked)

    assert threads_of(8192) == []
    assert threads_of(8192 // 2) == [2, 2]
    assert threads_of(8192 // 3) == threads_of(1) == [3, 3]
