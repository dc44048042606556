# SPDX-License-Identifier: Apache-2.0
"""Checks whether this machine's GPUs can compute, and explains why if they cannot.

The probe (`probe_cuda`) and the decision (`choose_gpu`) are separate, so that decisions can be
tested without a GPU."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from ....kernels.kernel_choice import FP8_CAPABILITY, MIN_CAPABILITY
from ....tiers.settings.values import ConfigError
from ...models.dtypes import FP8_KV
from .placement import Placement

_DRIVER = "libcuda.so.1"
_TENTHS = 10  # CUDA writes 12.8 as 12080


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch reports it."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaState:
    """The result of `probe_cuda`. `driver_version` is None if there is no driver, and
    `runtime_version` is None if torch has no CUDA. Both fields are CUDA versions as (major,
    minor)."""

    driver_version: tuple[int, int] | None
    runtime_version: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    has_triton: bool
    visible: str | None  # CUDA_VISIBLE_DEVICES
    error: str = ""  # why torch could not start CUDA, unless the versions explain it


def probe_cuda() -> CudaState:
    """Find the driver's and torch's CUDA versions and the GPUs. CUDA is initialised only if there
    are a driver and a CUDA build of torch, and the driver supports its major version."""
    from ....kernels.kernel_choice import probe_hardware

    driver, runtime = _driver_version(), _runtime_version()
    gpus: tuple[Gpu, ...] = ()
    error = ""
    has_triton = False
    if driver is not None and runtime is not None and driver[0] >= runtime[0]:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            gpus = tuple(
                Gpu(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
                for i in range(torch.cuda.device_count())
            )
            has_triton = probe_hardware().has_triton
        except (RuntimeError, AssertionError) as failure:
            error = " ".join(str(failure).split())[:300]
    return CudaState(
        driver_version=driver,
        runtime_version=runtime,
        gpus=gpus,
        has_triton=has_triton,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        error=error,
    )


def choose_gpu(placement: Placement, state: CudaState) -> Gpu:
    """Return the GPU of a placement. Raises ConfigError with the missing part and a remedy if the
    GPU cannot compute."""
    if state.runtime_version is None:
        raise ConfigError(
            "--device cuda needs a CUDA build of torch, and this one is for the CPU; install one "
            "from pytorch.org and `pip install '.[cuda]'` in a clone, or use --device cpu"
        )
    needed = _dotted(state.runtime_version)
    if state.driver_version is None:
        raise ConfigError(
            f"--device cuda needs an NVIDIA driver for CUDA {needed}, and {_DRIVER} is not there; "
            "install the driver (in a container: pass the GPU in, as with --gpus all), or use "
            "--device cpu"
        )
    if state.driver_version[0] < state.runtime_version[0]:
        raise ConfigError(
            f"the NVIDIA driver knows CUDA up to {_dotted(state.driver_version)}, and this torch "
            f"is built for {needed}; install a newer driver or a torch for CUDA "
            f"{state.driver_version[0]}"
        )
    if not state.gpus:
        hidden = (
            f" (CUDA_VISIBLE_DEVICES is {state.visible!r})" if state.visible is not None else ""
        )
        reason = f": {state.error}" if state.error else ""
        raise ConfigError(
            f"--device cuda finds a driver and no GPU that it may use{hidden}{reason}; look at "
            "nvidia-smi, or use --device cpu"
        )
    index = placement.device.index or 0
    if index >= len(state.gpus):
        names = ", ".join(f"cuda:{i} ({gpu.name})" for i, gpu in enumerate(state.gpus))
        raise ConfigError(f"--device cuda:{index} is not there; there are: {names}")
    gpu = state.gpus[index]
    if placement.strict_kernels:
        _check_strict(placement, state, gpu)
    return gpu


def _check_strict(placement: Placement, state: CudaState, gpu: Gpu) -> None:
    """Raise ConfigError if the first step would fail because the kernels cannot run on this GPU.
    This check runs before the weights are read."""
    if not state.has_triton:
        raise ConfigError(
            "--strict-kernels needs triton, which is not installed; run `pip install '.[cuda]'` "
            "in a clone, or drop the flag to compute with plain kernels, slowly"
        )
    needed = FP8_CAPABILITY if placement.kv_cache_dtype == FP8_KV else MIN_CAPABILITY
    if gpu.capability < needed:
        what = f"--kv-cache-dtype {FP8_KV}" if needed == FP8_CAPABILITY else "Triton's kernels"
        raise ConfigError(
            f"{what} needs compute capability {_dotted(needed)}, and {gpu.name} has "
            f"{_dotted(gpu.capability)}; drop --strict-kernels to compute with plain ones, slowly"
        )


def _driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, without initialising CUDA."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // _TENTHS


def _runtime_version() -> tuple[int, int] | None:
    if torch.version.cuda is None:
        return None
    major, minor = torch.version.cuda.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
