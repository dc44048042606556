# SPDX-License-Identifier: Apache-2.0
"""The section that compares decode and prefill with other projects' kernels, on the same tensors.

Peers are imported from the installed packages or from the folder of `--peers`, which comes last on
the path. No peer is required: a note is added if a peer lacks a case, gives a wrong result or
fails. A peer's versions differ in their argument names, so a call passes only the arguments that
the function has. The section runs last, because a kernel may break the device's context."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from statistics import geometric_mean
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import section
from ..plots import draw_peers
from . import decode, prefill
from .cases import Batch, Case, check_attention, decode_case, make_batch, time_checked

NAME = "peers"
MAX_FAULTS = 3  # per peer; each fault may take seconds of compilation
PeerLaunch = Callable[[int], Tensor]  # layer index → attention over the layer


class PeerRefused(Exception):
    """A peer is not installed or has no kernel for a case; the message says why."""


class Peer(Protocol):
    """The attention of a project, which `__init__` imports; raises whatever the import raises."""

    name: str
    remark: str  # a note for readers of the peer's figures

    def __init__(self) -> None: ...

    def prepare(self, batch: Batch) -> PeerLaunch:
        """Do the work that a batch needs once, and return the launch that is timed. Raises
        PeerRefused if the peer has no kernel for the batch, and whatever the peer raises."""
        ...


def import_first(modules: Sequence[str], name: str) -> Any:
    """Return `name` from the first of `modules` that has it, because modules move between versions.
    Raises PeerRefused with the reason for each module, or whatever else an import raises."""
    reasons = []
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{module}: {error}")
    raise PeerRefused("; ".join(reasons))


def known_arguments(
    function: Callable[..., Any], wanted: dict[str, Any], needed: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the arguments of `wanted` that `function` has, or all if it has `**kwargs`. Raises
    PeerRefused if `function` lacks an argument of `needed`."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return wanted
    if missing := set(needed) - parameters.keys():
        raise PeerRefused(f"this version takes no {', '.join(sorted(missing))}")
    return {name: value for name, value in wanted.items() if name in parameters}


def planes(batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """Return views of K and V of a layer, `[num_blocks, block_size, kv heads, head_dim]`."""
    key, value = batch.layers[layer].unbind(1)
    return key, value


def refuse_float8(batch: Batch) -> None:
    """Raise PeerRefused for a float8 pool: peers need one scale for a whole tensor, and StrataKV's
    pools have a scale for each head or token."""
    if batch.case.scales:
        raise PeerRefused("a float8 pool with other scales than this peer's")


def only_tensor(answer: Any) -> Tensor:
    """Return the attention in a peer's result, which may be a tuple with softmax sums."""
    first = answer[0] if isinstance(answer, tuple) else answer
    if not isinstance(first, torch.Tensor):
        raise PeerRefused(f"expected a tensor, got {type(first).__name__}")
    return first


VLLM_MODULES = (
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.attention.ops.triton_unified_attention",
)
VLLM_NEEDED = {"cu_seqlens_q", "seqused_k", "block_table", "softmax_scale"}
# The constants of vLLM's engine, which splits contexts of a decode into 16 parts if fewer than 128
# programs would run. A version without arguments for buffers allocates buffers itself.
SEGMENTS = 16
FEWEST_PROGRAMS = 128


class VllmTriton:
    """vLLM's Triton attention, which reads StrataKV's pool through views of K and V."""

    name = "peer_triton"
    remark = "vLLM's Triton unified_attention on views of our pool, split as its engine does"

    def __init__(self) -> None:
        self._attend = import_first(VLLM_MODULES, "unified_attention")

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        out = torch.empty_like(batch.q)
        arguments = {
            "q": batch.q,
            "out": out,
            "cu_seqlens_q": batch.query_starts,
            "max_seqlen_q": max(new for new, _ in case.chunks),
            "seqused_k": batch.seq_lens,
            "max_seqlen_k": max(case.lengths),
            "softmax_scale": case.scale,
            "causal": True,
            "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
            "block_table": batch.block_tables,
            "softcap": case.softcap or 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            **_segment_buffers(batch),
        }
        passed = known_arguments(self._attend, arguments, VLLM_NEEDED)

        def launch(layer: int) -> Tensor:
            key, value = planes(batch, layer)
            self._attend(k=key, v=value, **passed)
            return out

        return launch


