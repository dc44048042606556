# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch Llama with the parameter names of Hugging Face's implementation.

A state dict of this module is a valid weight file for `LlamaForCausalLM` with tied embeddings, so
the export does not rename weights.

The module computes losses for training and for the held-out evaluation, and writes weights. The
module has no key-value cache and no sampling."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

# Ranges of positions for which the evaluation reports separate losses.
BUCKETS = ((0, 512), (512, 1024), (1024, 2048), (2048, 4096))


@dataclass(frozen=True)
class Shape:
    """The sizes that define the network; the defaults are the shipped model."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def check(self) -> None:
        """Raise ValueError for sizes that do not fit together."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("The query heads must be a multiple of the key-value heads.")
        if self.head_dim % 2:
            raise ValueError("The head size must be even, because rotary positions work on pairs.")

    def hf_config(self, eos_id: int) -> dict[str, Any]:
        """The contents of config.json in the Hugging Face form."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            # Old versions of transformers read the flat RoPE key, new versions `rope_parameters`.
            "rope_parameters": rope,
            "rope_scaling": None,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "use_cache": True,
            "bos_token_id": eos_id,
            "eos_token_id": eos_id,
            # The type of computations: float32 gives the same text on every machine, and the
            # bfloat16 of the stored weights would not make so small a model faster.
            "dtype": "float32",
            "torch_dtype": "float32",
        }


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine tables of shape (length, head_dim) in Llama's half-split layout."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64), shape.rope_theta**-exponent)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().float(), both.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x`, of shape (batch, heads, length, head_dim), rotated by its positions."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        # The repeat is explicit because not every CPU has the grouped path of the fused kernel.
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class MLP(nn.Module):
    """The SwiGLU feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    """A pre-norm block: attention, then the feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Trunk(nn.Module):
    """Embedding, blocks and the last norm; a separate class only for the prefix `model.` of
    names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        y: Tensor = self.norm(x)
        return y


class Llama(nn.Module):
    """The whole network. The embedding matrix is also the output matrix, so there is no lm_head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        shape.check()
        self.shape = shape
        self.model = Trunk(shape)
        cos, sin = rope_tables(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def _initialise(self, generator: torch.Generator) -> None:
        """Draw normal weights of standard deviation 1/sqrt(fan-in); less for residual outputs."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            width = 0.02 if "embed" in name else weight.size(1) ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                width *= (2 * self.shape.num_hidden_layers) ** -0.5
            nn.init.normal_(weight, 0.0, width, generator=generator)

    def forward(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy in nats of `targets` given `ids`, each (batch, length)."""
        length = ids.size(1)
        hidden = self.model(ids, self.cos[:length], self.sin[:length])
        logits = F.linear(hidden, self.model.embed_tokens.weight).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return loss if reduction == "mean" else loss.view_as(targets)

    def count(self) -> int:
        """Return the number of parameters; the shared embedding and output matrix counts once."""
        return sum(p.numel() for p in self.parameters())

    def rounded(self) -> dict[str, Tensor]:
        """Return the weights as they are shipped: in bfloat16, with Hugging Face names."""
        return {n: p.detach().bfloat16().contiguous() for n, p in self.named_parameters()}


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in the folder of `path`, then rename it, so that `path` is always complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    write(beside)
    # The safetensors writer makes files that only their owner can read.
    beside.chmod(0o644)
    os.replace(beside, path)


def save_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, which appears complete or not at all."""
    write_atomically(path, lambda beside: save_file(weights, beside, metadata=metadata))


@torch.no_grad()
def evaluate(model: Llama, stream: Tensor, text_bytes: int) -> dict[str, Any]:
    """Return the bits per byte of a token stream of `text_bytes` bytes, and the losses by position.
    The stream is evaluated in windows of the longest length, with the rounded weights that are
    shipped. A shorter last window does not count for the losses by position."""
    length = model.shape.max_position_embeddings
    shipped = Llama(model.shape)
    shipped.load_state_dict({name: weight.float() for name, weight in model.rounded().items()})
    total, full = 0.0, []
    for at in range(0, len(stream) - 1, length):
        ids = stream[at : at + length + 1].long()[None]
        loss = shipped(ids[:, :-1], ids[:, 1:], reduction="none")[0]
        total += loss.double().sum().item()
        if len(loss) == length:
            full.append(loss)
    mean = torch.stack(full).mean(0) if full else torch.full((length,), math.nan)
    return {
        "held_out_bits_per_byte": total / math.log(2) / text_bytes,
        "held_out_nats_per_token": total / (len(stream) - 1),
        "held_out_tokens": len(stream),
        "held_out_bytes": text_bytes,
        "nats_by_position": {f"{a}-{b}": mean[a:b].mean().item() for a, b in BUCKETS},
    }
