# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints written by transformers, and a driver that plays the scheduler.

The driver hands out blocks in a scrambled order and fills the pool with NaN first, so that a result
that reads anything but its own computed positions is NaN and fails its test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.connector.base import KVConnectorWorker
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from stratakv.engine.worker.model_runner import ModelRunner

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # wide, so that the best logit leads by a clear gap
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(**changes)`: the directory of a random float64 Llama of that configuration."""
    made: dict[str, Path] = {}

    def make(*, max_shard_size: str = "1GB", seed: int = 0, **changes: Any) -> Path:
        name = repr((sorted(changes.items()), max_shard_size, seed))
        if name not in made:
            from transformers import LlamaConfig, LlamaForCausalLM

            torch.manual_seed(seed)
            model = LlamaForCausalLM(LlamaConfig(**{**BASE, **changes})).double()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:  # biases and norms start as constants
                        parameter += 0.1 * torch.randn_like(parameter)
            path = tmp_path_factory.mktemp("llama")
            model.save_pretrained(path, max_shard_size=max_shard_size)
            made[name] = path
        return made[name]

    return make


@dataclass
class Reference:
    """What transformers makes of a prompt, greedily."""

    tokens: list[int]
    logits: torch.Tensor  # [tokens, vocab]

    @property
    def smallest_gap(self) -> float:
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(scope="session")
def reference() -> Callable[..., Reference]:
    """`reference(path, prompt, count)`, computed in float64."""
    models: dict[Path, Any] = {}

    def run(path: Path, prompt: Sequence[int], count: int) -> Reference:
        from transformers import LlamaForCausalLM

        if path not in models:
            models[path] = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
        with torch.inference_mode():
            out = models[path].generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = out.sequences[0, len(prompt) :].tolist()
        return Reference(tokens, torch.cat(out.logits).double())

    return run


@dataclass
class _Life:
    prompt: list[int]
    params: SamplingParams
    blocks: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    computed: int = 0
    known: bool = False  # the worker has seen it
    resumed: bool = False
    embeds: np.ndarray | None = None


class Driver:
    """A runner with the least scheduler that can drive it."""

    def __init__(
        self,
        path: Path,
        *,
        dtype: str = "float64",
        block_size: int = 16,
        num_blocks: int = 200,
        max_num_seqs: int = 16,
        max_model_len: int = 1024,
        connector: KVConnectorWorker | None = None,
        **options: Any,
    ) -> None:
        spec = load_model_spec(path)
        self.runner = ModelRunner(
            spec,
            path,
            dtype=dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=4096,
            max_model_len=min(max_model_len, spec.max_context),
            connector=connector,
            **options,
        )
        self.runner.pool.tensor[1:] = torch.full((), float("nan")).to(self.runner.pool.tensor.dtype)
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        random.Random(7).shuffle(self.free)
        self.lives: dict[str, _Life] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.logits: list[torch.Tensor] = []
        self._record_logits()

    def add(
        self, name: str, prompt: Sequence[int], embeds: np.ndarray | None = None, **params: Any
    ) -> None:
        params = {"temperature": 0.0, "max_tokens": 512, **params}
        self.lives[name] = _Life(list(prompt), SamplingParams(**params), embeds=embeds)

    def finish(self, name: str) -> list[int]:
        life = self.lives.pop(name)
        self.free = life.blocks + self.free  # reused at once, with what they still hold
        self.finished.add(name)
        return life.output

    def preempt(self, name: str, *, forget: bool = False) -> None:
        life = self.lives[name]
        self.free = life.blocks + self.free
        life.blocks, life.computed, life.resumed = [], 0, True
        if forget:
            life.known = life.resumed = False
        self.preempted.add(name)

    def step(self, chunk: int = 1000, names: Sequence[str] | None = None) -> ModelRunnerOutput:
        """Schedule up to `chunk` tokens of each named (default: every) request."""
        new, cached, scheduled = [], CachedRequestData(), {}
        for name in self.lives if names is None else names:
            life = self.lives[name]
            total = len(life.prompt) + len(life.output)
            count = min(chunk, total - life.computed)
            added = self._grow(life, life.computed + count)
            scheduled[name] = count
            if life.known:
                ids = list(life.blocks) if life.resumed else added
                cached.request_ids.append(name)
                cached.new_block_ids.append((ids,) if ids else None)
                cached.num_computed_tokens.append(life.computed)
                if life.resumed:
                    cached.resumed_request_ids.add(name)
                    cached.output_token_ids[name] = list(life.output)
            else:
                prompt = torch.tensor(life.prompt, dtype=torch.int32).numpy()
                blocks = (list(life.blocks),)
                new.append(
                    NewRequestData(
                        name,
                        prompt,
                        life.params,
                        blocks,
                        life.computed,
                        list(life.output),
                        life.embeds,
                    )
                )
            life.known, life.resumed = True, False
            life.computed += count
        step = SchedulerOutput(
            new, cached, scheduled, sum(scheduled.values()), self.finished, self.preempted
        )
        self.finished, self.preempted = set(), set()
        result = self.runner.execute(step)
        for name, tokens in result.sampled_token_ids.items():
            self.lives[name].output += tokens
        return result

    def generate(
        self, name: str, prompt: Sequence[int], count: int, chunk: int = 1000
    ) -> list[int]:
        """One request alone, from prompt to end."""
        self.add(name, prompt)
        while len(self.lives[name].output) < count:
            self.step(chunk)
        return self.finish(name)

    def _grow(self, life: _Life, length: int) -> list[int]:
        added = []
        while len(life.blocks) * self.block_size < length:
            added.append(self.free.pop(0))
            life.blocks.append(added[-1])
        return added

    def _record_logits(self) -> None:
        compute = self.runner.model.logits

        def recorded(hidden: torch.Tensor, *wanted: Any) -> torch.Tensor:
            logits = compute(hidden, *wanted)
            self.logits.append(logits.double())
            return logits

        self.runner.model.logits = recorded  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def driver() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def prompt_of() -> Callable[..., list[int]]:
    """`prompt_of(length, seed=0)`: random token ids of the tiny vocabulary."""

    def make(length: int, seed: int = 0) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(3, BASE["vocab_size"]) for _ in range(length)]

    return make
