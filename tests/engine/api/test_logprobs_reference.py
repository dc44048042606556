# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities over HTTP are transformers' log_softmax of the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ...tiny_models import reference_logits

PROMPT = [5, 9, 33, 270, 4, 11, 12, 13]
TOLERANCE = 2e-4


def _reference(model_path: Path, ids: list[int]) -> torch.Tensor:
    """Row i tells of the token behind place i."""
    return torch.log_softmax(reference_logits(model_path, ids, torch.float64), dim=-1)


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_of_a_completion_and_its_prompt(
    http: httpx.Client, model_path: Path, temperature: float
) -> None:
    body: dict[str, Any] = {
        "prompt": PROMPT, "max_tokens": 12, "temperature": temperature, "seed": 3, "logprobs": 4,
        "prompt_logprobs": 3, "repetition_penalty": 1.5, "ignore_eos": True,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    ids = [*PROMPT, *choice["token_ids"]]
    reference = _reference(model_path, ids)
    form = choice["logprobs"]
    for place, token in enumerate(choice["token_ids"], len(PROMPT)):
        row = reference[place - 1]
        index = place - len(PROMPT)
        assert form["token_logprobs"][index] == pytest.approx(float(row[token]), abs=TOLERANCE)
        best = row.topk(4)
        expected = {f"token_id:{i}": float(row[i]) for i in [token, *best.indices.tolist()]}
        assert form["top_logprobs"][index] == pytest.approx(expected, abs=TOLERANCE)
    assert choice["prompt_logprobs"][0] is None
    for place in range(1, len(PROMPT)):
        row = reference[place - 1]
        given = {int(i): each["logprob"] for i, each in choice["prompt_logprobs"][place].items()}
        wanted = {PROMPT[place], *row.topk(3).indices.tolist()}
        assert given == pytest.approx({i: float(row[i]) for i in wanted}, abs=TOLERANCE)
        own = choice["prompt_logprobs"][place][str(PROMPT[place])]
        assert own["rank"] == int((row > row[PROMPT[place]]).sum()) + 1


def test_of_a_chat(http: httpx.Client, model_path: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": "grüße 🙂"}], "max_tokens": 10, "seed": 1, "n": 2,
        "logprobs": True, "top_logprobs": 5, "ignore_eos": True, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    first, second = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert first["token_ids"] != second["token_ids"]
    for choice in (first, second):
        prompt = choice["prompt_token_ids"]
        reference = _reference(model_path, [*prompt, *choice["token_ids"]])
        for place, each in enumerate(choice["logprobs"]["content"], len(prompt)):
            row = reference[place - 1]
            token = int(each["token"].removeprefix("token_id:"))
            assert token == choice["token_ids"][place - len(prompt)]
            assert each["logprob"] == pytest.approx(float(row[token]), abs=TOLERANCE)
            values = [top["logprob"] for top in each["top_logprobs"]]
            assert values == pytest.approx(row.topk(5).values.tolist(), abs=TOLERANCE)
