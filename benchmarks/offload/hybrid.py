# SPDX-License-Identifier: Apache-2.0
"""The section `hybrid`, for a model in which most layers have recurrent states, not attention.

The section compares the times to the first token of single requests: with a long prefix in the
tiers (K and V, and the states at the end of the prefix), and with the whole prompt computed. The
model is a small config.json in Qwen3.5's shape, with random weights made by the engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from ...engine.cache.group_spec import num_state_slots, state_bytes
from ...engine.models.checkpoint.tensor_shapes import expected_tensors
from ...engine.models.spec.spec_parser import load_model_spec
from ...engine.plan.memory_plan import weight_bytes
from .scale import SUFFIX_TOKENS
from .workbench import (
    FILLERS,
    Bench,
    Figures,
    MeasuredEngine,
    Prompts,
    Run,
    RunFailed,
    blocks_of,
    greedy,
    prime,
)

DTYPE = "float32"
# Eight layers, of which every fourth has attention: 120 MB of weights in float32, 1 MB of states.
CONFIG: Figures = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
}
_MAX_SEQS = 4


def make_model(folder: Path) -> Path:
    """Write the model's config.json to `folder`, which is created; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def hybrid(bench: Bench) -> tuple[Figures, dict[str, float]]:
    """Measure the time to the first token with a prefix in each tier. Raises RunFailed if too few
    tokens come from the tier."""
    model = make_model(bench.scratch / "hybrid")
    own, spec = bench.of_model(model), load_model_spec(model)
    states = state_bytes(spec.state, DTYPE)
    assert states is not None
    num_pages = -(-states.num_bytes // own.layout.page_bytes)
    tiers = ("cpu", "ssd")
    figures: Figures = {tier: _first_tokens_from(own, tier, num_pages) for tier in tiers}
    figures["model"] = {
        "weight_bytes": weight_bytes(expected_tensors(spec), DTYPE),
        "bytes_per_token": own.layout.token_bytes,
        "state_bytes": states.num_bytes,
        "running_state_bytes": num_state_slots(_MAX_SEQS) * states.num_bytes,
        "pages_per_checkpoint": num_pages,
    }
    return figures, {f"ttft_cold_over_{tier}_hybrid": figures[tier]["wall_ratio"] for tier in tiers}


def _first_tokens_from(bench: Bench, tier: str, num_pages: int) -> Figures:
    prefix = bench.scale.hybrid_prefix
    request_tokens = prefix + SUFFIX_TOKENS + 1
    # The blocks of two questions: their K and V, a checkpoint of the states at the end of each
    # question, and a checkpoint at the end of the prefix.
    request = blocks_of(prefix) + 2 * blocks_of(SUFFIX_TOKENS + 1) + 3 * num_pages
    options = {
        "num_blocks": 1 + 2 * request,
        "max_model_len": request_tokens,
        "max_num_seqs": _MAX_SEQS,
        "load_format": "dummy",
    }
    slab, num_known = bench.slab_for(request)
    room = (num_known + FILLERS) * request
    sizes = (room, 0) if tier == "cpu" else (slab, 2 * room)

    def ask(engine: MeasuredEngine, prompts: Prompts) -> Run:
        engine.forget("pool")
        return engine.run(prompts, greedy(1))

    with (
        bench.plain(options) as plain,
        bench.tiered(options, *sizes, kv_offload_load="always") as engine,
    ):
        # With the second question, the engine detects that the prefix is shared, and keeps the
        # states at the end of the prefix.
        known = prime(bench, engine, prefix, num_known, questions=2)
        next_known = itertools.cycle(known)

        def prompts_of(_: int) -> Prompts:
            return [next(next_known) + bench.tokens(SUFFIX_TOKENS)]

        what = f"hybrid from {tier}"
        pairs = bench.pairs(what, engine, plain, prompts_of, ask)
    least = prefix - prefix % bench.layout.block_size
    for run in pairs.with_tiers:
        if (found := run.cached_tokens[tier]) < least:
            raise RunFailed(f"{what}: {found} of {prefix} tokens came from there")
    return pairs.figures(request_tokens) | {"prefix_tokens": prefix}
