# SPDX-License-Identifier: Apache-2.0
"""A process that does a model's work or the work of a limit, on request.

    {"model": path, "threads": n, "prompt_tokens": n, "decode_tokens": n, "context": n}
                       the answer is the kernels' variant, the bytes of weights and of KV
    {"work": name}     the answer is wall-clock seconds, processor seconds and the amount

    decode          bytes of weights that the steps of one request read
    attention       bytes of K and V that one request's token reads in all layers
    apart, alike    bytes of K and V that the tokens of 16 requests see in 4 layers. The requests
                    have their own blocks, or share all blocks but those of the last 64 tokens
    prefill         products of a prompt with all matrices of the model
    scan_weights    bytes of a buffer of the weights' size, read by memchr, one piece per thread
    sum_weights     the same bytes, read by torch's sum of float32
    scan_kv, sum_kv   the same for a buffer of the size of K and V
    matrices        the products of `prefill` alone, by the library of `kernels/cpu/`
    matrices_torch  the same products in float32 by torch, which is far slower in bfloat16 if the
                    processor has no bfloat16 units

A buffer has at least four times the bytes of the largest cache, and the page size of the weights.
`matrices` uses the matrices of one layer for all layers. These matrices may stay in a cache, unlike
all matrices of the model, which can only raise the limit."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ...engine.models.checkpoint.tensor_shapes import EMBEDDING, expected_tensors
from ...engine.models.model_spec import ModelSpec
from ...engine.models.spec.spec_parser import load_model_spec
from ...kernels.cpu.huge_pages import ask_for_huge_pages
from ...kernels.cpu.library import Missing, cpu_library
from ...kernels.cpu.matrix import PackedMatrix
from ...kernels.cpu.paged_attention import CpuAttentionStep
from ...kernels.cpu.workspace import Workspace
from ..harness.peer import answerer
from ..tiers.slab_case import footprint_bytes
from .phases_process import StrataKvSide, WrongWork, answer

BLOCK_TOKENS = 16
DECODE_PROMPT_TOKENS = 8
ALIKE_REQUESTS, ALIKE_CONTEXT, ALIKE_LAYERS, OWN_TOKENS = 16, 1024, 4, 64
DTYPE = torch.bfloat16
Work = Callable[[], float]  # returns the amount of work; the call is timed


@dataclass(slots=True)
class Done:
    """The amount and the seconds of finished work."""

    amount: float
    seconds: float
    processor_seconds: float


class MeasuredWorks(Protocol):
    """Kinds of work that a process does on request."""

    def describe(self) -> dict[str, Any]:
        """Return the figures that the parent reports."""

    def do(self, name: str) -> Done:
        """Do a kind of work once. Raises WrongWork."""


def weight_bytes(spec: ModelSpec) -> int:
    """Return the bytes of all weights that a step reads; the embedding is included only if it is
    also the output matrix."""
    return DTYPE.itemsize * sum(
        torch.Size(shape).numel()
        for name, shape in expected_tensors(spec).items()
        if name != EMBEDDING or spec.tied_embeddings
    )


def layer_matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of each matrix of a layer; gate and up have the same shape."""
    heads = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [(heads + 2 * keys, hidden), (hidden, heads), (inner, hidden), (inner, hidden),
            (hidden, inner)]  # fmt: skip


