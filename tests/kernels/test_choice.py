# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs, for every device, wish and shortcoming.

The hardware is a value here, put in the place of the probe's answer, because no machine has all of
it; the probe itself is asked what this machine is.
"""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from stratakv.kernels import kernel_choice as choice
from stratakv.kernels.kernel_choice import (
    AUTO,
    NATIVE,
    PLAIN,
    TRITON,
    Hardware,
    KernelRefused,
    choose_kernel,
)

CPU, CUDA, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
H200 = Hardware("NVIDIA H200", (9, 0), True)
A100 = Hardware("NVIDIA A100", (8, 0), True)
V100 = Hardware("Tesla V100", (7, 0), True)
BARE = Hardware("NVIDIA H200", (9, 0), False)
OLD = Hardware("NVIDIA H200", (9, 0), True, "3.5.1")
NO_GPU = Hardware("cpu", None, True)
SHORTCOMINGS = [
    (V100, None, r"it needs compute capability \(8, 0\), and this is .*Tesla V100"),
    (BARE, None, r"triton is not installed \(pip install '.\[cuda\]' in a clone\)"),
    (OLD, None, r"triton 3.5.1 is installed, and the kernels are written for 3.6 or newer"),
    (H200, "heads of 17", "heads of 17"),
]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No interpreter, and nothing warned of yet."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    choice._warn_once.cache_clear()
    return monkeypatch


def give(machine: pytest.MonkeyPatch, hardware: Hardware) -> None:
    machine.setattr(choice, "probe_hardware", lambda: hardware)


@pytest.mark.parametrize("hardware", [H200, A100])
@pytest.mark.parametrize("wanted", [AUTO, TRITON])
@pytest.mark.parametrize("strict", [False, True])
def test_triton_where_it_can(
    machine: pytest.MonkeyPatch, hardware: Hardware, wanted: str, strict: bool
) -> None:
    give(machine, hardware)
    assert choose_kernel(wanted, CUDA, strict=strict) == TRITON


@pytest.mark.parametrize("hardware", [H200, V100, BARE, NO_GPU])
@pytest.mark.parametrize("place", [CPU, CUDA, META])
@pytest.mark.parametrize("unsupported", [None, "heads of 17"])
def test_the_plain_one_whenever_it_is_named(
    machine: pytest.MonkeyPatch, hardware: Hardware, place: torch.device, unsupported: str | None
) -> None:
    give(machine, hardware)
    assert choose_kernel(PLAIN, place, unsupported=unsupported, strict=True) == PLAIN


@pytest.mark.parametrize(("hardware", "unsupported", "reason"), SHORTCOMINGS)
def test_a_shortcoming_is_told_once(
    machine: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hardware: Hardware,
    unsupported: str | None,
    reason: str,
) -> None:
    give(machine, hardware)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert choose_kernel(AUTO, CUDA, unsupported=unsupported) == PLAIN
    assert len(caplog.messages) == 1
    caplog.clear()
    for wanted, strict in ((TRITON, False), (TRITON, True), (AUTO, True)):
        with pytest.raises(KernelRefused, match=f"cannot run: {reason}.*; use the plain one"):
            choose_kernel(wanted, CUDA, unsupported=unsupported, strict=strict)
    assert not caplog.messages


@pytest.mark.parametrize("strict", [False, True])
def test_cpu_tensors_get_the_plain_one_in_silence(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    give(machine, H200)
    with caplog.at_level(logging.WARNING):
        assert choose_kernel(AUTO, CPU, strict=strict) == PLAIN
        assert choose_kernel(AUTO, CPU, unsupported="heads of 17", strict=strict) == PLAIN
    assert not caplog.messages
    with pytest.raises(KernelRefused, match="its tensors are on the CPU"):
        choose_kernel(TRITON, CPU)


def test_the_interpreter_runs_only_what_names_triton(machine: pytest.MonkeyPatch) -> None:
    give(machine, NO_GPU)
    machine.setenv("TRITON_INTERPRET", "1")
    assert choose_kernel(TRITON, CPU) == TRITON
    assert choose_kernel(AUTO, CPU, strict=True) == PLAIN
    with pytest.raises(KernelRefused, match="heads of 17"):
        choose_kernel(TRITON, CPU, unsupported="heads of 17")
    give(machine, Hardware("cpu", None, False))
    with pytest.raises(KernelRefused, match="triton is not installed"):
        choose_kernel(TRITON, CPU)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1+git12", "4.0", "main", None])
def test_another_triton_is_taken_where_it_is_not_older(
    machine: pytest.MonkeyPatch, version: str | None
) -> None:
    give(machine, Hardware("NVIDIA H200", (9, 0), True, version))
    assert choose_kernel(AUTO, CUDA, strict=True) == TRITON


def test_only_what_triton_raised_is_its_failure() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    assert "OutOfResources: out of resource: shared memory" in str(
        choice.triton_failure(errors.OutOfResources(300_000, 232_448, "shared memory"))
    )
    missing = ImportError("libtriton.so: undefined symbol", name="triton._C.libtriton")
    assert choice.triton_failure(missing) == "ImportError: libtriton.so: undefined symbol"
    for other in (ImportError("no module", name="numpy"), ValueError("triton"), RuntimeError("")):
        assert choice.triton_failure(other) is None


def test_a_missing_compiler_is_a_failure_of_triton(machine: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("triton.runtime.build")
    machine.delenv("CC", raising=False)
    machine.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="Failed to find C compiler") as raised:
        build._build("cuda_utils", "", "", [], [], [], [])
    assert "Failed to find C compiler" in str(choice.triton_failure(raised.value))


@pytest.mark.parametrize("strict", [False, True])
def test_the_compiled_one_on_the_cpu_where_it_can(
    machine: pytest.MonkeyPatch, strict: bool
) -> None:
    give(machine, H200)
    for wanted in (AUTO, NATIVE):
        assert choose_kernel(wanted, CPU, native_unsupported=None, strict=strict) == NATIVE
    assert choose_kernel(AUTO, CPU, native_unsupported="not built", strict=strict) == PLAIN
    assert choose_kernel(AUTO, CUDA, native_unsupported=None, strict=strict) == TRITON
    with pytest.raises(KernelRefused, match="cannot run: not built; use the plain one"):
        choose_kernel(NATIVE, CPU, native_unsupported="not built")
    with pytest.raises(KernelRefused, match="cannot run: its tensors are on cuda"):
        choose_kernel(NATIVE, CUDA, native_unsupported=None)


def test_other_devices(machine: pytest.MonkeyPatch) -> None:
    give(machine, H200)
    assert choose_kernel(AUTO, META, strict=True) == PLAIN
    with pytest.raises(KernelRefused, match="its tensors are on meta"):
        choose_kernel(TRITON, META)


@pytest.mark.parametrize("wanted", ["", "Triton", "cuda"])
def test_an_unknown_kernel(wanted: str) -> None:
    with pytest.raises(KernelRefused, match=f"one of auto, triton, native, plain, not '{wanted}'"):
        choose_kernel(wanted, CPU)


def test_the_probe_says_what_this_machine_is() -> None:
    hardware = choice.probe_hardware()
    assert hardware is choice.probe_hardware()
    assert hardware.has_triton == (importlib.util.find_spec("triton") is not None)
    if torch.cuda.is_available():
        assert hardware.device == torch.cuda.get_device_name()
        assert hardware.capability == torch.cuda.get_device_capability()
    else:
        assert hardware == Hardware("cpu", None, hardware.has_triton)
