# SPDX-License-Identifier: Apache-2.0
"""The parts of a layer that work element by element: norms, the rotation, the gate.

Between matrix products they are several passes over the same numbers. On a GPU the kernels of
`kernels/layer/` make one of each; elsewhere torch.compile does, which is asked for by name
(`--compilation elementwise`), for it takes seconds at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cpu.matrix import GELU_TANH, SILU, PackedMatrix, reason_against_matrices
from ...kernels.layer.elementwise import gelu_gate, rms_norm, silu_gate
from .checkpoint.weights import DenseWeights
from .families import Activation
from .rope import rotate

# The number of rows the blocks are chosen for; any other number works too.
_USUAL_ROWS = 16

_WIDE_TYPES = (torch.float32, torch.float64)


class Linear:
    """`x @ weight.T + bias` for x `[rows, in]`; `weight` is `[out, in]`, `bias` `[out]` or None.

    On the CPU the matrix is reordered once, and no reference to `weight` is kept: into the panels
    that the library of `kernels/cpu/` multiplies by, which is `packed` then, or without it into
    the blocks that oneDNN multiplies from. Measured on an AMD EPYC with one thread, matrices of 256
    to 3072: the library does in float32 1.7 to 2.6 times what oneDNN does for one row, 1.3 to 1.6
    times for 16, 0.9 to 1.3 times for 64 and more; in bfloat16 1.4 to 2.3 times what torch does for
    one row of them and 6 to 10 times for 16 and more. oneDNN has blocks for float32 only.
    """

    __slots__ = ("_bias", "_is_packed", "_weight", "packed")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, is_kept: bool = False
    ) -> None:
        """With `is_kept` somebody keeps `weight` unless it is `packed`, and oneDNN's blocks would
        be it once more: they are not made then."""
        self._bias, self._is_packed, self._weight = bias, False, weight
        self.packed: PackedMatrix | None = None
        if reason_against_matrices(weight.dtype, weight.device) is None:
            self.packed = PackedMatrix((weight,), (bias,))
            self._weight = weight.new_empty(0)  # a view would keep it
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
        """`[rows, out]`. Outputs without a bit in `wanted`, bit `i % 32` of word `i // 32`, may be
        left out, and are 0 then. With `is_wide`, those of 16-bit types may come as float32, rounded
        all the same."""
        if self.packed is not None:
            return self.packed(x, wanted, is_wide=is_wide)
        if self._is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return product
        return F.linear(x, self._weight, self._bias)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the product to `out` `[rows, out]`, in place: rounded once, where the product itself
        adds."""
        if self.packed is not None or self._is_packed:
            out += self(x)
            return
        out.addmm_(x, self._weight.t())
        if self._bias is not None:
            out += self._bias


def _can_pack(weight: Tensor) -> bool:
    """Whether this torch can reorder the matrix; the operators are those of its own compiler."""
    return (
        weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


Compile = Callable[[Callable[..., Tensor]], Any]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square over the last dimension; `weight` may be a vector for each head. Computed in
    float32 at least: what comes out is rounded to x's type before it is multiplied by a weight of
    that type, and after it is multiplied by a wider one."""
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
    """`silu(gate) * up`; overwrites `gate`."""
    gate = F.silu(gate, inplace=True)
    gate *= up
    return gate


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up`, by the approximation with tanh."""
    gate = F.gelu(gate, approximate="tanh")
    gate *= up
    return gate


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The functions as a decoder calls them."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    gated: Callable[[Tensor, Tensor], Tensor] = gated
    gelu_gated: Callable[[Tensor, Tensor], Tensor] = gelu_gated
    # Whether they are kernels. A layer then has the gate and the lifting matrix in one, adds in
    # place, and leaves the rotation to an attention that can rotate.
    is_kernels: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether they are those of this module, in whose place others may compute the same."""
        return self == Elementwise()

    @classmethod
    def compiled(cls, compile_one: Compile | None = None) -> Elementwise:
        """Each compiled when it is first called, for any number of rows."""

        def by_torch(function: Callable[..., Tensor]) -> Any:
            return torch.compile(function, dynamic=True)

        one = compile_one or by_torch
        return cls(one(norm), one(rotate), one(gated), one(gelu_gated))

    @classmethod
    def of_kernels(cls) -> Elementwise:
        """The kernels of `kernels/layer/`, where `choose_elementwise` has chosen them."""
        return cls(_norm_by_kernel, rotate, silu_gate, gelu_gate, is_kernels=True)


def _norm_by_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norms of heads, which an attention without a rotation leaves to the layer, stay torch's."""
    return norm(x, weight, eps) if weight.dim() > 1 else rms_norm(x, weight, eps)


class Mlp(Protocol):
    """What a layer adds to each row, of the row itself."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """`[rows, hidden]` of normed rows `[rows, hidden]`; `x` is left as it is."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add what it makes of `x` to `out`, in place. Asked of those with kernels only."""


class SquaredMlp:
    """Two matrices for all rows and no gate: `down(relu(up(x)) ** 2)`."""

    __slots__ = ("_down", "_up")

    def __init__(self, weights: DenseWeights) -> None:
        self._up = Linear(weights.up, weights.up_bias)
        self._down = Linear(weights.down, weights.down_bias)

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._down(self._up(x).relu_().square_())

    def add_to(self, out: Tensor, x: Tensor) -> None:
        self._down.add_to(out, self._up(x).relu_().square_())


class DenseMlp:
    """Three matrices for all rows: `down(activation(gate(x)) * up(x))`. Two of them are one where
    the library of `kernels/cpu/` multiplies, `gate_up`, with the activation in it, and where the
    weights have them as one, `_both`."""

    __slots__ = ("_both", "_gate", "_gated", "_up", "activation", "down", "gate_up")

    def __init__(
        self, weights: DenseWeights, activation: Activation, elementwise: Elementwise
    ) -> None:
        is_silu = activation is Activation.SILU
        self.down = Linear(weights.down, weights.down_bias)
        self.activation = SILU if is_silu else GELU_TANH
        self.gate_up: PackedMatrix | None = None
        gate, up = weights.gate, weights.up
        assert gate is not None
        if elementwise.is_plain and reason_against_matrices(gate.dtype, gate.device) is None:
            biases = (weights.gate_bias, weights.up_bias)
            self.gate_up = PackedMatrix((gate, up), biases, self.activation)
            return
        self._both: Linear | None = None
        if weights.gate_up is not None:
            self._both = Linear(weights.gate_up, weights.gate_up_bias)
        else:
            self._gate, self._up = Linear(gate, weights.gate_bias), Linear(up, weights.up_bias)
        self._gated = elementwise.gated if is_silu else elementwise.gelu_gated

    def __call__(self, x: Tensor, /) -> Tensor:
        if self.gate_up is not None:
            return self.down(self.gate_up(x))
        return self.down(self._inner(x))

    def add_to(self, out: Tensor, x: Tensor) -> None:
        self.down.add_to(out, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        """The gated rows, which the last matrix multiplies."""
        if self._both is not None:
            gate, up = self._both(x).chunk(2, dim=-1)
            return self._gated(gate, up)
        return self._gated(self._gate(x), self._up(x))
