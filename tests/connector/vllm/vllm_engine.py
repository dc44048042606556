# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine in another environment, and the model that it computes: random weights, large
enough that one wrong byte of the KV cache changes the tokens."""

from __future__ import annotations

import json
import os
import random
import re
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[3]
PYTHON = os.environ.get("STRATAKV_VLLM_PYTHON", "")
PROCESS = Path(__file__).with_name("vllm_process.py")

START_SECONDS = 900.0  # a busy machine takes minutes to import vLLM
ANSWER_SECONDS = 600.0

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 128, 3, 4, 2, 32, 512
WINDOW_LAYERS, WINDOW = 7, 64
HYBRID_LAYERS = 4
BLOCK_TOKENS = 32
CHUNK_BYTES = LAYERS * 2 * BLOCK_TOKENS * KV_HEADS * HEAD_DIM * 4  # float32
MAX_TOKENS = 6


def make_model(folder: Path, seed: int = 0) -> Path:
    """A Llama checkpoint with embeddings of variance 1 and heavy attention."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    weights = Weights(seed)
    tensors = {
        "model.embed_tokens.weight": weights(VOCABULARY, HIDDEN, scale=1.0),
        "lm_head.weight": weights(VOCABULARY, HIDDEN, scale=0.3),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        tensors |= weights.layer(name)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}{part}.weight"] = torch.ones(HIDDEN)
    return _write(folder, config, LAYERS, tensors)


def make_windowed_model(folder: Path, seed: int = 0) -> Path:
    """A Gemma 3 checkpoint, two layers of three with a window of WINDOW tokens. vLLM makes four
    cache groups of its seven layers, one of which has a layer less."""
    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(WINDOW_LAYERS)]
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": WINDOW,
        "layer_types": kinds,
        "query_pre_attn_scalar": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    weights = Weights(seed)
    tensors = {
        # What is looked up is what is compared with at the end, so the layers have to outweigh it.
        "model.embed_tokens.weight": weights(VOCABULARY, HIDDEN, scale=0.05),
        "model.norm.weight": torch.zeros(HIDDEN),
    }
    for layer in range(WINDOW_LAYERS):
        name = f"model.layers.{layer}."
        tensors |= weights.layer(name)
        for part in ("q_norm", "k_norm"):
            tensors[f"{name}self_attn.{part}.weight"] = torch.zeros(HEAD_DIM)
        for part in ("input_layernorm", "pre_feedforward_layernorm"):
            tensors[f"{name}{part}.weight"] = torch.zeros(HIDDEN)
        for part in ("post_attention_layernorm", "post_feedforward_layernorm"):
            tensors[f"{name}{part}.weight"] = torch.full((HIDDEN,), 3.0)
    return _write(folder, config, WINDOW_LAYERS, tensors)


