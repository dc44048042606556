# SPDX-License-Identifier: Apache-2.0
"""What the interpreter lets pass and a GPU does not, made into errors.

After `install()`, in every launch of the process:

- each lane of a load or store that is not masked lies in an element of a tensor that was passed,
  strides counted: the space between the rows of a view is outside;
- a masked lane of a load that names no `other` is NaN: the device says nothing of its value;
- 32-bit sums and products do not wrap;
- the programs of the grid run in an order drawn from `shuffle(seed)`.

py) or of any kernel. Its errors reach the test as the text of Triton's InterpreterError.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

Array = npt.NDArray[Any]

NANS = {tl.bfloat16: 0x7FC0, tl.float8e4nv: 0x7F, tl.float8e5: 0x7F}
INT32 = np.iinfo(np.int32)
CAN_WRAP = (np.add, np.subtract, np.multiply)


class OutOfBounds(IndexError):
    """A lane that is not masked lies in no tensor of the launch."""


class Overflow(ArithmeticError):
    """A 32-bit sum or product does not fit its type."""


@dataclass(frozen=True)
class Extent:
    """Where the elements of one tensor lie, in bytes."""

    start: int
    steps: tuple[tuple[int, int], ...]  # (size, stride), the longest stride first
    element_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        size = tensor.element_size()
        steps = [
            (n, stride * size)
            for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if n > 1 and stride
        ]
        steps.sort(key=lambda step: -step[1])
        return cls(tensor.data_ptr(), tuple(steps), size)

    def holds(self, addresses: Array) -> Array:
        """For each address, whether it is a byte of an element."""
        rest = addresses.astype(np.int64) - self.start
        inside = rest >= 0
        for n, stride in self.steps:
            rest = rest - np.minimum(rest // stride, n - 1) * stride
        return inside & (rest < self.element_bytes)


class _Launch:
    """What the launch that runs now has been given, and the order its programs run in."""

    extents: tuple[Extent, ...] = ()
    seed: int | None = None
    order: tuple[int, ...] = ()


def shuffle(seed: int | None) -> None:
    """Draw the order of every later grid from `seed`; None restores the plain order."""
    _Launch.seed = seed


def install() -> None:
    """Guard the interpreter of this process; a second call changes nothing."""
    if InterpreterBuilder.create_masked_load is _load:
        return
    for kind, name, guarded in (
        (GridExecutor, "_init_args_hst", _init_args),
        (GridExecutor, "_restore_args_dev", _restore_args),
        (InterpreterBuilder, "create_masked_load", _load),
        (InterpreterBuilder, "create_masked_store", _store),
        (InterpreterBuilder, "create_atomic_rmw", _atomic_rmw),
        (InterpreterBuilder, "create_atomic_cas", _atomic_cas),
        (InterpreterBuilder, "binary_op", _binary_op),
        (InterpreterBuilder, "set_grid_dim", _set_grid_dim),
        (InterpreterBuilder, "set_grid_idx", _set_grid_idx),
    ):
        _plain[name] = getattr(kind, name)
        setattr(kind, name, guarded)


_plain: dict[str, Any] = {}


def _init_args(self: Any, args: Any, kwargs: Any) -> Any:
    on_host = _plain["_init_args_hst"](self, args, kwargs)
    _Launch.extents = tuple(
        Extent.of(tensor) for tensor in _tensors((*args, *kwargs.values())) if tensor.numel()
    )
    return on_host


def _tensors(args: Iterable[Any]) -> Iterable[torch.Tensor]:
    for arg in args:
        if isinstance(arg, tuple):
            yield from _tensors(arg)
        elif isinstance(arg, torch.Tensor):
            if arg.device.type != "cpu":
                raise NotImplementedError("the guard knows tensors on the CPU only")
            yield arg


def _restore_args(self: Any, args: Any, on_host: Any, kwargs: Any, kwargs_on_host: Any) -> None:
    # Tensors on the CPU are used in place. Triton copies each storage onto itself, which would make
    # a sparse one of gigabytes real.
    _Launch.extents = ()


def _check(what: str, self: Any, ptr: TensorHandle, mask: Array | bool) -> None:
    size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
    lanes = ptr.data[np.broadcast_to(np.asarray(mask, bool), ptr.data.shape)]
    inside = np.zeros(lanes.shape, bool)
    for extent in _Launch.extents:
        held = extent.holds(lanes)
        if size > extent.element_bytes:
            held &= extent.holds(lanes + np.uint64(size - 1))
        inside |= held
        if inside.all():
            return
    outside = lanes[~inside].astype(np.int64)
    if outside.size:
        distances = [int(outside[0]) - extent.start for extent in _Launch.extents]
        raise OutOfBounds(
            f"program {self.grid_idx}: {what} of {size} bytes a lane, {outside.size} of "
            f"{lanes.size} lanes outside every tensor; the first is that many bytes from their "
            f"starts: {distances}"
        )


def _load(
    self: Any, ptr: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *options: Any
) -> TensorHandle:
    _check("load", self, ptr, mask.data)
    if other is None and not mask.data.all():
        other = _undefined(ptr)
    return _plain["create_masked_load"](self, ptr, mask, other, *options)


def _undefined(ptr: TensorHandle) -> TensorHandle | None:
    dtype = ptr.get_element_ty()
    if dtype in NANS:
        bits = np.uint16 if dtype == tl.bfloat16 else np.uint8
        return TensorHandle(np.full(ptr.data.shape, NANS[dtype], bits), dtype)
    if dtype.is_floating():
        numpy_type = np.dtype(f"f{dtype.primitive_bitwidth // 8}")
        return TensorHandle(np.full(ptr.data.shape, np.nan, numpy_type), dtype)
    return None


def _store(self: Any, ptr: TensorHandle, value: Any, mask: TensorHandle, *options: Any) -> Any:
    _check("store", self, ptr, mask.data)
    return _plain["create_masked_store"](self, ptr, value, mask, *options)


def _atomic_rmw(self: Any, op: Any, ptr: TensorHandle, value: Any, mask: Any, *options: Any) -> Any:
    _check("atomic", self, ptr, mask.data)
    return _plain["create_atomic_rmw"](self, op, ptr, value, mask, *options)


def _atomic_cas(self: Any, ptr: TensorHandle, *operands: Any) -> Any:
    _check("atomic", self, ptr, True)
    return _plain["create_atomic_cas"](self, ptr, *operands)


def _binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
    if lhs.data.dtype == np.int32 and rhs.data.dtype == np.int32 and op in CAN_WRAP:
        exact = op(lhs.data, rhs.data, dtype=np.int64)
        if exact.size and (exact.min() < INT32.min or exact.max() > INT32.max):
            raise Overflow(
                f"program {self.grid_idx}: {op.__name__} of 32-bit integers gives "
                f"{exact.min()}..{exact.max()}; one of them should be 64-bit"
            )
    return _plain["binary_op"](self, lhs, rhs, op)


def _set_grid_dim(self: Any, nx: int, ny: int, nz: int) -> None:
    _plain["set_grid_dim"](self, nx, ny, nz)
    order = list(range(nx * ny * nz))
    if _Launch.seed is not None:
        random.Random(_Launch.seed).shuffle(order)
    _Launch.order = tuple(order)


def _set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
    _, ny, nz = self.grid_dim
    number = _Launch.order[(x * ny + y) * nz + z]
    _plain["set_grid_idx"](self, number // (ny * nz), number // nz % ny, number % nz)
