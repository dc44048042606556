# SPDX-License-Identifier: Apache-2.0
"""Models whose layers run by the kernels of `kernels/layer/`, in the interpreter and in float32:
the tokens and hidden states of the same models without them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="runs its interpreter")

from stratakv.engine.models.checkpoint.weights import load_weights, random_weights
from stratakv.engine.models.decoder import AuxStates
from stratakv.engine.models.layers import Elementwise
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.worker.block_table import BlockTable
from stratakv.engine.worker.forward import kernel_attention, kernel_forward
from stratakv.engine.worker.forward.forward import StepInputs
from stratakv.engine.worker.forward.kernel_attention import KernelAttention, Kernels
from stratakv.engine.worker.model_runner import ModelRunner
from stratakv.engine.worker.runtime import model_loading
from stratakv.engine.worker.runtime.placement import KERNELS, Placement
from stratakv.engine.worker.runtime.runtimes import choose_layer_parts
from stratakv.kernels.kernel_choice import TRITON

from ...kernels import interpreter, launch_guard, quick_interpreter
from ...tiny_models import make_model
from .recording_runtime import RecordingRuntime

# Norms behind attention and MLP, weights of norms in float32, gelu.
GEMMA = {
    "rope_parameters": None, "query_pre_attn_scalar": 24, "pad_token_id": 0,
    "tie_word_embeddings": True,
}  # fmt: skip
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter: TRITON_INTERPRET=1"
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}),
    "qwen3": ("qwen3", {}),  # norms of heads
    "gemma3": ("gemma3_text", GEMMA | {"sliding_window_pattern": 1}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "sliding_window": 5}),
    "experts": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
}
# Two cache groups, each with rotary positions of its own.
MIXED = GEMMA | {"sliding_window_pattern": 2, "sliding_window": 5}
BY_KERNELS = Placement(attention_backend=KERNELS)
PROMPTS = {"a": 9, "b": 1, "c": 4}
CHUNK = 5


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, changes = MODELS[request.param]
    directory = tmp_path_factory.mktemp("layers")
    return make_model(directory, model_type, seed=5, **({"num_hidden_layers": 1} | changes))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    return make_model(directory, "llama", seed=5, num_hidden_layers=2)


@pytest.fixture(autouse=True)
def _guarded_launches() -> None:
    """As in tests/kernels: unpatched, the interpreter rounds 1.97 to 1 in e4m3, and not to 2."""
    quick_interpreter.install()
    interpreter.install()
    launch_guard.install()


@contextmanager
def layer_kernels(parts: Elementwise | None = None) -> Iterator[Counter[str]]:
    """Models that are made within have them, or other `parts`. Counts what attention was given."""
    chosen = parts or Elementwise.of_kernels()
    calls: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any) -> torch.Tensor:
            calls[name] += 1
            found: torch.Tensor = real(*args)
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "choose_layer_parts", lambda *_: chosen)
        patch.setattr(kernel_attention, "choose_rotate_write", lambda *_, **__: TRITON)
        patch.setattr(Kernels, "can_record_decodes", True)
        patch.setattr(Kernels, "can_record_chunks", True)
        patch.setattr(kernel_forward, "WARM_CHUNKS", (2,))
        patch.setattr(kernel_forward, "CHUNK_SIZES", (CHUNK + 1,))
        for name in ("_attend_qkv", "__call__"):
            patch.setattr(KernelAttention, name, counted(name, getattr(KernelAttention, name)))
        yield calls


def answers(driver: Any, prompt_of: Any, path: Path, **options: Any) -> dict[str, list[int]]:
    """Of requests through chunks, decodes, and both in one step."""
    options = {"placement": BY_KERNELS, **options}
    drive = driver(path, dtype="float32", block_size=4, **options)
    for seed, (name, length) in enumerate(PROMPTS.items()):
        drive.add(name, prompt_of(length, seed))
        drive.step(chunk=CHUNK)
    for _ in range(3):
        drive.step(chunk=CHUNK)
    # The null block holds zeros: rows of nobody wrote nothing.
    assert not drive.runner.pool.tensor[0].float().any()
    return {name: drive.finish(name) for name in PROMPTS}


def test_tokens_are_those_of_the_plain_layers(model: Path, driver: Any, prompt_of: Any) -> None:
    expected = answers(driver, prompt_of, model)
    with layer_kernels() as calls:
        found = answers(driver, prompt_of, model)
    assert found == expected
    assert [len(found[name]) for name in "abc"] == [5, 5, 4]
    assert set(calls) == {"_attend_qkv"}


# What the start computes of nobody's rows means nothing.
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_tokens_of_recorded_steps(llama: Path, driver: Any, prompt_of: Any) -> None:
    expected = answers(driver, prompt_of, llama)
    runtime = RecordingRuntime()
    with layer_kernels() as calls:
        found = answers(driver, prompt_of, llama, runtime=runtime, max_num_seqs=3)
    assert found == expected
    assert set(calls) == {"_attend_qkv"} and runtime.num_replays > 2


def test_an_fp8_pool(llama: Path, driver: Any, prompt_of: Any) -> None:
    """A number in many is rounded the other way, since sums of norms are taken in another order;
    the next layer is left out, which goes by all of them."""

    def pool_of_a_prompt() -> torch.Tensor:
        fp8 = Placement(attention_backend=KERNELS, kv_cache_dtype="fp8_e4m3")
        drive = driver(llama, dtype="float32", block_size=4, placement=fp8)
        drive.add("a", prompt_of(13))
        drive.step()
        first: torch.Tensor = drive.runner.pool.tensor[drive.lives["a"].blocks, 0]
        return first.view(torch.uint8)

    expected = pool_of_a_prompt()
    with layer_kernels() as calls:
        found = pool_of_a_prompt()
    assert set(calls) == {"_attend_qkv"}
    assert float((found != expected).float().mean()) < 0.01


def test_torchs_compiler_leaves_kernels_and_rotations_alone(
    llama: Path, driver: Any, prompt_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--compilation elementwise` is asked for by name, and is what runs then."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: partial(function))
    placement = replace(BY_KERNELS, compile_elementwise=True)
    parts = choose_layer_parts(load_model_spec(llama), placement, torch.bfloat16)
    assert not parts.is_kernels and not parts.is_plain
    with layer_kernels(parts=Elementwise()) as calls:
        driver(llama, dtype="float32", placement=BY_KERNELS).generate("a", prompt_of(5), 2)
    assert set(calls) == {"__call__"}


@pytest.mark.parametrize("kind", ["one view", "two views"])
def test_inner_states_are_kept_although_layers_overwrite_their_input(
    kind: str, llama: Path, driver: Any, prompt_of: Any, tmp_path: Path
) -> None:
    model = llama
    if kind == "two views":
        model = make_model(tmp_path, "gemma3_text", seed=5, num_hidden_layers=2, **MIXED)
    with layer_kernels() as calls:
        found = states(driver(model, dtype="float32", placement=BY_KERNELS).runner, prompt_of(9))
    assert calls == {"_attend_qkv": 4}
    expected = states(driver(model, dtype="float32", placement=BY_KERNELS).runner, prompt_of(9))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def states(runner: ModelRunner, prompt: list[int]) -> list[torch.Tensor]:
    """Hidden states of a prompt and those inside: of all rows, and of some."""
    found, positions, nobody = [], np.arange(len(prompt)), np.zeros(1, np.int64)
    for wanted in (None, np.array([8, 2])):
        tables = [BlockTable(1, 8, 16) for _ in runner.groups.groups]
        for number, table in enumerate(tables):
            table.add_row([1 + number], 0)
        slots = [table.slot_mapping(np.zeros_like(positions), positions) for table in tables]
        aux = AuxStates((0, 1, 2))
        step = StepInputs(
            tables, nobody, nobody, np.array([len(prompt)]), np.array(prompt), positions, slots,
            wanted, aux=aux,
        )  # fmt: skip
        with torch.inference_mode():
            found += [runner._forward.prepare_step(step)().clone(), *aux.found.values()]
    return found


def test_gate_and_up_are_one_matrix_in_memory(llama: Path) -> None:
    spec = load_model_spec(llama)
    apart = load_weights(llama, spec, torch.bfloat16).layers[0].mlp
    joined = load_weights(llama, spec, torch.bfloat16, joins_gate=True).layers[0].mlp
    assert apart.gate_up is None and joined.gate_up is not None
    assert torch.equal(joined.gate, apart.gate) and torch.equal(joined.up, apart.up)
    pointers = {part.untyped_storage().data_ptr() for part in (joined.gate, joined.up)}
    assert pointers == {joined.gate_up.untyped_storage().data_ptr()}
    drawn = [
        random_weights(spec, torch.bfloat16, joins_gate=joins).layers[1] for joins in (False, True)
    ]
    assert torch.equal(drawn[0].mlp.down, drawn[1].mlp.down) and torch.equal(
        drawn[0].mlp.up, drawn[1].mlp.up
    )