def _segment_buffers(batch: Batch) -> dict[str, object]:
    case = batch.case
    most = max(1, FEWEST_PROGRAMS // case.kv_heads)
    rows = max(most, len(batch.seq_lens))
    padded = 1 << (case.head_dim - 1).bit_length()
    shape = (rows, case.heads, SEGMENTS)
    return {
        "seq_threshold_3D": most,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": batch.q.new_empty((*shape, padded), dtype=torch.float32),
        "softmax_segm_max": batch.q.new_empty(shape, dtype=torch.float32),
        "softmax_segm_expsum": batch.q.new_empty(shape, dtype=torch.float32),
    }


FLASH_MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
FLASH_NEEDED = {"cache_seqlens", "page_table", "cu_seqlens_q"}


class FlashAttention3:
    """FlashAttention-3, which reads StrataKV's pool through views of K and V."""

    name = "fa3"
    remark = "FlashAttention-3, flash_attn_with_kvcache on views of our pool"

    def __init__(self) -> None:
        self._attend = import_first(FLASH_MODULES, "flash_attn_with_kvcache")

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        arguments = {
            "cache_seqlens": batch.seq_lens,
            "page_table": batch.block_tables,
            "softmax_scale": case.scale,
            "causal": True,
            "window_size": (-1, -1) if case.window is None else (case.window - 1, 0),
            "softcap": case.softcap or 0.0,
        }
        q = batch.q
        if case.is_decode:
            q = q[:, None]
        else:
            arguments["cu_seqlens_q"] = batch.query_starts
            arguments["max_seqlen_q"] = max(new for new, _ in case.chunks)
        passed = known_arguments(self._attend, arguments, FLASH_NEEDED & set(arguments))
        return lambda layer: only_tensor(self._attend(q, *planes(batch, layer), **passed))


class TorchAttention:
    """Torch's attention, for requests of equal lengths without window and soft cap."""

    name = "torch"
    remark = (
        "scaled_dot_product_attention on K and V that lie contiguous already: it reads no block "
        "table and does less work than the others"
    )

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        if case.window is not None or case.softcap is not None:
            raise PeerRefused("it has neither a window nor a soft cap")
        if len(set(case.chunks)) != 1:
            raise PeerRefused("it takes requests of one length only")
        from torch.nn.attention.bias import causal_lower_right  # takes a second: torch's compiler

        requests, (new, before) = len(case.chunks), case.chunks[0]
        # [requests, heads, tokens, head_dim]
        q = batch.q.view(requests, new, case.heads, case.head_dim).transpose(1, 2)
        gathered = [_gather(batch, layer) for layer in range(len(batch.layers))]
        mask = None if case.is_decode else causal_lower_right(new, new + before)
        options: Any = {"attn_mask": mask, "scale": case.scale, "enable_gqa": True}
        return lambda layer: scaled_dot_product_attention(q, *gathered[layer], **options).transpose(
            1, 2
        )


def _gather(batch: Batch, layer: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer, each contiguous: `[requests, kv heads, tokens, head_dim]`."""
    length, blocks = batch.case.lengths[0], batch.block_tables.long()
    key, value = (
        plane[blocks].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()
        for plane in planes(batch, layer)
    )
    return key, value


WORKSPACE_BYTES = 384 * 2**20
TENSOR_CORE_GROUP = 4  # the least group size for which FlashInfer recommends tensor cores


class FlashInfer:
    """FlashInfer's attention, which reads StrataKV's pool through views of K and V."""

    name = "flashinfer"
    remark = "FlashInfer's paged wrappers on views of our pool; its plan is not timed"

    def __init__(self) -> None:
        self._decode = import_first(("flashinfer",), "BatchDecodeWithPagedKVCacheWrapper")
        self._prefill = import_first(("flashinfer",), "BatchPrefillWithPagedKVCacheWrapper")

    def prepare(self, batch: Batch) -> PeerLaunch:
        refuse_float8(batch)
        case = batch.case
        space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=batch.q.device)
        options = {
            "sm_scale": case.scale,
            "window_left": -1 if case.window is None else case.window - 1,
            "logits_soft_cap": case.softcap,
            "q_data_type": case.dtype,
            "kv_data_type": case.dtype,
        }
        shape = (case.heads, case.kv_heads, case.head_dim, case.block_size)
        if case.is_decode:
            cores = known_arguments(
                self._decode, {"use_tensor_cores": case.group >= TENSOR_CORE_GROUP}
            )
            wrapper = self._decode(space, "NHD", **cores)
            passed = known_arguments(wrapper.plan, options)
            wrapper.plan(*_pages(batch), *shape, **passed)
        else:
            wrapper = self._prefill(space, "NHD")
            passed = known_arguments(wrapper.plan, {**options, "causal": True})
            wrapper.plan(batch.query_starts, *_pages(batch), *shape, **passed)
        return lambda layer: only_tensor(wrapper.run(batch.q, planes(batch, layer)))


def _pages(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the start of each request in the page ids, all page ids, and the tokens in each
    request's last page."""
    size = batch.case.block_size
    widths = [-(-length // size) for length in batch.case.lengths]
    starts = [0, *accumulate(widths)]
    ids = [row[:width] for row, width in zip(batch.block_tables, widths, strict=True)]
    fill = [(length - 1) % size + 1 for length in batch.case.lengths]
    integers = partial(torch.tensor, dtype=torch.int32, device=batch.q.device)
    return integers(starts), torch.cat(ids), integers(fill)


# FlashInfer is last, because its compilation may take minutes.
PEERS: tuple[type[Peer], ...] = (VllmTriton, FlashAttention3, TorchAttention, FlashInfer)


def choose_cases(place: section.Place) -> list[Case]:
    """Return the targets' cases in bf16, first prefill, for which the targets are."""
    if place.is_rehearsal:
        return [*prefill.choose_cases(place)[:2], *decode.choose_cases(place)[:2]]
    grid = [decode_case(name, requests, context) for name, requests, context in decode.GRID]
    if place.is_quick:
        return [*prefill.grid_cases(), *(c for c in grid if c.name in ("1k x 1", "8k x 64"))]
    return [*prefill.grid_cases(), Case(name="mixed", chunks=prefill.MIXED), *grid]


def run(place: section.Place, results: section.Results) -> None:
    """Measure StrataKV's kernels, then all peers. Raises SectionOver, WrongResult."""
    for name in measure(place, results, NAME, choose_cases(place), PEERS):
        set_ratios(results, name)


def measure(
    place: section.Place,
    results: section.Results,
    title: str,
    cases: Sequence[Case],
    kinds: Sequence[type[Peer]],
) -> Iterator[str]:
    """Add rows to section `title`: StrataKV's seconds for every case, then one peer after the
    other. Yield a peer's name after each of its cases. Raises SectionOver, WrongResult."""
    rows: dict[str, section.Row] = {}
    expected: dict[str, Tensor] = {}
    rounds = place.choose(7, 5, 3)

    def measure_ours(case: Case) -> None:
        batch = make_batch(place, case)
        expected[case.name] = batch.reference()
        seconds = time_checked(place, batch, expected[case.name], rounds=rounds).median
        rows[case.name] = {**case.describe(), "seconds": seconds, "peers": {}}
        rows[case.name]["kind"] = decode.NAME if case.is_decode else prefill.NAME
        results.add_row(title, rows[case.name])

    section.run_cases(place, results, title, cases, measure_ours)
    measured = [case for case in cases if case.name in rows]
    for peer in find_peers(place, results, title, kinds):
        faults = 0
        for case in measured:
            place.check_time()
            try:
                seconds = time_peer(place, case, peer, expected[case.name], rounds)
            except PeerRefused as refused:
                results.add_note(title, f"{peer.name}, {case.name}: {refused}")
            except section.SectionOver:
                raise
            except Exception as error:  # noqa: BLE001 - no fault of a peer's is one of ours
                results.add_note(title, f"{peer.name}, {case.name}: {section.one_line(error)}")
                check_device(place, peer)
                faults += 1
            else:
                rows[case.name]["peers"][peer.name] = seconds
                yield peer.name
            place.release_memory()
            if faults == MAX_FAULTS:
                results.add_note(title, f"{peer.name}: left out after {faults} faults")
                break


def find_peers(
    place: section.Place, results: section.Results, title: str, kinds: Sequence[type[Peer]]
) -> list[Peer]:
    """Return the peers that can be imported; add a note for each. The folder of `--peers` stays on
    the path, because its modules may later import more modules of the folder."""
    folder = None if place.peers is None else str(place.peers.resolve())
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    found = []
    for kind in kinds:
        try:
            peer = kind()
        except PeerRefused as refused:
            results.add_note(title, f"{kind.name}: not measured, {refused}")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code runs when imported
            results.add_note(title, f"{kind.name}: not measured, {section.one_line(error)}")
        else:
            found.append(peer)
            results.add_note(title, f"{peer.name}: {peer.remark}")
    return found


def time_peer(place: section.Place, case: Case, peer: Peer, expected: Tensor, rounds: int) -> float:
    """Return the seconds of a launch of a peer, on tensors equal to those of StrataKV's kernel.
    Raises whatever the peer raises."""
    batch: Batch = make_batch(place, case)
    launch = peer.prepare(batch)
    check_attention(f"{peer.name}, {case.name}", launch(0).reshape(expected.shape), expected)
    launches = [partial(launch, layer) for layer in range(len(batch.layers))]
    return section.time_launches(place, launches, rounds=rounds).median


def check_device(place: section.Place, peer: Peer) -> None:
    """Check the device after a peer failed. Raises RuntimeError if the device is unusable."""
    try:
        place.synchronise()
    except RuntimeError as error:
        raise RuntimeError(
            f"{peer.name} left the device unusable ({section.one_line(error)}); "
            "leave it out of the folder of --peers"
        ) from error


def set_ratios(results: section.Results, name: str) -> None:
    """Record the geometric mean of the peer's seconds over the kernel's, for decode and prefill."""
    rows = [row for row in results.rows(NAME) if name in row["peers"]]
    in_prefill = [row for row in rows if row["case"] in prefill.GRID]
    in_decode = [row for row in rows if row["kind"] == decode.NAME]
    for kind, of_kind in ((prefill.NAME, in_prefill), (decode.NAME, in_decode)):
        if of_kind:
            ratios = [row["peers"][name] / row["seconds"] for row in of_kind]
            results.set_ratio(f"{kind}_over_{name}", geometric_mean(ratios))


SECTION = section.Section(
    NAME,
    "Peers",
    run,
    draw_peers,
    (
        section.Target(
            "prefill_over_peer_triton", "prefill, times faster than vLLM's Triton", least=2.0
        ),
        section.Target("prefill_over_fa3", "prefill over FlashAttention-3", least=0.70),
    ),
)
