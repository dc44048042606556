# SPDX-License-Identifier: Apache-2.0
"""Checks of a layer's KV pool and scales, for kernels that read or write the pool.

The checks read shapes, types, strides and devices, never contents, so a check waits for no GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .kernel_choice import FP8_CAPABILITY, KernelRefused, probe_hardware

FP8 = torch.float8_e4m3fn


def check_scales(kv: Tensor, kv_scales: Tensor | None) -> None:
    """Raise KernelRefused if a float8 pool has no scales, if the scales are neither one for each
    head nor one for each token and head, or if another pool has scales."""
    if kv.dtype != FP8:
        if kv_scales is not None:
            raise KernelRefused(f"expected no kv_scales beside a pool of {kv.dtype}, got some")
        return
    if kv_scales is None:
        raise KernelRefused(f"expected kv_scales beside a pool of {FP8}, got none")
    wanted = ((2, kv.shape[3]), kv.shape[:4])
    if kv_scales.dtype != torch.float32 or kv_scales.shape not in wanted:
        raise KernelRefused(
            f"expected float32 kv_scales of {list(wanted[0])} or {list(wanted[1])}, "
            f"got {kv_scales.dtype} of {list(kv_scales.shape)}"
        )


def check_one_device(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise KernelRefused unless all tensors that are not None are on the same device."""
    devices = {name: str(tensor.device) for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) != 1:
        raise KernelRefused(f"expected one device, got {devices}")


def check_last_axis(name: str, tensor: Tensor) -> None:
    """Raise KernelRefused unless the last axis of `tensor` is contiguous or has one element."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise KernelRefused(
            f"expected {name} contiguous in its last axis, got strides {tensor.stride()}"
        )


def check_written(name: str, tensor: Tensor) -> None:
    """Raise KernelRefused if an axis of several elements has stride 0: writes would race."""
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise KernelRefused(
            f"expected {name}, which is written, with a place for each element, "
            f"got {list(tensor.shape)} with strides {tensor.stride()}"
        )


def reason_against_fp8(kv: Tensor) -> str | None:
    """Return the reason why Triton kernels cannot convert the float8 pool `kv` on its device, or
    None. On the CPU, Triton's interpreter converts every float8 pool."""
    if kv.dtype != FP8 or not kv.is_cuda:
        return None
    capability = probe_hardware().capability
    if capability is None or capability >= FP8_CAPABILITY:
        return None
    return f"{FP8} needs compute capability {FP8_CAPABILITY}, and this is {capability}"