class Reading:
    """A buffer, and two methods of reading its beginning."""

    def __init__(self, num_bytes: int, threads: int) -> None:
        self._threads = threads
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        ask_for_huge_pages(self._buffer)
        self._buffer.zero_()
        self._memchr = ctypes.CDLL(None).memchr
        self._memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        self._memchr.restype = ctypes.c_void_p

    def scan(self, num_bytes: int) -> float:
        """Search for a byte that the buffer lacks. Raises WrongWork if the byte is found."""
        size, found = num_bytes // self._threads, list[int | None]()

        def piece(number: int) -> None:
            found.append(self._memchr(self._buffer.data_ptr() + number * size, 1, size))

        others = [threading.Thread(target=piece, args=(i,)) for i in range(1, self._threads)]
        for other in others:
            other.start()
        piece(0)
        for other in others:
            other.join()
        if found != [None] * self._threads:
            raise WrongWork("a buffer of zeros holds something else")
        return float(size * self._threads)

    def sum(self, num_bytes: int) -> float:
        numbers = self._buffer[: num_bytes // 4 * 4].view(torch.float32)
        if float(numbers.sum()) != 0.0:
            raise WrongWork("a buffer of zeros holds something else")
        return float(numbers.nbytes)


class Attention:
    """Attention of one token per request, in layers of a pool with blocks in random order."""

    def __init__(self, spec: ModelSpec, context: int, num_layers: int, requests: int = 1) -> None:
        blocks = -(-context // BLOCK_TOKENS) * requests
        shape = (blocks, num_layers, 2, BLOCK_TOKENS, spec.num_kv_heads, spec.head_dim)
        pool = torch.empty(shape, dtype=DTYPE)
        ask_for_huge_pages(pool)
        pool.normal_()
        self._layers = [pool[:, layer] for layer in range(num_layers)]
        self.num_bytes = requests * context * pool[0, :, :, 0].nbytes
        self._q = torch.randn(requests, spec.num_heads, spec.head_dim).to(DTYPE)
        self._out = torch.empty_like(self._q)
        apart = torch.randperm(blocks).to(torch.int32).view(requests, -1)
        alike = apart.clone()
        alike[:, : -OWN_TOKENS // BLOCK_TOKENS] = apart[0, : -OWN_TOKENS // BLOCK_TOKENS]
        lengths = torch.full((requests,), context, dtype=torch.int32)
        self._apart, self._alike = (
            CpuAttentionStep(
                self._layers[0],
                tables,
                lengths,
                None,
                num_tokens=requests,
                num_heads=spec.num_heads,
                scale=spec.attention_scale,
                workspace=Workspace(),
            )
            for tables in (apart, alike)
        )

    def run(self, is_alike: bool = False) -> float:
        for layer in self._layers:
            (self._alike if is_alike else self._apart).run(self._q, layer, self._out)
        return float(self.num_bytes)


class Matrices:
    """Products of a prompt's rows with the matrices of all layers, without other computations."""

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self._num_layers, shapes = spec.num_layers, layer_matrices(spec)
        self.products = spec.num_layers * rows * sum(outs * ins for outs, ins in shapes)
        weights = [torch.empty(shape).uniform_(-0.04, 0.04) for shape in shapes]
        narrow = [weight.to(DTYPE) for weight in weights]
        qkv, out, gate, up, down = narrow
        self._packed = [PackedMatrix(each) for each in ((qkv,), (out,), (gate, up), (down,))]
        self._rows = {
            (ins, dtype): torch.randn(rows, ins).to(dtype)
            for _, ins in shapes
            for dtype in (DTYPE, torch.float32)
        }
        self._weights = weights

    def by_library(self) -> float:
        for _ in range(self._num_layers):
            for matrix in self._packed:
                matrix(self._rows[matrix.ins, DTYPE])
        return float(self.products)

    def by_torch(self) -> float:
        for _ in range(self._num_layers):
            for weight in self._weights:
                torch.mm(self._rows[weight.shape[1], torch.float32], weight.T)
        return float(self.products)


class Works:
    """All kinds of work of `--limits`, by name."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """Raise WrongWork without the compiled kernels."""
        library = cpu_library()
        if isinstance(library, Missing):
            raise WrongWork(f"the limits are those of compiled kernels, and {library.reason}")
        spec = load_model_spec(Path(plan["model"]))
        self._draw = torch.Generator().manual_seed(plan["seed"])
        self._vocab_size = spec.vocab_size
        prompt, tokens = plan["prompt_tokens"], plan["decode_tokens"]
        longest = max(prompt, DECODE_PROMPT_TOKENS + tokens) + BLOCK_TOKENS
        self._side = StrataKvSide(
            {
                "model": plan["model"],
                "dtype": "bfloat16",
                "max_model_len": longest,
                "max_num_batched_tokens": longest,
                "max_num_seqs": 1,
                "block_size": BLOCK_TOKENS,
                "num_blocks": 2 + -(-longest // BLOCK_TOKENS),
                "num_threads": plan["threads"],
            }
        )
        torch.set_num_threads(plan["threads"])
        self.variant = library.variant
        attention = Attention(spec, plan["context"], spec.num_layers)
        several = Attention(spec, ALIKE_CONTEXT, ALIKE_LAYERS, ALIKE_REQUESTS)
        matrices = Matrices(spec, prompt)
        self.weight_bytes, self.kv_bytes = weight_bytes(spec), attention.num_bytes
        read, kv = footprint_bytes(self.weight_bytes), footprint_bytes(self.kv_bytes)
        reading = Reading(max(read, kv), plan["threads"])
        self._works: dict[str, Work] = {
            "attention": attention.run,
            "apart": several.run,
            "alike": lambda: several.run(is_alike=True),
            "scan_weights": lambda: reading.scan(read),
            "sum_weights": lambda: reading.sum(read),
            "scan_kv": lambda: reading.scan(kv),
            "sum_kv": lambda: reading.sum(kv),
            "matrices": matrices.by_library,
            "matrices_torch": matrices.by_torch,
        }
        self._prompt_tokens, self._decode_tokens = prompt, tokens
        self._products = matrices.products

    def describe(self) -> dict[str, Any]:
        return {
            "variant": self.variant,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
        }

    def do(self, name: str) -> Done:
        """Do a kind of work once. Raises WrongWork."""
        if name == "decode":
            return self._engine(DECODE_PROMPT_TOKENS, self._decode_tokens)
        if name == "prefill":
            return self._engine(self._prompt_tokens, 0)
        work = self._works.get(name)
        if work is None:
            raise WrongWork(f"there is no work {name!r}")
        clock, processor = time.perf_counter(), time.process_time()
        amount = work()
        return Done(amount, time.perf_counter() - clock, time.process_time() - processor)

    def _engine(self, prompt_tokens: int, decode_tokens: int) -> Done:
        """Run one new prompt; return the work of prefill or, with `decode_tokens`, of decode."""
        ids = torch.randint(3, self._vocab_size, (prompt_tokens,), generator=self._draw)
        self._side.forget()
        processor = time.process_time()
        found = answer(self._side, [ids.tolist()], 1 + decode_tokens)
        used = time.process_time() - processor
        if not decode_tokens:
            return Done(self._products, found["first_seconds"], used)
        # Processor seconds of prefill and decode are measured together, and split by wall-clock
        # time.
        share = found["decode_seconds"] / (found["decode_seconds"] + found["first_seconds"])
        tokens = found["decode_tokens"]
        return Done(tokens * self.weight_bytes, found["decode_seconds"], used * share)


def answer_works(make: Callable[[dict[str, Any]], MeasuredWorks]) -> int:
    """Make the works from the first line of the input, write their description, then answer line by
    line until the input ends."""
    tell = answerer()
    try:
        with torch.inference_mode():
            works = make(json.loads(sys.stdin.readline()))
            tell(works.describe())
            for line in sys.stdin:
                tell(asdict(works.do(json.loads(line)["work"])))
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        tell({"error": f"{type(error).__name__}: {error}".partition("\n")[0]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(answer_works(Works))
