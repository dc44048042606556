# SPDX-License-Identifier: Apache-2.0
"""A process that computes with and without LoRA adapters, for `--limits --lora`.

    {"model": path, "adapters": path, "threads": n, "prompt_tokens": n, "decode_tokens": n,
     "seed": n}
                       the answer is the kernels' variant and the bytes of each adapter
    {"work": name}     the answer is wall-clock seconds, processor seconds and the amount

    rows_without    rows of decode steps of 64 requests, in an engine without adapters
    base_rows       the same in an engine with adapters in all slots, requests without adapters
    adapter_rows    the same, with four adapters for the requests in turn
    wide_rows       like adapter_rows, with adapters of rank 64
    base_prompt     tokens of a prompt, up to the first token of its answer, without an adapter
    adapter_prompt  tokens of a prompt, up to the first token of its answer, with an adapter

Prompts of decode steps are short, so that the time of attention is small. The adapters are random,
in PEFT's files, and adapt all seven matrices of a layer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...engine.models.checkpoint.tensor_shapes import expected_tensors
from ...engine.models.spec.spec_parser import load_model_spec
from ...engine.request.core_messages import AddRequest, RequestExtras
from ...kernels.cpu.library import Missing, cpu_library
from .limits_process import BLOCK_TOKENS, Done, answer_works
from .phases_process import StrataKvSide, WrongWork

REQUESTS, ADAPTERS = 64, 4
ROW_PROMPT_TOKENS = 2
RANKS = {"adapter": 16, "wide": 64}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_names(kind: str) -> list[str]:
    """Return the names of the adapters of a kind in RANKS."""
    return [f"{kind}-{number}" for number in range(ADAPTERS)]


def make_adapter(folder: Path, model: Path, rank: int, seed: int) -> int:
    """Write a random adapter of a model in PEFT's format; return the bytes of its matrices."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(load_model_spec(model)).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            outs, ins = shape
            for half, of_half in (("A", (rank, ins)), ("B", (outs, rank))):
                drawn = torch.empty(of_half).uniform_(-0.04, 0.04, generator=draw)
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = drawn
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
              "target_modules": list(TARGETS), "bias": "none"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


class AdaptedSide(StrataKvSide):
    """StrataKV's engine core, whose requests have the adapters of `adapters` in turn."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.adapters: Sequence[str] = ("",)  # names for the next requests; "" for none

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        packed = self._array(prompt, "<i4").tobytes()
        adapter = self.adapters[int(request_id) % len(self.adapters)]
        extras = RequestExtras(adapter=adapter)
        request = AddRequest(request_id, packed, self._greedy(max_tokens), extras=extras)
        refused = self._core.add(request)
        if refused:
            raise WrongWork(f"a request was refused: {refused[0].error}")


def time_phases(
    side: AdaptedSide, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[Done, Done]:
    """Run prompts together. Return the prompt tokens and seconds until all prompts have a first
    token, and the rows and seconds of all later steps. Raises WrongWork if a token is missing."""
    made = [0] * len(prompts)
    clock, processor = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(prompts):
        side.add(str(number), prompt, max_tokens)

    def step() -> None:
        for output in side.step():
            made[int(output.request_id)] += len(output.token_ids)

    while not all(made):
        step()
    early, now, used = sum(made), time.perf_counter(), time.process_time()
    first = Done(float(sum(map(len, prompts))), now - clock, used - processor)
    while min(made) < max_tokens:
        step()
    last = Done(float(sum(made) - early), time.perf_counter() - now, time.process_time() - used)
    if any(count != max_tokens for count in made):
        raise WrongWork(f"not every prompt got {max_tokens} tokens")
    return first, last


class AdapterWorks:
    """All kinds of work of `--limits --lora`, by name."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """Make the adapters and both engines. Raises WrongWork without the compiled kernels."""
        library = cpu_library()
        if isinstance(library, Missing):
            raise WrongWork(f"adapters are measured in compiled kernels, and {library.reason}")
        self.variant = library.variant
        model, folder = Path(plan["model"]), Path(plan["adapters"])
        self._vocab_size = load_model_spec(model).vocab_size
        self._draw = torch.Generator().manual_seed(plan["seed"])
        self._prompt_tokens, self._decode_tokens = plan["prompt_tokens"], plan["decode_tokens"]
        self.num_bytes = {}
        paths = {}
        for kind, rank in RANKS.items():
            for number, name in enumerate(adapter_names(kind)):
                self.num_bytes[kind] = make_adapter(folder / name, model, rank, number)
                paths[name] = str(folder / name)
        most = max(self._prompt_tokens, REQUESTS * ROW_PROMPT_TOKENS)
        row_tokens = ROW_PROMPT_TOKENS + self._decode_tokens + BLOCK_TOKENS
        longest = max(self._prompt_tokens + BLOCK_TOKENS, row_tokens)
        row_blocks, prompt_blocks = (-(-tokens // BLOCK_TOKENS) for tokens in (row_tokens, longest))
        arguments = {
            "model": plan["model"],
            "dtype": "bfloat16",
            "max_model_len": longest,
            "max_num_batched_tokens": most + BLOCK_TOKENS,
            "max_num_seqs": REQUESTS,
            "block_size": BLOCK_TOKENS,
            "num_blocks": 2 + max(REQUESTS * row_blocks, prompt_blocks),
            "num_threads": plan["threads"],
        }
        self._without = AdaptedSide(arguments)
        self._with = AdaptedSide(
            arguments
            | {"lora_modules": paths, "max_loras": ADAPTERS, "max_lora_rank": max(RANKS.values())}
        )
        torch.set_num_threads(plan["threads"])
        self.do("adapter_rows")  # fills every slot with an adapter

    def describe(self) -> dict[str, Any]:
        return {"variant": self.variant, "adapter_bytes": self.num_bytes}

    def do(self, name: str) -> Done:
        """Do a kind of work once. Raises WrongWork."""
        kind, _, what = name.partition("_")
        adapters = adapter_names(kind) if kind in RANKS else [""]
        if what == "prompt" and kind in ("base", "adapter"):
            return self._run(self._with, adapters, 1, self._prompt_tokens, 0)[0]
        if name == "rows_without" or (what == "rows" and kind in ("base", *RANKS)):
            side = self._without if name == "rows_without" else self._with
            return self._run(side, adapters, REQUESTS, ROW_PROMPT_TOKENS, self._decode_tokens)[1]
        raise WrongWork(f"there is no work {name!r}")

    def _run(
        self, side: AdaptedSide, adapters: Sequence[str], requests: int, prompt: int, decode: int
    ) -> tuple[Done, Done]:
        ids = torch.randint(3, self._vocab_size, (requests, prompt), generator=self._draw)
        side.forget()
        side.adapters = adapters
        return time_phases(side, ids.tolist(), 1 + decode)


if __name__ == "__main__":
    sys.exit(answer_works(AdapterWorks))
