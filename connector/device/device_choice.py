# SPDX-License-Identifier: Apache-2.0
"""Makes a copy device by its name: `cpu`, `cuda`, or one of several GPUs, `cuda:1`. For the CPU
device no CUDA module is imported."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...tiers.errors import TierConfigError
from .base import CopyDevice, DeviceError
from .cpu import CpuCopyDevice

_CUDA = re.compile(r"cuda(?::(\d{1,3}))?", re.ASCII)


def make_device(name: str, progress: Callable[[int, int], None] | None = None) -> CopyDevice:
    """Make the device `name`. `progress` is called with the page-locked bytes of the slab and all
    its bytes. Raises TierConfigError for an unknown or missing device or several GPUs."""
    if name == "cpu":
        return CpuCopyDevice()
    match = _CUDA.fullmatch(name)
    if match is None:
        if name.count("cuda") > 1 or (name.startswith("cuda") and "," in name):
            raise TierConfigError(
                f"{name!r} names several GPUs, and blocks are copied from one; name one, as "
                "cuda:0, and start an engine for each"
            )
        raise TierConfigError(f"a device is cpu, cuda or one GPU as cuda:1, not {name!r}")
    import torch

    from .cuda import CudaCopyDevice
    from .cuda_copy_runtime import TorchRuntime

    try:
        # The name `cuda` without a number means this thread's current device.
        return CudaCopyDevice(TorchRuntime(torch.device(name)), progress=progress)
    except DeviceError as error:
        raise TierConfigError(f"offloading from {name}: {error}") from error
