# SPDX-License-Identifier: Apache-2.0
"""Every family and its options, through the whole engine, against transformers.

In float64 the greedy tokens are equal one by one, with prompts computed in chunks and among each
other's decodes, and again out of the prefix cache. In the smaller types the logits are close.
Windows are a third of the longest prompt and less.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.models.decoder import Decoder
from stratakv.engine.models.dtypes import dtype_name

from .tiny_models import VOCAB, greedy_reference, make_model, reference_logits

OUTPUT_TOKENS = 40
BLOCK_SIZE = 8
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
        "original_max_position_embeddings": 128}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 256}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5}
HIGH_BASE = {"rope_type": "default", "rope_theta": 1000000.0}

TIED = {"tie_word_embeddings": True}
ONE_KV_HEAD = {"num_key_value_heads": 1}
EVERY_HEAD = {"num_key_value_heads": 6}
WIDE_HEADS = {"head_dim": 20}
OWN_HEADS = {"head_dim": 8}  # hidden over heads: 48 / 6
NO_WINDOW = {"sliding_window": None}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 37}
OLD_SPELLING = {"old_spelling": True}


GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22,
           "logits_scaling": 4.0}  # fmt: skip
MINISTRAL = YARN | {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.4}
# Of a family either of the first two is the number.
EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2,
           "moe_intermediate_size": 24}  # fmt: skip
GEMMA = {"rope_parameters": None, "tie_word_embeddings": True, "head_dim": 16, "sliding_window": 45,
         "query_pre_attn_scalar": 24, "pad_token_id": 0}  # fmt: skip


ATTENTION_ALONE = {"layer_types": ["full_attention"] * 3}


def rope(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": dict(parameters)}


# A name's first word is the model type.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama-grouped-sharded": {"max_shard_size": "60KB"},
    "llama-biases-every-head": EVERY_HEAD | {"attention_bias": True, "mlp_bias": True},
    "llama-tied-one-kv-head-dynamic": TIED | ONE_KV_HEAD | rope(DYNAMIC),
    "llama-llama3-old-spelling": rope(LLAMA3) | OLD_SPELLING,
    "llama-wide-heads-yarn": WIDE_HEADS | rope(YARN),
    "mistral-grouped": NO_WINDOW,
    "mistral-window": {"sliding_window": 50},
    "mistral-window-of-a-block-yarn": {"sliding_window": BLOCK_SIZE} | rope(YARN),
    "mistral-one-kv-head-wide-heads": NO_WINDOW | ONE_KV_HEAD | WIDE_HEADS,
    "mistral-tied-linear-old-spelling": NO_WINDOW | TIED | rope(LINEAR) | OLD_SPELLING,
    "mistral-every-head-yarn": NO_WINDOW | EVERY_HEAD | rope(YARN),
    "qwen2-grouped-high-base": rope(HIGH_BASE),
    "qwen2-tied-one-kv-head": TIED | ONE_KV_HEAD,
    "qwen2-wide-heads-every-head": WIDE_HEADS | EVERY_HEAD,
    "qwen2-yarn-old-spelling": rope(YARN) | OLD_SPELLING,
    "qwen2-window-of-upper-layers": QWEN_WINDOW | {"max_window_layers": 1},
    "qwen3-grouped-high-base": OWN_HEADS | rope(HIGH_BASE),
    "qwen3-tied-yarn": OWN_HEADS | TIED | rope(YARN),
    "qwen3-biases-one-kv-head": OWN_HEADS | ONE_KV_HEAD | {"attention_bias": True},
    "qwen3-wide-heads-every-head": WIDE_HEADS | EVERY_HEAD,
    "qwen3-longrope-sharded": OWN_HEADS | rope(LONGROPE) | {"max_shard_size": "60KB"},
    "qwen3-llama3-window-by-layer": OWN_HEADS | QWEN_WINDOW | rope(LLAMA3)
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "gemma3_text-pattern": GEMMA | {"sliding_window_pattern": 3},
    "gemma3_text-by-layer-linear-capped-one-kv-head": GEMMA | ONE_KV_HEAD
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"],
       "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 300.0}},
       "final_logit_softcapping": 20.0, "sliding_window": 9},
    "gemma3_text-old-spelling": GEMMA | {"layer_types": None, "rope_theta": 50000.0,
       "rope_local_base_freq": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
       "num_hidden_layers": 7},
    "gemma2-capped-every-other": GEMMA | {"attn_logit_softcapping": 9.0},
    "phi3-partly-turned-window": {"pad_token_id": 0, "sliding_window": 50, "hidden_size": 96,
       "num_attention_heads": 6, "head_dim": 16}
    | rope({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    "phi3-longrope-sharded": {"pad_token_id": 0, "sliding_window": None, "max_shard_size": "60KB",
       "hidden_size": 96, "original_max_position_embeddings": 256}
    | rope({**LONGROPE, "short_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            "long_factor": [1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]}),
    "granite-biases-wide-heads": GRANITE | WIDE_HEADS | {"attention_bias": True, "mlp_bias": True},
    "olmo2-grouped": {"pad_token_id": 0},
    "smollm3-still-layers": {"pad_token_id": 0, "num_hidden_layers": 5},
    "smollm3-still-by-layer": {"pad_token_id": 0, "no_rope_layers": [0, 1, 0]},
    "ministral3-growing": OWN_HEADS | {"pad_token_id": 0, "sliding_window": None} | rope(MINISTRAL),
    "mixtral-window": EXPERTS | {"sliding_window": 50},
    "qwen2_moe-shared": EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen2_moe-every-second-normalised": EXPERTS | {"shared_expert_intermediate_size": 40,
       "decoder_sparse_step": 2, "norm_topk_prob": True},
    "qwen3_moe-normalised-sharded": EXPERTS | WIDE_HEADS | {"norm_topk_prob": True,
       "max_shard_size": "60KB", "seed": 4},
    "qwen3_moe-one-dense-window": EXPERTS | OWN_HEADS | {"mlp_only_layers": [1],
       "use_sliding_window": True, "sliding_window": 37},
    "olmoe-grouped": EXPERTS | OWN_HEADS | {"pad_token_id": 0},
    "granitemoe-grouped": EXPERTS | GRANITE,
    # Families of hybrids, without a layer that carries a state.
    "granitemoehybrid-attention-alone": GRANITE | OWN_HEADS | ATTENTION_ALONE
    | {"num_local_experts": 0, "shared_intermediate_size": 40, "mamba_n_heads": 6,
       "position_embedding_type": "rope"},
    "granitemoehybrid-experts-still": EXPERTS | GRANITE | OWN_HEADS | ATTENTION_ALONE
    | {"mamba_n_heads": 6, "shared_intermediate_size": 40, "seed": 5},
    "qwen3_next-attention-alone": EXPERTS | ATTENTION_ALONE
    | rope({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})
    | {"shared_expert_intermediate_size": 40},
}  # fmt: skip


def make(directory: Path, name: str, **changes: Any) -> Path:
    options = CHECKPOINTS[name] | changes
    old_spelling = options.pop("old_spelling", False)
    make_model(directory, name.split("-")[0], **{"seed": 3} | options)
    if old_spelling:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        scaling["type"] = scaling.pop("rope_type")
        config["rope_scaling"] = scaling
        file.write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model"), request.param)


def running(directory: Path, **options: Any) -> LLM:
    options = {"dtype": "float64", "num_blocks": 160, "num_threads": 1} | options
    return LLM(
        directory, block_size=BLOCK_SIZE, max_num_batched_tokens=48, max_num_seqs=4, **options
    )


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def test_greedy_tokens_equal_transformers(checkpoint: Path) -> None:
    prompts = [prompt(1, 5), prompt(2, 61), prompt(3, 150)]
    with running(checkpoint) as llm:
        fresh, cached = llm.generate(prompts, GREEDY), llm.generate(prompts, GREEDY)
    for text, first, second in zip(prompts, fresh, cached, strict=True):
        expected = greedy_reference(checkpoint, text, OUTPUT_TOKENS, guess=first.token_ids)
        assert len(set(expected)) > OUTPUT_TOKENS // 8, "a repeating answer would prove little"
        assert first.token_ids == expected
        assert second.token_ids == expected
        whole_blocks = (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, whole_blocks)


def test_a_head_that_differs_from_tied_embeddings_is_used(tmp_path: Path) -> None:
    """config.json says that they are one; transformers 5 takes both as they are stored."""
    model = make(tmp_path / "model", "llama-grouped-sharded")
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | TIED))
    text = prompt(5, 40)
    with running(model) as llm:
        [answer] = llm.generate([text], GREEDY)
    assert answer.token_ids == greedy_reference(model, text, OUTPUT_TOKENS)


def largest_error(directory: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far logits are off transformers' in the same type, as a share of the largest logit, at
    the worst position of an answer."""
    recorded = []
    compute = Decoder.logits

    def record(self: Decoder, hidden: torch.Tensor, *wanted: Any) -> torch.Tensor:
        recorded.append(compute(self, hidden, *wanted).clone())
        return recorded[-1]

    monkeypatch.setattr(Decoder, "logits", record)
    text = prompt(4, 100)
    with running(directory, dtype=dtype_name(dtype)) as llm:
        [answer] = llm.generate([text], GREEDY)
    # transformers sees the tokens that were chosen here, so a draw between two does not matter.
    sequence = text + answer.token_ids[:-1]
    expected = reference_logits(directory, sequence, dtype)[len(text) - 1 :].double()
    error = (torch.cat(recorded) - expected).abs().amax(dim=1) / expected.abs().amax(dim=1)
    assert len(error) == OUTPUT_TOKENS
    return float(error.max())


def test_logits_in_float32(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest_error(checkpoint, torch.float32, monkeypatch) < 1e-4


HALF = ("mistral-grouped", "qwen2-tied-one-kv-head", "qwen3-tied-yarn", "gemma3_text-pattern")


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=["bfloat16", "float16"]
)
@pytest.mark.parametrize("name", HALF)
def test_logits_in_half_types(
    name: str,
    dtype: torch.dtype,
    bound: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert largest_error(make(tmp_path, name), dtype, monkeypatch) < bound
