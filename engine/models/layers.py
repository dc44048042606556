# SPDX-License-Identifier: Apache-2.0
"""The linear maps, norms and MLPs of a layer, and the choice of their elementwise functions.

Plain torch makes several passes over the same numbers for a norm, a rotation or a gate. On a GPU,
each kernel of `kernels/layer/` makes one pass. On other devices code from torch.compile makes one
pass too, but is used only with `--compilation elementwise`, since compiling takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cpu.matrix import (
    GELU_TANH,
    SILU,
    PackedAdapter,
    PackedMatrix,
    reason_against_matrices,
)
from ...kernels.layer.elementwise import gelu_gate, rms_norm, silu_gate
from .checkpoint.weights import DenseWeights
from .families import Activation
from .lora.low_rank import Adaptable, LowRank, Target
from .lora.row_slots import RowSlots, SlotMatrices
from .rope import rotate

# The number of rows for which oneDNN chooses a block format; the blocks work for any number.
_USUAL_ROWS = 16

_WIDE_TYPES = (torch.float32, torch.float64)
# The number that the library of `kernels/cpu/` has for each gated activation function.
LIBRARY_ACTIVATIONS = {Activation.SILU: SILU, Activation.GELU_TANH: GELU_TANH}


class Linear:
    """A linear map, `x @ weight.T + bias` for x `[rows, in]`; `weight` is `[out, in]`, `bias` is
    `[out]` or None.

    On the CPU the matrix is reordered once, and the original `weight` is not kept. If the library
    of `kernels/cpu/` is available, the matrix becomes its `packed` form; without the library it is
    reordered into oneDNN's blocks, for float32 only. Measured on an AMD EPYC with one thread and
    matrices of 256 to 3072: in float32 the library is 1.7 to 2.6 times as fast as oneDNN for one
    row, 1.3 to 1.6 times for 16 rows, and 0.9 to 1.3 times for 64 and more. In bfloat16 the library
    is 1.4 to 2.3 times as fast as torch for one row, and 6 to 10 times for 16 and more."""

    __slots__ = ("_adapters", "_bias", "_is_packed", "_rows", "_shape", "_weight", "packed")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, is_kept: bool = False
    ) -> None:
        """`is_kept`: the caller keeps `weight` in memory unless the matrix becomes `packed`. With
        `is_kept`, no oneDNN blocks are made, since these would be a second copy."""
        self._bias, self._is_packed, self._weight = bias, False, weight
        self._shape = tuple(weight.shape)
        self._rows: RowSlots | None = None  # None: no row has an adapter
        self._adapters: SlotMatrices | None = None
        self.packed: PackedMatrix | None = None
        if reason_against_matrices(weight.dtype, weight.device) is None:
            self.packed = PackedMatrix((weight,), (bias,))
            self._weight = weight.new_empty(0)  # a view would keep the matrix in memory
            return
        self._is_packed = not is_kept and _can_pack(weight)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _USUAL_ROWS)
            if self._is_packed
            else weight
        )

    def __call__(
        self, x: Tensor, wanted: npt.NDArray[np.uint32] | None = None, *, is_wide: bool = False
    ) -> Tensor:
        """Return `[rows, out]`. Output i may be 0 instead of computed if bit `i % 32` of word `i //
        32` in `wanted` is 0. With `is_wide`, results of 16-bit types may be returned as float32,
        still rounded to the 16-bit type."""
        slots = None if self._rows is None else self._rows.slots
        if self.packed is not None:
            return self.packed(x, wanted, is_wide=is_wide, slots=slots)
        product: Tensor
        if self._is_packed:
            product = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
        else:
            product = F.linear(x, self._weight, self._bias)
        if slots is not None and self._adapters is not None:
            self._adapters.add_to(product, x)
        return product

    def allow_adapters(self, rows: RowSlots, rank: int) -> None:
        """See `Adaptable`."""
        self._rows = rows
        if self.packed is not None:
            self.packed.allow_adapters(rows.num_slots)
        else:
            self._adapters = SlotMatrices(rows, self._weight, self._shape, rank)

    def prepare_adapter(self, adapter: LowRank) -> PackedAdapter | LowRank:
        """See `Adaptable`. Several tensors in `adapter.outs` are concatenated to one matrix."""
        outs = adapter.outs[0] if len(adapter.outs) == 1 else torch.cat(adapter.outs)
        if self.packed is not None:
            return self.packed.pack_adapter(adapter.ins, (outs,))
        return LowRank(adapter.ins, (outs,))

    def put_adapter(self, slot: int, prepared: PackedAdapter | LowRank | None) -> None:
        """See `Adaptable`."""
        if self.packed is not None:
            assert prepared is None or isinstance(prepared, PackedAdapter)
            self.packed.put_adapter(slot, prepared)
        elif self._adapters is not None:
            assert prepared is None or isinstance(prepared, LowRank)
            self._adapters.put_adapter(slot, prepared)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the product of `x` and the matrix to `out` `[rows, out]` in place. The sum is rounded
        only once if the matrix product itself adds to `out`."""
        if self.packed is not None or self._is_packed:
            out += self(x)
            return
        out.addmm_(x, self._weight.t())
        if self._bias is not None:
            out += self._bias
        if self._adapters is not None and self._rows is not None and self._rows.slots is not None:
            self._adapters.add_to(out, x)