def make_hybrid_model(folder: Path, seed: int = 0) -> Path:
    """A Qwen3-Next checkpoint whose layers are in turn of states (gated delta net, heads of the one
    size that vLLM's CPU build takes) and of attention; the last one has experts, as vLLM wants."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=HYBRID_LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * (HYBRID_LAYERS // 2),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN // 2,
        shared_expert_intermediate_size=HIDDEN // 2,
        mlp_only_layers=[*range(HYBRID_LAYERS - 1)],
        max_position_embeddings=8192,
    )
    weights = Weights(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3NextForCausalLM(config)
        for name, parameter in model.named_parameters():
            scales = {"embed_tokens": 1.0, "lm_head": 0.3, "proj": 0.1}
            scale = next((scale for part, scale in scales.items() if part in name), None)
            if scale is not None:
                parameter.copy_(weights(*parameter.shape, scale=scale))
            elif name.endswith("A_log"):
                parameter.fill_(-6.0)  # a state forgets slowly, so that a wrong one is seen
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_unlike_model(folder: Path, seed: int = 0) -> Path:
    """A Gemma 4 checkpoint, two layers of three with a window of WINDOW tokens and heads of half
    the size, so that vLLM gives their groups blocks of twice as many tokens."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(6)]
    full = [str(i) for i, kind in enumerate(kinds) if kind == "full_attention"]
    config = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=len(kinds),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        per_layer_config={layer: {"head_dim": 2 * HEAD_DIM} for layer in full},
        layer_types=kinds,
        sliding_window=WINDOW,
        max_position_embeddings=2048,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    weights = Weights(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = Gemma4ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.copy_(weights(*parameter.shape, scale=0.05))
            elif "proj" in name:
                scale = 0.25 if "self_attn" in name else 0.1
                parameter.copy_(weights(*parameter.shape, scale=scale))
            elif "post_" in name:
                parameter.fill_(3.0)  # the layers have to outweigh the embeddings
    model.save_pretrained(folder)
    return folder


class Weights:
    """Random ones."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def layer(self, name: str) -> dict[str, torch.Tensor]:
        """The projections of a layer."""
        tensors = {}
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for part, count in rows.items():
            tensors[f"{name}self_attn.{part}_proj.weight"] = self(count, HIDDEN, scale=0.25)
        tensors[f"{name}self_attn.o_proj.weight"] = self(HIDDEN, HEADS * HEAD_DIM, scale=0.25)
        for part in ("gate", "up"):
            tensors[f"{name}mlp.{part}_proj.weight"] = self(2 * HIDDEN, HIDDEN, scale=0.1)
        tensors[f"{name}mlp.down_proj.weight"] = self(HIDDEN, 2 * HIDDEN, scale=0.1)
        return tensors


def _write(
    folder: Path, config: dict[str, Any], num_layers: int, tensors: dict[str, torch.Tensor]
) -> Path:
    folder.mkdir(parents=True)
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(sizes | config))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def make_prompts(count: int, length: int = 300, seed: int = 1) -> list[list[int]]:
    """Prompts of random ids that share nothing."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def extra_config(region_chunks: int, **settings: Any) -> dict[str, Any]:
    """What a user pastes, with a region of so many chunks."""
    return {
        "spec_name": "StrataSpec",
        "spec_module_path": "stratakv.connector.vllm",
        "cpu_bytes_to_use": region_chunks * CHUNK_BYTES,
        "stratakv": settings,
    }


def package_path(folder: Path) -> str:
    """What PYTHONPATH has to be for another environment to import this package."""
    names = folder / "names"
    names.mkdir(parents=True, exist_ok=True)
    if not (names / "stratakv").exists():
        (names / "stratakv").symlink_to(ROOT)
    return str(names)


def regions_of(folder: Path) -> list[Path]:
    """What engines that logged in `folder` have left in shared memory."""
    logs = "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
    made = set(re.findall(r"/dev/shm/(vllm_offload_[\w-]+)\.mmap", logs))
    return [place for name in made for place in Path("/dev/shm").glob(f"{name}.*")]


class VllmEngine:
    """One engine's process; a context manager that stops it in order. `refused` is why it did not
    start, the outermost cause first."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        extra: dict[str, Any] | None = None,
        *,
        in_one_process: bool = True,
        process: Path = PROCESS,
        **arguments: Any,
    ) -> None:
        environment = os.environ | {
            "PYTHONPATH": package_path(folder),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_one_process else "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if arguments.get("tensor_parallel_size", 1) > 1:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        environment.pop("TRITON_INTERPRET", None)
        told = {"model": str(model), "extra": extra, "arguments": arguments}
        reading, writing = os.pipe()
        self.log = folder / f"vllm-{time.monotonic_ns()}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [PYTHON, str(process), json.dumps(told), str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                cwd=folder,
                pass_fds=[writing],
            )
        os.close(writing)
        self._answers = os.fdopen(reading)
        first = self._answer(START_SECONDS)
        self.refused: list[str] | None = first.get("refused")
        if self.refused is not None:
            self._end()

    def generate(
        self, prompts: list[list[int]], *, together: bool = False, seconds: float = ANSWER_SECONDS
    ) -> tuple[list[list[int]], list[int]]:
        """The tokens of each prompt, and how many of its tokens no forward pass computed."""
        command = {"generate": prompts, "max_tokens": MAX_TOKENS, "together": together}
        answer = self.do(command, seconds)
        return answer["tokens"], answer["cached"]

    def do(self, command: dict[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """One command of vllm_process.py."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer(seconds)

    def stop(self) -> None:
        """An orderly stop."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self._answer(ANSWER_SECONDS) == {"stopped": True}
        self._end()

    def kill(self) -> None:
        """As if its memory had run out."""
        self.process.kill()
        self._end()

    def __enter__(self) -> VllmEngine:
        assert self.refused is None, self.refused
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.process.poll() is not None:
            return
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _answer(self, seconds: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], seconds)
        line = self._answers.readline() if ready else ""
        if not line:
            self.process.kill()
            why = "ended" if ready else f"did not answer within {seconds:g} s"
            raise AssertionError(f"vLLM {why}:\n{self.log.read_text()[-6000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        self.process.wait(60)
        self._answers.close()
