# SPDX-License-Identifier: Apache-2.0
"""CpuNetwork: a decoder whose layers are all computed in one call of the compiled library.

Between a step's embeddings and its hidden states, no Python code and no torch operator runs: norms,
products, rotation, writes to the pool, attention and activation are phases of one call. A single
thread computes a step if waking a second thread would cost more time than it saves. With 16-bit
weights, intermediate values between two products are float32; K, V and queries are rounded to the
weights' type."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernel_choice import KernelRefused
from .library import ELEMENTS, CpuLibrary, Experts, Layer, Matrix, Pass, Step, cpu_library
from .matrix import SILU, PackedMatrix, check_slots
from .paged_attention import CpuAttentionStep, reason_against
from .thresholds import worth_a_thread
from .workspace import Workspace

MAX_VIEWS = 8  # the constant MOST_VIEWS of network.h
_FEW_VECTORS = 32  # the constant FEW_VECTORS of context.h
_WRONG = {
    1: "a workspace of the size that was measured",
    2: "positions that the tables have",
    3: "wanted rows among the tokens",
}


@dataclass(frozen=True, slots=True)
class NetworkExperts:
    """A mixture of experts: for each row, the `num_chosen` experts with the highest router scores,
    weighted by the softmax of the scores."""

    router: PackedMatrix  # [experts, hidden]; a shared expert has an additional output
    gate_ups: Sequence[PackedMatrix]  # one pair for each expert
    downs: Sequence[PackedMatrix]
    num_chosen: int
    normalises: bool  # whether the weights of the chosen experts are divided by their sum


@dataclass(frozen=True, slots=True)
class NetworkLayer:
    """The weights of a layer, and the layer's part of the KV pool. Norms are `[hidden]`, and head
    norms are `[heads + kv heads, head_dim]`; None means no norm."""

    qkv: PackedMatrix  # queries, keys, values
    out: PackedMatrix
    gate_up: PackedMatrix | None  # a pair; in a layer with experts, that of the shared expert
    down: PackedMatrix | None
    attention_norm: Tensor
    head_norms: Tensor | None
    after_attention_norm: Tensor | None
    mlp_norm: Tensor
    after_mlp_norm: Tensor | None
    cos: Tensor  # [positions, head_dim // 2], with the weights' type
    sin: Tensor
    keys_and_values: Tensor  # the layer's pool: [blocks, 2, block_size, kv heads, head_dim]
    view: int = 0  # index of the layer's attention step in `steps` of `run`
    experts: NetworkExperts | None = None


class LastRows(NamedTuple):
    """The rows for which the last layer computes attention."""

    step: Step  # the attention step of the selected rows
    rows: npt.NDArray[np.int64]  # the selected rows, as indices into the tokens of the step
    wanted: npt.NDArray[np.int64]  # the wanted rows, as indices into `rows`
    starts: npt.NDArray[np.int32]  # the array that `step` points to


def last_rows(step: CpuAttentionStep, wanted: Tensor) -> LastRows | None:
    """Return, for each request, the rows from its first wanted row on. Return None, so that all
    rows are computed, if a wanted row belongs to no request. Also return None if most rows would be
    selected and the selection would not change how rows are computed; so the result of a row is the
    same, whatever rows of other requests are wanted."""
    starts, rows = step.query_starts, wanted.numpy()
    requests = np.searchsorted(starts, rows, side="right") - 1
    if len(rows) and not 0 <= requests.min() <= requests.max() < len(starts) - 1:
        return None
    first = starts[1:].astype(np.int64)
    np.minimum.at(first, requests, rows)
    last_starts = np.zeros(len(starts), np.int32)
    np.cumsum(starts[1:] - first, out=last_starts[1:])
    count = int(last_starts[-1])
    laid_down = Step.from_buffer_copy(step.laid_down)
    if 2 * count > laid_down.num_tokens:
        most = max(1, _FEW_VECTORS * laid_down.kv_heads // laid_down.heads)
        all_rows, kept_rows = np.diff(starts), np.diff(last_starts)
        becomes_few = (kept_rows > 0) & (kept_rows <= most) & (kept_rows < all_rows)
        # With few rows, the window of a request's first row determines the first key.
        if not (becomes_few & ((all_rows > most) | (laid_down.window > 0))).any():
            return None
    laid_down.query_starts, laid_down.num_tokens = last_starts.ctypes.data, count
    moved = first - last_starts[:-1]
    kept = np.repeat(moved, np.diff(last_starts)) + np.arange(count)
    return LastRows(laid_down, kept, rows - moved[requests], last_starts)


def _check_matrices(matrices: Sequence[PackedMatrix], shapes: Sequence[tuple[int, int]]) -> None:
    found = [(matrix.outs, matrix.ins) for matrix in matrices]
    if found != list(shapes):
        raise KernelRefused(f"expected matrices {list(shapes)}, got {found}")


def _matrices_of(layers: Iterable[NetworkLayer]) -> Iterator[PackedMatrix]:
    """Yield the matrices that may have adapters."""
    for layer in layers:
        yield from (layer.qkv, layer.out)
        if layer.gate_up is not None and layer.down is not None:
            yield from (layer.gate_up, layer.down)
        if layer.experts is not None:
            yield from (*layer.experts.gate_ups, *layer.experts.downs)


def _check_pair(gate_up: PackedMatrix, down: PackedMatrix, hidden: int, size: int) -> None:
    _check_matrices((gate_up, down), ((size, hidden), (hidden, size)))


class CpuNetwork:
    """A decoder over one KV pool, computed by the library. Only one thread at a time may use it."""

    def __init__(
        self,
        layers: Sequence[NetworkLayer],
        last_norm: Tensor,
        *,
        num_heads: int,
        eps: float,
        activation: int = SILU,
    ) -> None:
        """Raises KernelRefused if the library cannot compute the layers."""
        library, first = cpu_library(), layers[0]
        pool = first.keys_and_values
        kv_heads, head_dim = pool.shape[3:]
        self._dtype = dtype = first.qkv.dtype
        why = reason_against(dtype, head_dim, pool_dtype=pool.dtype)
        num_views = 1 + max(layer.view for layer in layers)
        if num_views > MAX_VIEWS:
            why = f"their layers attend in at most {MAX_VIEWS} ways, not {num_views}"
        if why is not None or not isinstance(library, CpuLibrary):
            raise KernelRefused(f"kernels of the CPU cannot run: {why}; use the plain ones")
        self._library = library
        self._hidden, self._num_views = first.qkv.ins, num_views
        qkv_size = (num_heads + 2 * kv_heads) * head_dim
        sizes = {layer.down.ins for layer in layers if layer.down is not None}
        if len(sizes) > 1 and any(size % 2 for size in sizes):
            raise KernelRefused(f"expected MLPs of one size or of even ones, got {sorted(sizes)}")
        intermediate = max(sizes, default=0)
        mixtures = [layer.experts for layer in layers if layer.experts is not None]
        expert_size = max((each.downs[0].ins for each in mixtures), default=0)
        attention_shapes = ((qkv_size, self._hidden), (self._hidden, num_heads * head_dim))
        if any(layer.keys_and_values.stride() != pool.stride()
               or layer.keys_and_values.shape != pool.shape for layer in layers):  # fmt: skip
            raise KernelRefused("expected layers whose pools have one shape and one set of strides")
        self._shape_of_pool = (dtype, pool.shape, pool.stride())
        self._kept: list[object] = [*layers]
        self._adapted = [matrix for matrix in _matrices_of(layers) if matrix.num_slots]
        self._num_slots = min((each.num_slots for each in self._adapted), default=0)
        self._num_puts = self._most_rank = 0
        self._num_mixtures = 0
        laid_down = (Layer * len(layers))()
        for to, layer in zip(laid_down, layers, strict=True):
            _check_matrices((layer.qkv, layer.out), attention_shapes)
            if layer.gate_up is not None and layer.down is not None:
                _check_pair(layer.gate_up, layer.down, self._hidden, layer.down.ins)
            elif layer.experts is None:
                raise KernelRefused("expected a layer with an MLP or experts, got neither")
            self._lay_down(to, layer)
        self._layers = laid_down
        self._positions = min(len(layer.cos) for layer in layers)
        self._last_view = layers[-1].view
        queries_end = num_heads * head_dim
        self._can_leave_queries_out = queries_end % library.panel(ELEMENTS[dtype]) == 0
        self._last_norm = self._wide(last_norm)
        self._workspace = Workspace()
        self._pass = Pass(
            layers=ctypes.addressof(laid_down),
            last_norm=self._last_norm.data_ptr(),
            num_layers=len(layers),
            num_views=num_views,
            num_positions=self._positions,
            hidden=self._hidden,
            intermediate=intermediate,
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            most_experts=max((len(each.downs) for each in mixtures), default=0),
            most_chosen=max((each.num_chosen for each in mixtures), default=0),
            expert_size=expert_size,
            activation=activation,
            element=ELEMENTS[dtype],
            worth_a_thread=worth_a_thread().network,
            eps=eps,
        )
        self._address = ctypes.addressof(self._pass)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        steps: Sequence[CpuAttentionStep],
        wanted: Tensor | None,
        states: Iterable[int] = (),
        chosen: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Write K and V of all tokens to the pool. Return the hidden states `[len(wanted), hidden]`
        after the last norm, of the rows `wanted`, or of all rows for None. `x` is `[tokens,
        hidden]`; `positions` and `wanted` are int64. `steps` has one `CpuAttentionStep`, made for
        this pool and with slots, for each view. The second value has the input `[tokens, hidden]`
        of each layer whose index is in `states`. The index after the last layer is the input of the
        last norm, for the wanted rows only. The experts of each row, the best first, are written to
        `chosen`, int32 `[layers with experts, tokens or more, num_chosen]`. With `chosen`, `wanted`
        must be None. `slots`, int32 `[tokens]`, has the adapter slot of each row, or -1 for no
        adapter. Raises ValueError for values out of bounds."""
        num_tokens = len(x)
        if (x.dtype, x.shape[1:]) != (self._dtype, (self._hidden,)) or len(
            steps
        ) != self._num_views:
            raise ValueError(
                f"expected {self._dtype} [tokens, {self._hidden}] and {self._num_views} steps, got "
                f"{x.dtype} {list(x.shape)} and {len(steps)}"
            )
        states = tuple(states)
        self._check_inputs(num_tokens, positions, steps, wanted, states)
        if chosen is not None:
            self._check_chosen(chosen, num_tokens, wanted)
        if slots is not None:
            check_slots(slots, num_tokens, self._num_slots)
        x, positions = x.contiguous(), positions.contiguous()
        num_wanted = num_tokens if wanted is None else len(wanted)
        result = torch.empty((num_wanted, self._hidden), dtype=self._dtype)
        num_layers = self.num_layers
        found = {
            layer: torch.empty((num_wanted if layer == num_layers else num_tokens, self._hidden),
                               dtype=self._dtype)
            for layer in states
        }  # fmt: skip
        if num_tokens == 0:
            return result, found
        kept = (ctypes.c_void_p * (num_layers + 1))()
        for layer, tensor in found.items():
            kept[layer] = tensor.data_ptr()
        wanted = None if wanted is None else wanted.contiguous()
        laid_down = (Step * len(steps))(*[step.laid_down for step in steps])
        last = None
        view = steps[self._last_view]
        has_one_row_each = num_tokens == view.laid_down.num_requests
        if wanted is not None and self._can_leave_queries_out and not has_one_row_each:
            last = last_rows(view, wanted)
        given, threads = self._pass, torch.get_num_threads()
        given.steps = ctypes.addressof(laid_down)
        given.x, given.result = x.data_ptr(), result.data_ptr()
        given.positions = positions.data_ptr()
        # The data_ptr of an empty tensor is null, which the library would read as all rows.
        given.wanted = None if wanted is None else wanted.data_ptr() or positions.data_ptr()
        given.last_step = None if last is None else ctypes.addressof(last.step)
        given.last_rows = None if last is None else last.rows.ctypes.data
        given.last_wanted = None if last is None else last.wanted.ctypes.data
        given.states = ctypes.addressof(kept) if found else None
        given.num_tokens, given.num_wanted = num_tokens, num_wanted
        given.slots = None if slots is None else slots.data_ptr()
        given.most_rank = 0 if slots is None else self._rank_of_adapters()
        given.chosen = None if chosen is None else chosen.data_ptr()
        given.chosen_row = 0 if chosen is None else chosen.shape[1]
        memory = self._workspace.at_least(self._library.pass_workspace(self._address, threads))
        given.workspace, given.workspace_bytes = memory.data_ptr(), memory.numel()
        wrong = self._library.run_pass(self._address, threads)
        if wrong:
            raise ValueError(f"expected {_WRONG[wrong]}, got others")
        return result, found

    def _rank_of_adapters(self) -> int:
        if self._num_puts != PackedMatrix.num_puts:
            self._num_puts = PackedMatrix.num_puts
            self._most_rank = max((each.most_rank for each in self._adapted), default=0)
        return self._most_rank

    def _check_inputs(
        self,
        num_tokens: int,
        positions: Tensor,
        steps: Sequence[CpuAttentionStep],
        wanted: Tensor | None,
        states: Sequence[int],
    ) -> None:
        """Raise ValueError for arguments with which the library would read wrong memory."""
        for name, tensor, size in (
            ("positions", positions, num_tokens),
            ("wanted", wanted, 0 if wanted is None else len(wanted)),
        ):
            if tensor is not None and (tensor.dtype != torch.int64 or tensor.shape != (size,)):
                raise ValueError(
                    f"expected {name} of torch.int64 [{size}], got {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
        expected = (*self._shape_of_pool, num_tokens, self._pass.heads, True)
        for step in steps:
            of = step.laid_down
            found = (*step.pool, of.num_tokens, of.heads, bool(of.slots or not num_tokens))
            if found != expected:
                raise ValueError(
                    "expected steps with slots, laid down over this pool for these tokens: type, "
                    f"shape and strides of the pool, tokens, heads, slots: {expected}, got {found}"
                )
        if any(not 0 <= layer <= self.num_layers for layer in states):
            raise ValueError(
                f"expected states from 0 to {self.num_layers}, the number of layers, got "
                f"{list(states)}"
            )

    def _check_chosen(self, chosen: Tensor, num_tokens: int, wanted: Tensor | None) -> None:
        layers, rows, each = chosen.shape
        is_right = (layers, each) == (self._num_mixtures, self._pass.most_chosen)
        if not is_right or rows < num_tokens or chosen.dtype != torch.int32 or wanted is not None:
            raise ValueError(
                f"expected int32 [{self._num_mixtures}, {num_tokens} or more, "
                f"{self._pass.most_chosen}] for the experts of all rows, got {chosen.dtype} "
                f"{list(chosen.shape)}, and {'all' if wanted is None else 'some'} rows"
            )

    def _lay_down(self, to: Layer, layer: NetworkLayer) -> None:
        to.qkv, to.out = layer.qkv.matrix, layer.out.matrix
        if layer.gate_up is not None and layer.down is not None:
            to.gate_up, to.down = layer.gate_up.matrix, layer.down.matrix
        if layer.experts is not None:
            experts = self._lay_down_experts(layer.experts, has_shared=layer.down is not None)
            experts.number = self._num_mixtures
            self._num_mixtures += 1
            to.experts = ctypes.addressof(experts)
        for name in (
            "attention_norm", "head_norms", "after_attention_norm", "mlp_norm", "after_mlp_norm"
        ):  # fmt: skip
            weight = getattr(layer, name)
            if weight is not None:
                wide = self._wide(weight)
                setattr(to, name, wide.data_ptr())
        for name in ("cos", "sin"):
            table = getattr(layer, name).contiguous()
            self._kept.append(table)
            setattr(to, name, table.data_ptr())
        pool = layer.keys_and_values
        to.keys = pool.data_ptr()
        to.values = to.keys + pool.stride(1) * pool.element_size()
        to.view = layer.view

    def _lay_down_experts(self, given: NetworkExperts, *, has_shared: bool) -> Experts:
        count, size = len(given.downs), given.downs[0].ins
        _check_matrices((given.router,), ((count + has_shared, self._hidden),))
        if not 1 <= given.num_chosen <= count or len(given.gate_ups) != count:
            raise KernelRefused(
                f"expected 1 to {count} experts of a row, each with two matrices, got "
                f"{given.num_chosen} of {len(given.gate_ups)} and {count}"
            )
        for gate_up, down in zip(given.gate_ups, given.downs, strict=True):
            _check_pair(gate_up, down, self._hidden, size)
        gate_ups, downs = (
            (Matrix * count)(*[each.matrix for each in matrices])
            for matrices in (given.gate_ups, given.downs)
        )
        experts = Experts(
            given.router.matrix,
            ctypes.addressof(gate_ups),
            ctypes.addressof(downs),
            num_experts=count,
            num_chosen=given.num_chosen,
            normalises=given.normalises,
            has_shared=has_shared,
        )
        self._kept += [gate_ups, downs, experts]
        return experts

    def _wide(self, weight: Tensor) -> Tensor:
        """Return a weight in the type of the sums (float64 for a float64 network, else float32),
        and keep a reference to it."""
        dtype = torch.float64 if self._dtype == torch.float64 else torch.float32
        wide = weight.to(dtype).contiguous()
        self._kept.append(wide)
        return wide
