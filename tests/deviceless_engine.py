# SPDX-License-Identifier: Apache-2.0
"""Whole engines over the Triton driver without a device: the program of a process, whose standard
output is one line of JSON.

    engine         real: scheduler, tiers, steps, the kernels' checks, specialisation, compiler
    decode steps   recorded as on CUDA; a record that reads something back is an error
    answers        meaningless, since no kernel runs

Each engine has a GPU of its own, for which nothing is compiled yet. What the engines compile alike
is compiled once, by way of Triton's cache folder.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stratakv.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from stratakv.engine.core import engine_core
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.setup.resolve_placement import placement_of
from stratakv.engine.request.core_messages import AddRequest
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.worker import model_runner
from stratakv.engine.worker.runtime.device_runtime import HostRuntime, Work
from stratakv.engine.worker.runtime.placement import KERNELS
from stratakv.kernels.attention.gathered_prefill import SDPA, GatheredPrefill

from .kernels import deviceless_driver, planted_kernels
from .kernels.deviceless_driver import DevicelessDriver
from .leftovers import settle
from .offload_config import offload_config
from .stepping import step_outputs

VOCAB, BLOCK, BUDGET, MAX_SEQS, TOKENS = 97, 16, 128, 8, 6
SPARE_BLOCKS = 12  # beside the longest request: prompts evict each other, and go to the cpu tier
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
# The first layer sees everything, the others a window.
QWEN = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 48,
    "max_window_layers": 1,
}


# Heads as those of Qwen3-8B, which are normed, and take the most shared memory and the longest to
# compile.
WIDE = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
}


# Tokens of prompts that come together, of one round after the other.
ROUNDS = ((1,), (20,), (500,), (70, 5, 33, 100, 200, 350, 1, 64), (90, 90, 90))
LONG_ROUNDS = ((1,), (20,), (1500,), (70, 5, 33, 100, 200, 350, 1, 64), (1200, 90, 90))


class Setting(NamedTuple):
    """One engine."""

    model: dict[str, Any] = LLAMA
    max_model_len: int = 1024
    kv_cache_dtype: str = "auto"
    num_groups: int = 1
    tiers: tuple[str, ...] = ("cpu",)
    capability: tuple[int, int] = (9, 0)
    dtype: str = "bfloat16"
    strict_kernels: bool = True
    backend: str = KERNELS
    budget: int = BUDGET
    rounds: tuple[tuple[int, ...], ...] = ROUNDS


SETTINGS = {
    "64 blocks a table": Setting(),
    "63 blocks a table": Setting(max_model_len=1000),
    "9 blocks a table": Setting(max_model_len=130),
    "no tiers": Setting(max_model_len=130, tiers=()),
    "windows": Setting(QWEN, max_model_len=1000),
    "two cache groups": Setting(LLAMA | {"num_hidden_layers": 4}, 1000, num_groups=2),
    "heads of 128": Setting(WIDE, max_model_len=1024),
    "fp8": Setting(max_model_len=1000, kv_cache_dtype="fp8_e4m3"),
    "capability 8.0": Setting(max_model_len=130, capability=(8, 0)),
    "float64": Setting(max_model_len=130, dtype="float64", strict_kernels=False),
    "capability 7.0": Setting(max_model_len=130, capability=(7, 0), strict_kernels=False),
    "long chunks by a library": Setting(
        max_model_len=1600, backend=SDPA, budget=2048, rounds=LONG_ROUNDS
    ),
}


class NoReads(TorchDispatchMode):
    """Refuses what CUDA refuses while it records: reading from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {func}"
            )
        return func(*args, **(kwargs or {}))


class DevicelessRuntime(HostRuntime):
    """Records decode steps by calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.can_record = True

    def record_work(self, work: Work) -> Work:
        work()  # CUDA runs it first too, and compiles in that
        with NoReads(), torch.inference_mode(False):
            output = work().clone()

        def replay() -> Tensor:
            return output.copy_(work())

        return replay


def run_engine(driver: DevicelessDriver, setting: Setting) -> dict[str, Any]:
    """Start an engine and have it answer short and long prompts, many at once, and again out of the
    cpu tier. What was compiled in the start and what after it, what was launched, how requests
    ended, and tokens found in the tier."""
    driver.open_gpu(setting.capability)
    with tempfile.TemporaryDirectory() as folder, note_library() as by_library:
        Path(folder, "config.json").write_text(json.dumps(setting.model))
        _place(setting.backend)
        core = EngineCore(_config(Path(folder), setting))
        try:
            in_start = len(driver.compiled)
            by_library.clear()
            longest = setting.max_model_len - TOKENS - 1
            lengths = [[min(length, longest) for length in each] for each in setting.rounds]
            ends: Counter[str] = Counter()
            for seed, each in enumerate(lengths):
                ends += _ask(core, each, seed)[0]
            settle(core)
            again, loaded = _ask(core, lengths[2], seed=2, tag="again")
        finally:
            core.shutdown(30.0)
    return {
        "start": driver.compiled[:in_start],
        "later": driver.compiled[in_start:],
        "launches": Counter(launch.kernel for launch in driver.launched),
        "ends": ends + again,
        "loaded": loaded,
        "by library": by_library,
    }


@contextmanager
def note_library() -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of each chunk that a library computes."""
    noted: list[tuple[int, int]] = []
    run = GatheredPrefill.run

    def noting(self: Any, q: Tensor, kv: Tensor, table: Tensor, length: int, *rest: Any) -> Tensor:
        noted.append((len(q), length))
        return run(self, q, kv, table, length, *rest)

    plain: Any = GatheredPrefill
    plain.run = noting
    try:
        yield noted
    finally:
        plain.run = run


