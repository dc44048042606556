# SPDX-License-Identifier: Apache-2.0
"""Right arithmetic in Triton's interpreter for the types that numpy has not: bf16 and fp8.

The interpreter holds such values as raw integers and, unpatched, adds and multiplies those. After
`install()` every operation on them is done in fp32 and rounded by torch, to nearest even, as the
device does; fp8 saturates as the device's conversion does. `maxnum` and `minnum` pass over a NaN,
as on the device. see launch_guard.py.

The patch lasts as long as the process, because a kernel of the same process must never see half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

Array = npt.NDArray[Any]

FORMATS = {
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
ROUNDING = triton_interpreter._ir.ROUNDING_MODE
_unpatched = {
    name: getattr(InterpreterBuilder, name)
    for name in ("binary_op", "unary_op", "ternary_op", "cast_impl", "create_fma", "create_dot")
}


def is_raw(handle: TensorHandle) -> bool:
    """Whether the handle's data are bits of a format that numpy does not know."""
    return handle.dtype.scalar in FORMATS


def widen(handle: TensorHandle) -> Array:
    """The handle's values in fp32, exactly; the data as they are if numpy knows their type."""
    if not is_raw(handle):
        return handle.data
    torch_type, bits = FORMATS[handle.dtype.scalar]
    return torch.from_numpy(np.array(handle.data, bits)).view(torch_type).float().numpy()


def narrow(values: Array, dtype: tl.dtype) -> TensorHandle:
    """`values` rounded to `dtype`, one of FORMATS."""
    torch_type, bits = FORMATS[dtype.scalar]
    wide = torch.from_numpy(np.array(values, np.float32))
    if torch_type.itemsize == 1:
        limit = torch.finfo(torch_type).max
        wide = wide.clamp(-limit, limit)
    rounded = wide.to(torch_type).view(torch.uint16 if bits is np.uint16 else torch.uint8)
    return TensorHandle(rounded.numpy(), dtype.scalar)


def install() -> None:
    """Patch the interpreter of this process, before the guard; a second call changes nothing."""
    if InterpreterBuilder.cast_impl is _cast_impl:
        return
    for name in _unpatched:
        setattr(InterpreterBuilder, name, globals()[f"_{name}"])
    InterpreterBuilder.create_fp_to_fp = _create_fp_to_fp
    InterpreterBuilder.get_bf16 = _get_bf16
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    for kind, names in ((ReduceOps, ("sum", "min_max")), (ScanOps, ("cumsum", "cumprod"))):
        for name in names:
            setattr(kind, name, _reduce_in_fp32(getattr(kind, name)))


def _binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
    if not (is_raw(lhs) or is_raw(rhs)):
        return _unpatched["binary_op"](self, lhs, rhs, op)
    result = op(widen(lhs), widen(rhs))
    return TensorHandle(result, tl.int1) if result.dtype == bool else narrow(result, lhs.dtype)


def _unary_op(self: Any, arg: TensorHandle, op: Any) -> TensorHandle:
    if not is_raw(arg):
        return _unpatched["unary_op"](self, arg, op)
    return narrow(op(widen(arg)), arg.dtype)


def _ternary_op(
    self: Any, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Any
) -> TensorHandle:
    # A selection moves bits and computes nothing.
    if op is np.where or not is_raw(other):
        return _unpatched["ternary_op"](self, lhs, rhs, other, op)
    return narrow(op(widen(lhs), widen(rhs), widen(other)), other.dtype)


def _create_fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    if not is_raw(z):
        return _unpatched["create_fma"](self, x, y, z)
    return narrow(widen(x) * widen(y) + widen(z), z.dtype)


def _create_dot(
    self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, imprecise: Any
) -> TensorHandle:
    if not any(map(is_raw, (a, b, d))):
        return _unpatched["create_dot"](self, a, b, d, precision, imprecise)
    sums = widen(d)
    result = np.matmul(widen(a), widen(b), dtype=sums.dtype) + sums
    return narrow(result, d.dtype) if is_raw(d) else TensorHandle(result, d.dtype.scalar)


def _cast_impl(self: Any, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
    if dst_type.scalar in FORMATS:
        return narrow(widen(src), dst_type)
    if is_raw(src):
        dtype = triton_interpreter._get_np_dtype(dst_type)
        return TensorHandle(widen(src).astype(dtype), dst_type.scalar)
    return _unpatched["cast_impl"](self, src, dst_type)


def _create_fp_to_fp(self: Any, src: TensorHandle, dst_type: tl.dtype, mode: Any) -> TensorHandle:
    if mode not in (None, ROUNDING.RTNE):
        raise NotImplementedError(f"expected rounding to nearest even, got {mode}")
    return self.cast_impl(src, dst_type)


def _get_bf16(self: Any, value: float) -> TensorHandle:
    return narrow(np.array([value]), tl.bfloat16)


def _reduce_in_fp32(method: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Let a reduction of a raw format see fp32 values, and round what it returns."""

    @functools.wraps(method)
    def reduce(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        first = tensor[0] if isinstance(tensor, tuple) else tensor
        if not is_raw(first.handle):
            return method(self, tensor, *args, **kwargs)
        shape = list(first.shape)
        wide_type = tl.block_type(tl.float32, shape) if shape else tl.float32
        wide = tl.core.tensor(TensorHandle(widen(first.handle), tl.float32), wide_type)
        result = method(self, wide, *args, **kwargs)
        if isinstance(result, (list, tuple)):
            return type(result)(_round_back(item, first.dtype) for item in result)
        return _round_back(result, first.dtype)

    return reduce


def _round_back(tensor: Any, dtype: tl.dtype) -> Any:
    """The fp32 result of a reduction in its own type; an index stays an index."""
    if tensor.dtype != tl.float32:
        return tensor
    shape = list(tensor.shape)
    return tl.core.tensor(
        narrow(tensor.handle.data, dtype), tl.block_type(dtype, shape) if shape else dtype
    )
