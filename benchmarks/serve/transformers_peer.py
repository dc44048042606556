# SPDX-License-Identifier: Apache-2.0
"""A peer without a server: transformers' `generate` on the same model.

    serial   one prompt after the other, each with its own KV cache
    padded   all prompts in one batch, padded on the left to the longest prompt

As in the server's requests, sampling is greedy, in float32, and end tokens are ignored. The module
runs as a child of `peer.Peer`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..harness.peer import PeerRun, Work, serve

_PAD = 0  # any id, because padding is masked


def make_work(model_path: Path, threads: int) -> Work:
    """Load the model; return the function that answers prompts."""
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    # Without an end token, every answer has `max_new_tokens` tokens.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = _PAD

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[_PAD] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        tokens: list[list[int]] = out[:, longest:].tolist()
        return tokens

    def work(mode: str, prompts: list[list[int]], max_tokens: int) -> PeerRun:
        batches = [prompts] if mode == "padded" else [[prompt] for prompt in prompts]
        started = time.perf_counter()
        made = [ids for batch in batches for ids in generate(batch, max_tokens)]
        return PeerRun(time.perf_counter() - started, made)

    return work


if __name__ == "__main__":
    sys.exit(serve(make_work))