def _can_pack(weight: Tensor) -> bool:
    """Whether torch's `mkldnn` operators can reorder the matrix into oneDNN's blocks."""
    return (
        weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


Compile = Callable[[Callable[..., Tensor]], Any]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute an RMS norm over the last dimension, and multiply it by `weight`, which may have a
    vector for each head. The norm is computed in float32 or wider. The normed `x` is rounded to its
    type before it is multiplied by a `weight` of this type, and after it is multiplied by a wider
    `weight`."""
    size = weight.shape[-1:]
    if x.dtype not in _WIDE_TYPES:
        normed = F.rms_norm(x.float(), size, None, eps)
        if weight.dtype in _WIDE_TYPES:
            return (normed * weight).to(x.dtype)
        return weight * normed.to(x.dtype)
    if weight.dim() > 1:
        return F.rms_norm(x, size, None, eps) * weight
    return F.rms_norm(x, size, weight, eps)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`. `gate` is overwritten."""
    gate = F.silu(gate, inplace=True)
    gate *= up
    return gate


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, with gelu approximated by tanh."""
    gate = F.gelu(gate, approximate="tanh")
    gate *= up
    return gate


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The functions that a decoder uses for norms, rotations and gates."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    gated: Callable[[Tensor, Tensor], Tensor] = gated
    gelu_gated: Callable[[Tensor, Tensor], Tensor] = gelu_gated
    # Whether the functions are kernels. With kernels, a layer has gate and up as one matrix, adds
    # in place, and leaves the rotation to an attention that can rotate.
    is_kernels: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether all functions are the plain torch functions of this module. Other functions with
        equal results may replace only plain functions."""
        return self == Elementwise()

    @classmethod
    def compiled(cls, compile_one: Compile | None = None) -> Elementwise:
        """Return the functions with torch.compile applied, so that each is compiled at its first
        call, for any number of rows."""

        def by_torch(function: Callable[..., Tensor]) -> Any:
            return torch.compile(function, dynamic=True)

        one = compile_one or by_torch
        return cls(one(norm), one(rotate), one(gated), one(gelu_gated))

    @classmethod
    def of_kernels(cls) -> Elementwise:
        """The kernels of `kernels/layer/`, if `choose_elementwise` has chosen them."""
        return cls(_norm_by_kernel, rotate, silu_gate, gelu_gate, is_kernels=True)

    def gated_by(self, activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function that combines gate and up for an activation. Raises KeyError for an
        activation that has no gate."""
        return {Activation.SILU: self.gated, Activation.GELU_TANH: self.gelu_gated}[activation]


def _norm_by_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute an RMS norm by the Triton kernel. Norms of query and key heads (`weight` with two
    dimensions) are computed by torch; a mixer calls this function for query and key heads only if
    its attention does not rotate."""
    return norm(x, weight, eps) if weight.dim() > 1 else rms_norm(x, weight, eps)


class Mlp(Protocol):
    """An MLP or a mixture of experts. Its result for a row depends on this row alone; the layer
    adds the result to the row."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """Compute `[rows, hidden]` from normed rows `[rows, hidden]`. `x` is not changed."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the result for `x` to `out` in place. Only layers with kernels call this method."""

    def adapted_products(self) -> dict[Target, Adaptable]:
        """Return the matrix products that LoRA adapters can change."""


class SquaredMlp:
    """An MLP of two matrices without a gate: `down(relu(up(x)) ** 2)`."""

    __slots__ = ("_down", "_up")

    def __init__(self, weights: DenseWeights) -> None:
        self._up = Linear(weights.up, weights.up_bias)
        self._down = Linear(weights.down, weights.down_bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._down(self._up(x).relu_().square_())

    def add_to(self, out: Tensor, x: Tensor) -> None:
        self._down.add_to(out, self._up(x).relu_().square_())

    def adapted_products(self) -> dict[Target, Adaptable]:
        return {Target.GATE_UP: self._up, Target.DOWN: self._down}


class _PackedPair:
    """Gate and up as one matrix packed for the library of `kernels/cpu/`, with the activation."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self._rows: RowSlots | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix(x, slots=None if self._rows is None else self._rows.slots)

    def allow_adapters(self, rows: RowSlots, rank: int) -> None:
        self._rows = rows
        self.matrix.allow_adapters(rows.num_slots)

    def prepare_adapter(self, adapter: LowRank) -> PackedAdapter:
        return self.matrix.pack_adapter(adapter.ins, adapter.outs)

    def put_adapter(self, slot: int, prepared: PackedAdapter | None) -> None:
        self.matrix.put_adapter(slot, prepared)


class _TwoLinears:
    """Gate and up as two matrices with one input."""

    def __init__(self, gate: Linear, up: Linear) -> None:
        self._both = (gate, up)

    def allow_adapters(self, rows: RowSlots, rank: int) -> None:
        for each in self._both:
            each.allow_adapters(rows, rank)

    def prepare_adapter(self, adapter: LowRank) -> list[Any]:
        pairs = zip(self._both, adapter.outs, strict=True)
        return [each.prepare_adapter(LowRank(adapter.ins, (outs,))) for each, outs in pairs]

    def put_adapter(self, slot: int, prepared: list[Any] | None) -> None:
        for each, own in zip(self._both, prepared or (None, None), strict=True):
            each.put_adapter(slot, own)


class DenseMlp:
    """An MLP of three matrices: `down(activation(gate(x)) * up(x))`. Gate and up are one matrix if
    the library of `kernels/cpu/` computes them (`gate_up`, which applies the activation too), or if
    the weights have a joined matrix (`_both`)."""

    __slots__ = ("_both", "_gate", "_gated", "_pair", "_up", "activation", "down")

    def __init__(
        self, weights: DenseWeights, activation: Activation, elementwise: Elementwise
    ) -> None:
        self.down = Linear(weights.down, weights.down_bias)
        self.activation = LIBRARY_ACTIVATIONS[activation]
        self._pair: _PackedPair | None = None
        gate, up = weights.gate, weights.up
        assert gate is not None
        if elementwise.is_plain and reason_against_matrices(gate.dtype, gate.device) is None:
            biases = (weights.gate_bias, weights.up_bias)
            self._pair = _PackedPair(PackedMatrix((gate, up), biases, self.activation))
            return
        self._both: Linear | None = None
        if weights.gate_up is not None:
            self._both = Linear(weights.gate_up, weights.gate_up_bias)
        else:
            self._gate, self._up = Linear(gate, weights.gate_bias), Linear(up, weights.up_bias)
        self._gated = elementwise.gated_by(activation)

    def __call__(self, x: Tensor, /) -> Tensor:
        if self._pair is not None:
            return self.down(self._pair(x))
        return self.down(self._inner(x))

    @property
    def gate_up(self) -> PackedMatrix | None:
        """The matrix of gate and up, packed for the library of `kernels/cpu/`."""
        return None if self._pair is None else self._pair.matrix

    def adapted_products(self) -> dict[Target, Adaptable]:
        gate_up: Adaptable
        if self._pair is not None:
            gate_up = self._pair
        else:
            gate_up = self._both or _TwoLinears(self._gate, self._up)
        return {Target.GATE_UP: gate_up, Target.DOWN: self.down}

    def add_to(self, out: Tensor, x: Tensor) -> None:
        self.down.add_to(out, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        """Return the activated rows, which `down` multiplies."""
        if self._both is not None:
            gate, up = self._both(x).chunk(2, dim=-1)
            return self._gated(gate, up)
        return self._gated(self._gate(x), self._up(x))
