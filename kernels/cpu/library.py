# SPDX-License-Identifier: Apache-2.0
"""The compiled library for CPUs. The module finds the library, decides whether the library can be
used, and binds the library's functions.

`setup.py` builds the library into this folder. Its functions take only addresses and numbers, so
one build works with all versions of Python and torch. The library runs on torch's OpenMP threads,
by torch's own function. With two thread pools, each pool would wait until the threads of the other
pool stop spinning.

The environment variable STRATAKV_CPU_KERNELS selects the variant, `avx2`, `avx512` or
`avx512_bf16`, or `none` for no library. If the variable is not set, the variant is the last of the
three that the processor supports. `avx512_bf16` is like `avx512`, but rounds the inputs that are
multiplied by bfloat16 weights to bfloat16."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FILE_NAME = "libstratakv_cpu.so"
ABI = 10  # STRATAKV_ABI of step.h
VARIABLE = "STRATAKV_CPU_KERNELS"
# The offset of the section table, which linkers write last, and the size and number of its entries.
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
AUTO, NONE = "auto", "none"
VARIANTS = ("avx2", "avx512", "avx512_bf16")  # the index is the variant's number in the library
ELEMENTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_FACTS = ("abi", "step_bytes", "pass_bytes", "runs")
_REBUILD = "install again where there is a C++ compiler"


class Step(ctypes.Structure):
    """The C structure `Step` of `step.h`: the arguments of an attention step."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in (
            "q", "out", "k", "v", "slots", "keys", "values",
            "tables", "seq_lens", "query_starts", "workspace",
        )],
        *[(name, ctypes.c_int64) for name in (
            "workspace_bytes", "num_tokens", "num_requests", "table_stride",
            "q_row", "q_head", "out_row", "out_head", "k_row", "k_head", "v_row", "v_head",
            "block_stride", "token_stride", "head_stride", "num_blocks", "block_size",
            "heads", "kv_heads", "head_dim", "window",
        )],
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("element", ctypes.c_int64),
        ("worth_a_thread", ctypes.c_int64),
    )  # fmt: skip


class Adapter(ctypes.Structure):
    """The C structure `Adapter` of `step.h`: a LoRA adapter of one matrix."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("ins", "outs", "spans")],
        ("rank", ctypes.c_int64),
    )


class Matrix(ctypes.Structure):
    """The C structure `Matrix` of `step.h`: a packed matrix."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("ins", "outs", "is_pair")],
        ("adapters", ctypes.c_void_p),
    )


class Product(ctypes.Structure):
    """The C structure `Product` of `step.h`: the arguments of a matrix product."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("x", "out", "workspace")],
        *[(name, ctypes.c_int64) for name in (
            "workspace_bytes", "rows", "x_row", "out_row", "activation", "element", "is_wide",
        )],
        ("wanted", ctypes.c_void_p),
        ("wanted_words", ctypes.c_int64),
        ("worth_a_thread", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("most_rank", ctypes.c_int64),
        ("matrix", Matrix),
    )  # fmt: skip


class Experts(ctypes.Structure):
    """The C structure `Experts` of `step.h`: a mixture of experts."""

    _fields_ = (
        ("router", Matrix),
        *[(name, ctypes.c_void_p) for name in ("gate_ups", "downs")],
        *[(name, ctypes.c_int64) for name in (
            "num_experts", "num_chosen", "normalises", "has_shared", "number",
        )],
    )  # fmt: skip


class Layer(ctypes.Structure):
    """The C structure `LayerWeights` of `step.h`: the weights of a layer."""

    _fields_ = (
        *[(name, Matrix) for name in ("qkv", "out", "gate_up", "down")],
        *[(name, ctypes.c_void_p) for name in (
            "experts", "attention_norm", "head_norms", "after_attention_norm", "mlp_norm",
            "after_mlp_norm", "cos", "sin", "keys", "values",
        )],
        ("view", ctypes.c_int64),
    )  # fmt: skip


class Pass(ctypes.Structure):
    """The C structure `Pass` of `step.h`: the arguments of a forward pass."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in (
            "layers", "steps", "x", "result", "positions", "wanted", "last_step", "last_rows",
            "last_wanted", "states", "chosen",
        )],
        ("chosen_row", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("slots", "last_norm", "workspace")],
        *[(name, ctypes.c_int64) for name in (
            "workspace_bytes", "num_layers", "num_views", "num_tokens", "num_wanted",
            "num_positions", "hidden", "intermediate", "heads", "kv_heads", "head_dim",
            "most_experts", "most_chosen", "expert_size", "most_rank", "activation", "element",
            "worth_a_thread",
        )],
        ("eps", ctypes.c_double),
    )  # fmt: skip


_OF_A_PASS = (Adapter, Product, Experts, Layer, Pass)


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The functions of one variant of the library. `lanes` is the number of float32 elements in one
    of the variant's vectors."""

    variant: str
    lanes: int
    check: Callable[[Any], int]  # a Step -> 0, or the number of a wrong argument
    workspace_bytes: Callable[[Any, int], int]  # a Step, threads -> bytes
    attend: Callable[[Any, int], int]  # a Step, threads -> 1 if the workspace is too small, else 0
    panel: Callable[[int], int]  # element type -> number of outputs that are packed together
    together: Callable[[int], int]  # element type -> number of inputs that are packed together
    pack: Callable[[int, int, Any, int, int], int]  # weight, stride, Matrix, index in pair, type
    product_workspace: Callable[[Any, int], int]  # a Product, threads -> bytes
    multiply: Callable[[Any, int], int]  # as `attend`
    pass_workspace: Callable[[Any, int], int]  # a Pass, threads -> bytes
    run_pass: Callable[[Any, int], int]  # as `attend`; 2 for a wrong position, 3 for a wrong row
    # float32 logits, their stride, tokens; words, words per row; indices or None, rows
    ban: Callable[[int, int, int, int, int, int | None, int], int]
    take_pages: Callable[[int, int, Any], int]  # memory, bytes, address of an int64 that stops it
    wake: Callable[[None, int], int]  # None, threads -> nanoseconds until all threads run


