# SPDX-License-Identifier: Apache-2.0
"""A layer's RMS norm and its gated activation, each in one kernel launch.

When the engine starts, `choose_elementwise` decides whether the kernels are used. Otherwise a
decoder calls the functions of `engine/models/layers.py`, which compute norm and activation in
torch. Kernels and torch differ only in the order of a sum and in the last digit of `exp`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernel_choice import AUTO, PLAIN, KernelRefused, choose_kernel, is_interpreting
from ..pool_checks import check_last_axis
from .layer_launch import MAX_HIDDEN

HALVES = (torch.float16, torch.bfloat16)


def choose_elementwise(
    device: torch.device, dtype: torch.dtype, hidden_size: int, *, strict: bool = False
) -> str:
    """Return TRITON if Triton kernels can run for rows of `hidden_size` elements on `device`, else
    PLAIN; PLAIN for types wider than 16 bits. Raises KernelRefused like `choose_kernel`."""
    if reason_against_dtype(dtype) is not None:
        return PLAIN
    reason = None
    if hidden_size > MAX_HIDDEN:
        reason = f"its norm takes rows of up to {MAX_HIDDEN}, and these have {hidden_size}"
    return choose_kernel(AUTO, device, unsupported=reason, strict=strict)


def reason_against_dtype(dtype: torch.dtype) -> str | None:
    """Return the reason why the kernels of a layer cannot compute with rows of `dtype`, or None.
    Only Triton's interpreter also accepts float32."""
    if dtype in HALVES or (dtype is torch.float32 and is_interpreting()):
        return None
    return f"the kernels of a layer compute in 16-bit types, and this is {dtype}"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x` `[rows, size]` divided by each row's root mean square and multiplied by `weight`
    `[size]`. If the weight has x's type, values are rounded before the multiplication. If the
    weight is float32, only the product is rounded. Raises KernelRefused for other tensors."""
    if x.dim() != 2 or weight.shape != x.shape[1:] or weight.dtype not in (x.dtype, torch.float32):
        raise KernelRefused(
            "expected x [rows, size] and weight [size] of its type or float32, "
            f"got {x.dtype} {list(x.shape)} and {weight.dtype} {list(weight.shape)}"
        )
    check_last_axis("x", x)
    check_last_axis("weight", weight)
    if not x.numel():
        return torch.empty_like(x)
    from .elementwise_triton import rms_norm_triton

    return rms_norm_triton(x, weight, eps)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`, rounded after each operation. Write the result to `gate`, and
    return `gate`. `gate` and `up` are `[rows, size]`, with the same type and strides. Raises
    KernelRefused for other tensors."""
    return _gate(gate, up, is_gelu=False)


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Write `gelu(gate) * up`, with the tanh approximation of gelu, to `gate` like `silu_gate`."""
    return _gate(gate, up, is_gelu=True)


def _gate(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
    if (
        gate.dim() != 2
        or gate.shape != up.shape
        or gate.dtype is not up.dtype
        or gate.stride() != up.stride()
    ):
        raise KernelRefused(
            "expected gate and up [rows, size] of one type and the same strides, got "
            f"{gate.dtype} {list(gate.shape)} with strides {gate.stride()} and "
            f"{up.dtype} {list(up.shape)} with strides {up.stride()}"
        )
    check_last_axis("gate", gate)
    if gate.numel():
        from .elementwise_triton import gate_triton

        gate_triton(gate, up, is_gelu)
    return gate