def _place(backend: str) -> None:
    """A library is refused on the CPU, where the tensors lie: placements have it all the same."""
    plain: Any = engine_core
    plain.placement_of = lambda config: replace(placement_of(config), attention_backend=backend)


def _config(folder: Path, setting: Setting) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path=folder,
            served_name="tiny",
            dtype=setting.dtype,
            max_model_len=setting.max_model_len,
            attention_backend=KERNELS,
            strict_kernels=setting.strict_kernels,
            load_format="dummy",
        ),
        cache=CacheConfig(
            block_size=BLOCK,
            num_blocks=-(-setting.max_model_len // BLOCK) + SPARE_BLOCKS,
            kv_cache_dtype=setting.kv_cache_dtype,
            num_groups=setting.num_groups,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=setting.budget, max_num_seqs=MAX_SEQS),
        offload=offload_config(tiers=setting.tiers, cpu_bytes=16 * 2**20, load="always"),
        num_threads=1,
    )


def _ask(
    core: EngineCore, lengths: Sequence[int], seed: int, tag: str = "first"
) -> tuple[Counter[str], int]:
    """Answer random prompts of these lengths together: how they ended, and tokens of the cpu
    tier."""
    draw = random.Random(seed)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    waiting, ends, loaded = set(), Counter[str](), 0
    for index, length in enumerate(lengths):
        ids = np.asarray([draw.randrange(3, VOCAB) for _ in range(length)], "<i4")
        waiting.add(name := f"{tag}-{seed}-{index}")
        if refusal := core.add(AddRequest(name, ids.tobytes(), params)):
            raise AssertionError(f"the prompt was refused: {refusal}")
    for outputs in step_outputs(core):
        for output in outputs:
            loaded += (output.cached_tokens_by_tier or {}).get("cpu", 0)
            if output.finish_reason:
                waiting.discard(output.request_id)
                ends[f"{output.finish_reason} {output.error or ''}".strip()] += 1
        if not waiting:
            return ends, loaded
    raise AssertionError(f"requests did not end: {waiting}")


@triton.jit
def store_number(out, number, rows: tl.constexpr):
    """A small kernel."""
    tl.store(out + tl.arange(0, rows), number)


def run_driver(driver: DevicelessDriver) -> dict[str, Any]:
    """Launches that a GPU refuses, with the error of each, and launches of one kernel in several
    variants."""
    driver.open_gpu((9, 0))
    out = torch.zeros(64, dtype=torch.int32)

    def launch(*grid: int, tensor: Tensor = out, number: int = 32, **options: Any) -> None:
        store_number[grid](tensor, number, **({"rows": 16} | options))

    refused = {
        "second axis": _error(partial(launch, 1, 65536)),
        "third axis": _error(partial(launch, 1, 1, 65536)),
        "shared memory": _error(_launch_too_much_shared_memory),
        "threads": _error(partial(launch, 1, num_warps=64)),
        "keyword": _error(partial(launch, 1, warps=4)),
        "reading in a record": _error(partial(DevicelessRuntime().record_work, _read_back)),
    }
    driver.open_gpu((9, 0))
    launch(2, 3)
    launch(5)  # no other variant
    launch(0)
    launch(1, number=33)
    launch(1, number=1)
    launch(1, tensor=out[1:])
    launch(1, rows=32)
    return {"refused": refused, "compiled": driver.compiled, "launched": driver.launched}


def _launch_too_much_shared_memory() -> None:
    known = {each.name: each for each in planted_kernels.shipped_configurations()}
    shared = known["planted.shared"]
    a, b, out = (torch.zeros(64, 128, dtype=torch.bfloat16) for _ in range(3))
    shared.function[(1,)](
        a, b, out, 128, 2,
        **shared.constexprs, num_warps=shared.num_warps, num_stages=shared.num_stages,
    )  # fmt: skip


def _read_back() -> Tensor:
    tensor = torch.ones(3)
    return tensor * tensor.sum().item()


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_all(driver: DevicelessDriver, names: Iterable[str]) -> dict[str, Any]:
    """Reports by name; one that failed has its traceback as `error`."""
    reports: dict[str, Any] = {}
    for name in names:
        try:
            known = SETTINGS.get(name)
            reports[name] = run_driver(driver) if known is None else run_engine(driver, known)
        except Exception:
            reports[name] = {"error": traceback.format_exc()}
    return reports


def main() -> None:
    torch.set_num_threads(1)
    driver = deviceless_driver.install()
    plain: Any = model_runner
    plain.open_runtime = lambda placement: DevicelessRuntime()
    json.dump(run_all(driver, sys.argv[1:] or ["driver", *SETTINGS]), sys.stdout, default=str)


if __name__ == "__main__":
    main()