@dataclass(frozen=True, slots=True)
class Missing:
    """The result of `cpu_library` if the library cannot be used: the reason."""

    reason: str


@functools.cache
def cpu_library() -> CpuLibrary | Missing:
    """Return the library, which is opened and logged once per process."""
    wanted = os.environ.get(VARIABLE, AUTO)
    found = open_library(Path(__file__).with_name(FILE_NAME), wanted)
    if isinstance(found, Missing):
        level = logging.INFO if wanted in (AUTO, NONE) else logging.WARNING
        logger.log(
            level, "attention on the CPU by torch, without compiled kernels: %s", found.reason
        )
    else:
        logger.info("attention on the CPU by kernels for %s", found.variant)
    return found


def open_library(path: Path, wanted: str = AUTO) -> CpuLibrary | Missing:
    """Open the library at `path` in the `wanted` variant: `auto`, one of VARIANTS or `none`.
    Returns Missing, and raises no error, if the file or the variant cannot be used."""
    if wanted not in (AUTO, NONE, *VARIANTS):
        names = ", ".join((AUTO, *VARIANTS, NONE))
        return Missing(f"{VARIABLE} takes {names}, not {wanted!r}")
    if wanted == NONE:
        return Missing(f"{VARIABLE} says {NONE}")
    if not path.exists():
        return Missing(f"they were not built; {_REBUILD}")
    try:
        if _is_cut(path):
            return Missing(f"{path} cannot be used (its end is missing); {_REBUILD}")
        library = ctypes.CDLL(str(path))
        functions = {name: _function(library, name) for name in _FACTS}
        abi = functions["abi"]()
        sizes = (functions["step_bytes"](), functions["pass_bytes"]())
    except (OSError, AttributeError) as error:
        return Missing(f"{path} cannot be used ({error}); {_REBUILD}")
    if (abi, *sizes) != (ABI, ctypes.sizeof(Step), sum(map(ctypes.sizeof, _OF_A_PASS))):
        return Missing(f"{path} is of another version ({abi}, and this is {ABI}); {_REBUILD}")
    runs = [name for number, name in enumerate(VARIANTS) if functions["runs"](number)]
    if not runs:
        return Missing("this processor has no AVX2 with FMA and F16C")
    if wanted not in (AUTO, *runs):
        return Missing(f"{VARIABLE} says {wanted}, and this processor runs {', '.join(runs)}")
    return _variant(library, runs[-1] if wanted == AUTO else wanted)


def _is_cut(path: Path) -> bool:
    """Whether the end of a 64-bit ELF file is missing, for example after an interrupted copy. The
    loader would not detect a missing end, and an access to it would kill the process."""
    with path.open("rb") as file:
        head = file.read(_ELF_HEADER.size)
    if len(head) < _ELF_HEADER.size:
        return True
    table, size, count = _ELF_HEADER.unpack(head)
    return path.stat().st_size < int(table) + int(size) * int(count)


def _variant(library: ctypes.CDLL, variant: str) -> CpuLibrary:
    number, parallel = VARIANTS.index(variant), _torch_parallel()
    pack, panel = _function(library, "pack"), _function(library, "panel")
    size, address = ctypes.c_int64, ctypes.c_void_p
    pack.argtypes = (size, address, size, address, size, size)
    together = _function(library, "together")
    panel.argtypes = together.argtypes = (size, size)
    ban = _function(library, "ban")
    ban.argtypes = (address, size, size, address, size, address, size)
    take_pages = _function(library, "take_pages")
    take_pages.argtypes = (address, size, address)

    def measured(name: str) -> Callable[[Any, int], int]:
        function = _function(library, name)
        function.argtypes = (size, address, size)
        return functools.partial(function, number)

    def called(name: str) -> Callable[[Any, int], int]:
        function = _function(library, name)
        function.argtypes = (size, address, address, size)
        return lambda what, threads: function(number, what, parallel, threads)

    return CpuLibrary(
        variant,
        8 if variant == "avx2" else 16,
        check=_function(library, "check"),
        workspace_bytes=measured("workspace"),
        attend=called("attend"),
        panel=functools.partial(panel, number),
        together=functools.partial(together, number),
        pack=functools.partial(pack, number),
        product_workspace=measured("product_workspace"),
        multiply=called("multiply"),
        pass_workspace=measured("pass_workspace"),
        run_pass=called("pass"),
        ban=ban,
        take_pages=take_pages,
        wake=called("wake"),
    )


def _function(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, f"stratakv_cpu_{name}")
    function.restype = ctypes.c_int64
    return function


def _torch_parallel() -> int | None:
    """Return the address of torch's OpenMP function GOMP_parallel; None if torch was built without
    OpenMP. Without an address, the library computes on the calling thread only."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
