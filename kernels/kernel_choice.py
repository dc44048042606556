# SPDX-License-Identifier: Apache-2.0
"""The choice of a kernel's implementation: Triton, the compiled library for CPUs ("native"), or
plain torch.

Triton kernels run on CUDA devices, if the compute capability and the Triton version are high
enough. Compiled kernels run on CPUs, if the installation has built them. Plain kernels run on every
device, and tests compare the other kernels with them. A caller may request an implementation by
name. If a Triton kernel cannot run on a GPU, the plain kernel runs; under `strict`, KernelRefused
is raised."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import os
import re
from dataclasses import dataclass
from traceback import walk_tb

import torch

logger = logging.getLogger(__name__)

AUTO, TRITON, NATIVE, PLAIN = "auto", "triton", "native", "plain"
KERNELS = (AUTO, TRITON, NATIVE, PLAIN)
NO_NATIVE = "there is none of this"
MIN_CAPABILITY = (8, 0)
MIN_TRITON = (3, 6)  # the minimum in pyproject.toml
FP8_CAPABILITY = (8, 9)  # the first capability whose hardware converts e4m3


class KernelRefused(ValueError):
    """A kernel cannot run, or cannot compute with the arguments of a call. The message says why."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware and the Triton version that this process uses. `capability` and `triton_version`
    are None if there is no CUDA device; `triton_version` is also None if it cannot be found."""

    device: str
    capability: tuple[int, int] | None
    has_triton: bool
    triton_version: str | None = None


@functools.cache
def probe_hardware() -> Hardware:
    """Return the hardware, found and logged once per process. The call initialises CUDA if there is
    CUDA."""
    has_triton = importlib.util.find_spec("triton") is not None
    if not torch.cuda.is_available():
        return Hardware("cpu", None, has_triton)
    hardware = Hardware(
        torch.cuda.get_device_name(),
        torch.cuda.get_device_capability(),
        has_triton,
        _triton_version(),
    )
    logger.info("kernels: %s", hardware)
    return hardware


def triton_failure(error: Exception) -> str | None:
    """Return the first line of an error that Triton's code raised; None for other errors. Triton
    also raises Python's built-in errors: when its import fails, or when a compiler, Python's
    headers or a writable folder is missing."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__))
    modules = {type(error).__module__, str(getattr(error, "name", "")), *frames}
    if not any(module.partition(".")[0] == "triton" for module in modules):
        return None
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def is_interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels; the interpreter works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def choose_kernel(
    wanted: str,
    device: torch.device,
    *,
    unsupported: str | None = None,
    native_unsupported: str | None = NO_NATIVE,
    strict: bool = False,
) -> str:
    """Return the implementation for tensors on `device`: TRITON, NATIVE or PLAIN.

    `unsupported` is the caller's reason why Triton cannot be used, such as a head size.
    `native_unsupported` is the reason why the compiled kernel for CPUs cannot be used. None means
    that there is no such reason. Raises KernelRefused for an unknown name, for a kernel that is
    requested by name and cannot run, and under `strict` for AUTO on a CUDA device if Triton cannot
    run."""
    if wanted not in KERNELS:
        raise KernelRefused(f"a kernel is one of {', '.join(KERNELS)}, not {wanted!r}")
    if wanted == PLAIN:
        return PLAIN
    if wanted == NATIVE or (wanted == AUTO and device.type == "cpu"):
        return _native_or_plain(wanted, device, native_unsupported)
    reason = unsupported or _reason_against(device)
    if reason is None:
        return TRITON
    if wanted == TRITON or (strict and device.type == "cuda"):
        raise KernelRefused(f"the Triton kernel cannot run: {reason}; use the plain one")
    if device.type == "cuda":
        _warn_once(reason)
    return PLAIN


def _native_or_plain(wanted: str, device: torch.device, reason: str | None) -> str:
    if device.type != "cpu":
        reason = f"its tensors are on {device.type}"
    if reason is None:
        return NATIVE
    if wanted == NATIVE:
        raise KernelRefused(f"the compiled kernel cannot run: {reason}; use the plain one")
    return PLAIN


def _reason_against(device: torch.device) -> str | None:
    hardware = probe_hardware()
    if not hardware.has_triton:
        return "triton is not installed (pip install '.[cuda]' in a clone)"
    version = hardware.triton_version
    if version is not None and _numbers(version) < MIN_TRITON:
        return (
            f"triton {version} is installed, and the kernels are written for "
            f"{'.'.join(map(str, MIN_TRITON))} or newer (pip install '.[cuda]' in a clone)"
        )
    if device.type == "cpu":
        return None if is_interpreting() else "its tensors are on the CPU"
    if device.type != "cuda":
        return f"its tensors are on {device.type}"
    if hardware.capability is None or hardware.capability < MIN_CAPABILITY:
        return f"it needs compute capability {MIN_CAPABILITY}, and this is {hardware}"
    return None


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # installed under another name
        return None


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else MIN_TRITON


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "plain kernels instead of Triton's, which take many times longer and read lengths back to "
        "the host in every layer: %s",
        reason,
    )
