# SPDX-License-Identifier: Apache-2.0
"""Matrices that are packed in the compiled library's order, and products with them.

The bits of a row do not depend on the other rows or on the number of threads, because sums always
run over the inputs in order."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernel_choice import KernelRefused
from .huge_pages import memory_in_huge_pages
from .library import ELEMENTS, CpuLibrary, Matrix, Missing, Product, cpu_library
from .thresholds import worth_a_thread
from .workspace import ResultMemory, Workspace

SILU, GELU_TANH = 0, 1
_MANY_BYTES = 8 << 20  # of results, such as the logits of many requests

_OF_THREAD = threading.local()


def reason_against_matrices(dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why the library cannot multiply by such matrices, or None."""
    library = cpu_library()
    if isinstance(library, Missing):
        return library.reason
    if device.type != "cpu" or dtype not in ELEMENTS:
        return f"they multiply by float32, float64 and 16-bit types on the CPU, not {dtype}"
    return None


class PackedMatrix:
    """A packed matrix: `x @ weight.T + bias`, or for a pair `activation(x @ gate.T + bias) * (x @
    up.T + bias)`.

    The object keeps no reference to the original weights. Only one thread at a time may use a
    matrix."""

    def __init__(
        self,
        weights: tuple[Tensor] | tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, ...] = (None, None),
        activation: int = SILU,
    ) -> None:
        """Weights are `[outs, ins]`, all of the same shape and type; biases are `[outs]` or None.
        Raises KernelRefused for other weights, and if the library cannot be used."""
        first, dtype = weights[0], weights[0].dtype
        why = reason_against_matrices(dtype, first.device)
        library = cpu_library()
        if why is not None or not isinstance(library, CpuLibrary):
            raise KernelRefused(f"kernels of the CPU cannot run: {why}; use the plain ones")
        is_alike = all((w.shape, w.dtype) == (first.shape, dtype) for w in weights)
        if first.dim() != 2 or not is_alike or 0 in first.shape:
            shapes = [tuple(weight.shape) for weight in weights]
            raise KernelRefused(f"expected matrices of one shape and type, not empty, got {shapes}")
        if activation not in (SILU, GELU_TANH):  # the library takes all others for SiLU
            raise ValueError(f"expected activation {SILU} or {GELU_TANH}, got {activation}")
        self._library = library
        self.dtype, (self.outs, self.ins) = dtype, first.shape
        element = ELEMENTS[dtype]
        panel, self._together = library.panel(element), library.together(element)
        self._panel = panel
        padded = -(-self.outs // panel) * panel
        depth = -(-self.ins // self._together) * self._together
        count = padded * depth * len(weights)
        self._packed = memory_in_huge_pages(count * dtype.itemsize).view(dtype)
        self._bias = _padded(weights, biases, padded, panel)
        self.matrix = Matrix(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.ins,
            self.outs,
            len(weights) - 1,
        )
        address = ctypes.addressof(self.matrix)
        for number, weight in enumerate(weights):
            weight = weight if weight.stride(1) == 1 else weight.contiguous()
            library.pack(weight.data_ptr(), weight.stride(0), address, number, element)
        self._product = Product(
            activation=activation,
            element=element,
            matrix=self.matrix,
            worth_a_thread=worth_a_thread().product,
        )
        self._address = ctypes.addressof(self._product)
        self._results = ResultMemory()

    def __call__(
        self, x: Tensor, wanted: npt.NDArray[np.uint32] | None = None, *, is_wide: bool = False
    ) -> Tensor:
        """Compute `[rows, outs]` from `[rows, ins]`. `wanted` has a bit for each output i: bit `i %
        32` of word `i // 32`. Outputs whose bit is 0 may be skipped; they are then 0. With
        `is_wide`, results of 16-bit types are returned as float32 that is rounded to 16 bits. A
        pair accepts neither `wanted` nor `is_wide`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        if x.dim() != 2 or x.shape[1] != self.ins or x.dtype != self.dtype:
            raise ValueError(f"expected {self.dtype} [rows, {self.ins}], got {x.dtype} {x.shape}")
        product, threads = self._product, torch.get_num_threads()
        shape, dtype = (len(x), self.outs), self.dtype
        if is_wide and not self.matrix.is_pair:
            dtype = torch.promote_types(dtype, torch.float32)
        product.is_wide = dtype != self.dtype
        if wanted is None:
            if (size := math.prod(shape) * dtype.itemsize) < _MANY_BYTES:
                out = torch.empty(shape, dtype=dtype)
            else:
                out = self._results.lend(size).view(dtype).view(shape)
            product.wanted, product.wanted_words = None, 0
        else:
            if self.matrix.is_pair or wanted.ndim != 1 or wanted.dtype != np.uint32:
                raise ValueError(
                    "expected uint32 words [words] for the outputs of one matrix, got "
                    f"{wanted.dtype} {wanted.shape}{' for a pair' * self.matrix.is_pair}"
                )
            wanted = np.ascontiguousarray(wanted)  # lives until the product has ended
            out = torch.zeros(shape, dtype=dtype)
            product.wanted, product.wanted_words = wanted.ctypes.data, len(wanted)
        product.x, product.out = x.data_ptr(), out.data_ptr()
        product.rows, product.x_row, product.out_row = len(x), x.stride(0), self.outs
        memory = _workspace().at_least(self._library.product_workspace(self._address, threads))
        product.workspace, product.workspace_bytes = memory.data_ptr(), memory.numel()
        if self._library.multiply(self._address, threads):
            raise RuntimeError("the workspace of a product was measured too small")
        return out

    def gather_rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` (int64 `[n]`) of the matrix, unpacked, as `[n, ins]`. A pair has no
        such rows. With this method, one matrix can serve as embedding and as output matrix without
        a second copy. Each element takes some 6 ns, because the elements of a row are not adjacent
        in the packed order. Raises IndexError for ids outside the matrix."""
        if self.matrix.is_pair:
            raise ValueError("expected one matrix to look rows up in, got a pair")
        # The panels have padding behind the last row, and a negative id would count from their end.
        # One comparison finds both, because a negative id is large as an unsigned number.
        if len(ids) and (last := int(ids.numpy().view(np.uint64).max())) >= self.outs:
            wrong = last if last < 2**63 else last - 2**64
            raise IndexError(f"expected rows from 0 to {self.outs - 1}, got {wrong}")
        depth = -(-self.ins // self._together)
        panels = self._packed.view(-1, depth, self._panel, self._together)
        return panels[ids // self._panel, :, ids % self._panel].flatten(1)[:, : self.ins]


def _workspace() -> Workspace:
    """Return the workspace for the products of the calling thread."""
    found: Workspace | None = getattr(_OF_THREAD, "workspace", None)
    if found is None:
        found = _OF_THREAD.workspace = Workspace()
    return found


def _padded(
    weights: tuple[Any, ...], biases: tuple[Tensor | None, ...], padded: int, panel: int
) -> Tensor | None:
    """Return the biases in the order of the packed weights, padded with zeros; None if no matrix
    has a bias. The type is that of the sums: float64 for float64 weights, else float32."""
    given = biases[: len(weights)]
    if all(bias is None for bias in given):
        return None
    outs, dtype = len(weights[0]), weights[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = torch.zeros(len(weights), padded, dtype=wide)
    for row, bias in zip(made, given, strict=True):
        if bias is not None:
            row[:outs] = bias
    return made.view(len(weights), -1, panel).transpose(0, 1).contiguous().view(-1)
