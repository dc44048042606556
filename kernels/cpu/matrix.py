# SPDX-License-Identifier: Apache-2.0
"""Matrices that are packed for the compiled CPU library, and products with packed matrices.

The result of a row does not depend, in any bit, on other rows or on the number of threads, because
each sum is over the inputs in their order."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernel_choice import KernelRefused
from .huge_pages import memory_in_huge_pages
from .library import ELEMENTS, Adapter, CpuLibrary, Matrix, Missing, Product, cpu_library
from .thresholds import worth_a_thread
from .workspace import ResultMemory, Workspace

SILU, GELU_TANH = 0, 1
_MANY_BYTES = 8 << 20  # the least size of results whose memory is reused
_RANKS_TOGETHER = 4  # the constant RANKS_TOGETHER of low_rank.h

_OF_THREAD = threading.local()


def reason_against_matrices(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why the library cannot multiply by matrices of `dtype`, or None."""
    library = cpu_library()
    if isinstance(library, Missing):
        return library.reason
    if device.type != "cpu" or dtype not in ELEMENTS:
        return f"they multiply by float32, float64 and 16-bit types on the CPU, not {dtype}"
    return None


class PackedAdapter:
    """A packed LoRA adapter of a matrix or pair, which adds `(x @ ins.T) @ outs.T`."""

    __slots__ = ("_kept", "laid_down", "rank")

    def __init__(self, ins: Tensor, outs: Sequence[Tensor], panel: int) -> None:
        """`ins` is `[rank, ins]`, multiplied by the adapter's scaling; `outs` is one or two
        matrices `[outs, rank]`. All have the type of the sums. Ranks that are 0 for a whole panel
        of outputs are not computed."""
        num_ranks, size = ins.shape
        self.rank = rank = -(-num_ranks // _RANKS_TOGETHER) * _RANKS_TOGETHER
        padded_ins = ins.new_zeros(rank, size)
        padded_ins[:num_ranks] = ins
        count = len(outs[0])
        panels = ins.new_zeros(len(outs), -(-count // panel) * panel, rank)
        for of_matrix, given in zip(panels, outs, strict=True):
            of_matrix[:count, :num_ranks] = given
        by_panel = panels.view(len(outs), -1, panel, rank).transpose(0, 1).flatten(0, 1)
        is_used = (by_panel != 0).any(1)  # [panels, rank]
        spans = np.zeros((len(by_panel), 2), np.int32)
        for number, used in enumerate(is_used.numpy()):
            at = np.flatnonzero(used)
            if len(at):
                spans[number] = at[0], at[-1] + 1
        packed = by_panel.transpose(1, 2).contiguous()
        self._kept = (padded_ins, packed, spans)
        self.laid_down = Adapter(padded_ins.data_ptr(), packed.data_ptr(), spans.ctypes.data, rank)


class PackedMatrix:
    """A packed matrix, which computes `x @ weight.T + bias`, or a packed pair, which computes
    `activation(x @ gate.T + bias) * (x @ up.T + bias)`.

    A PackedMatrix has no reference to the original weights. Only one thread at a time may use a
    PackedMatrix."""

    num_puts = 0  # calls of `put_adapter` of all matrices

    def __init__(
        self,
        weights: tuple[Tensor] | tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, ...] = (None, None),
        activation: int = SILU,
    ) -> None:
        """`weights` are `[outs, ins]`, all of the same shape and type; `biases` are `[outs]` or
        None. Raises KernelRefused for other weights, and if the library cannot be used."""
        first, dtype = weights[0], weights[0].dtype
        why = reason_against_matrices(dtype, first.device)
        library = cpu_library()
        if why is not None or not isinstance(library, CpuLibrary):
            raise KernelRefused(f"kernels of the CPU cannot run: {why}; use the plain ones")
        is_alike = all((w.shape, w.dtype) == (first.shape, dtype) for w in weights)
        if first.dim() != 2 or not is_alike or 0 in first.shape:
            shapes = [tuple(weight.shape) for weight in weights]
            raise KernelRefused(f"expected matrices of one shape and type, not empty, got {shapes}")
        if activation not in (SILU, GELU_TANH):  # the library would compute SiLU
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
        self._adapters: Any = None  # an array of Adapter, by slot
        self._in_slots: list[PackedAdapter | None] = []
        self.most_rank = 0  # the largest rank of the adapters in the slots

    def allow_adapters(self, num_slots: int) -> None:
        """Allow products to add an adapter to each row, out of `num_slots` slots. Must be called
        before a CpuNetwork copies `matrix`."""
        self._adapters = (Adapter * num_slots)()
        self._in_slots = [None] * num_slots
        self.matrix.adapters = ctypes.addressof(self._adapters)
        self._product.matrix = self.matrix

    def pack_adapter(self, ins: Tensor, outs: Sequence[Tensor]) -> PackedAdapter:
        """Return an adapter, packed for this matrix; any thread may call the method. `ins` is
        `[rank, ins]`, and `outs` has a matrix `[outs, rank]` for each matrix of this object."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return PackedAdapter(ins.to(wide), [each.to(wide) for each in outs], self._panel)

    def put_adapter(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Set the adapter of a slot, or empty the slot if `adapter` is None, for all later
        products."""
        self._in_slots[slot] = adapter
        self._adapters[slot] = Adapter() if adapter is None else adapter.laid_down
        ranks = [each.rank for each in self._in_slots if each is not None]
        self.most_rank = max(ranks, default=0)
        PackedMatrix.num_puts += 1

    @property
    def num_slots(self) -> int:
        """The number of slots for adapters; 0 before `allow_adapters`."""
        return len(self._in_slots)

    def __call__(
        self,
        x: Tensor,
        wanted: npt.NDArray[np.uint32] | None = None,
        *,
        is_wide: bool = False,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Return the product `[rows, outs]` for `x` `[rows, ins]`. `wanted` has a bit for each
        output i: bit `i % 32` of word `i // 32`. An output whose bit is 0 may be 0 instead of its
        value. With `is_wide`, a 16-bit result is returned as float32, with values rounded to 16
        bits. A pair accepts neither `wanted` nor `is_wide`. `slots`, int32 `[rows]`, has the
        adapter slot of each row, or -1 for no adapter."""
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
            wanted = np.ascontiguousarray(wanted)  # must live until the product has ended
            out = torch.zeros(shape, dtype=dtype)
            product.wanted, product.wanted_words = wanted.ctypes.data, len(wanted)
        product.x, product.out = x.data_ptr(), out.data_ptr()
        product.rows, product.x_row, product.out_row = len(x), x.stride(0), self.outs
        product.slots = None
        if slots is not None:
            check_slots(slots, len(x), len(self._in_slots))
            product.slots, product.most_rank = slots.data_ptr(), self.most_rank
        memory = _workspace().at_least(self._library.product_workspace(self._address, threads))
        product.workspace, product.workspace_bytes = memory.data_ptr(), memory.numel()
        if self._library.multiply(self._address, threads):
            raise RuntimeError("the workspace of a product was measured too small")
        return out

    def gather_rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` (int64 `[n]`) of the matrix, unpacked, as `[n, ins]`; the matrix
        must not be a pair. With this method, one packed matrix serves as embedding and as output
        matrix. Each element takes some 6 ns, because the elements of a row are not adjacent in the
        packed order. Raises IndexError for ids outside the matrix."""
        if self.matrix.is_pair:
            raise ValueError("expected one matrix to look rows up in, got a pair")
        # Panels have padding after the last row, and a negative id would index from the end. One
        # comparison finds ids that are too large or negative: as unsigned numbers, negative ids are
        # large.
        if len(ids) and (last := int(ids.numpy().view(np.uint64).max())) >= self.outs:
            wrong = last if last < 2**63 else last - 2**64
            raise IndexError(f"expected rows from 0 to {self.outs - 1}, got {wrong}")
        depth = -(-self.ins // self._together)
        panels = self._packed.view(-1, depth, self._panel, self._together)
        return panels[ids // self._panel, :, ids % self._panel].flatten(1)[:, : self.ins]


def check_slots(slots: Tensor, num_rows: int, num_slots: int) -> None:
    """Raise ValueError for slots of adapters with which the library would read wrong memory."""
    if (slots.dtype, slots.shape) != (torch.int32, (num_rows,)) or not slots.is_contiguous():
        raise ValueError(
            f"expected the slots of adapters as int32 [{num_rows}], got {slots.dtype} "
            f"{list(slots.shape)}"
        )
    if num_rows and not -1 <= int(slots.min()) <= int(slots.max()) < num_slots:
        raise ValueError(f"expected slots of adapters from -1 to {num_slots - 1}, got others")


def _workspace() -> Workspace:
    """Return the workspace for the products of the calling thread."""
    found: Workspace | None = getattr(_OF_THREAD, "workspace", None)
    if found is None:
        found = _OF_THREAD.workspace = Workspace()
    return found


def _padded(
    weights: tuple[Any, ...], biases: tuple[Tensor | None, ...], padded: int, panel: int
) -> Tensor | None:
    """Return the biases, padded with zeros and ordered like the packed weights; None if no matrix
    has a bias. The biases are float64 for float64 weights, else float32."""
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
