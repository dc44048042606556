# SPDX-License-Identifier: Apache-2.0
"""A small random Llama with a tokenizer, and transformers' greedy answers for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

VOCAB = 257
END_ID = 256

# Options of small cpu and ssd tiers.
Tiers = dict[str, str]
Reference = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: 2 layers, a context of 256, a token for each byte and `<end>`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    fast.save(str(directory / "tokenizer.json"))

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Large weights make greedy text wander instead of repeating one token.
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def long_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a context of 8192, for requests that run for seconds."""
    directory = tmp_path_factory.mktemp("long-llama")
    for path in tiny_model.iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((tiny_model / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def greedy_reference(tiny_model: Path) -> Reference:
    """`greedy_reference(prompt, n)`: the n next tokens in float64, end tokens not being special."""
    import torch

    from ..tiny_models import greedy_reference

    # Threads that wait for each other at every operation take a hundred times longer where others
    # want the cores too.
    torch.set_num_threads(1)
    return partial(greedy_reference, tiny_model)


@pytest.fixture
def small_tiers(tmp_path: Path) -> Tiers:
    """Options of a small cpu tier and a small ssd tier, which survives the engine."""
    return {
        "kv_offload": "cpu,ssd",
        "kv_offload_load": "always",
        "kv_offload_cpu_bytes": "1MiB",
        "kv_offload_ssd_path": str(tmp_path / "ssd"),
        "kv_offload_ssd_bytes": "16MiB",
    }
