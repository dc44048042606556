# SPDX-License-Identifier: Apache-2.0
"""Embeddings of prompts through a core equal transformers' hidden states, however steps cut
prompts, overlap or send them back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from stratakv.connector.messages import Elsewhere
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, RequestExtras, TokenOutput

from ...stepping import step_outputs
from .conftest import MakeCore, config_of, prompt_of, request

Vectors = NDArray[np.float64]
Reference = Callable[[Sequence[int], str], Vectors]
NEAR = {"rtol": 1e-4, "atol": 1e-5}  # cosines and norms of transformers are float32


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).model

    @torch.inference_mode()
    def pooled(prompt: Sequence[int], pooling: str) -> Vectors:
        states = model(torch.tensor([prompt])).last_hidden_state[0]
        found: Vectors = (states[-1] if pooling == "last" else states.mean(0)).numpy()
        return found

    return pooled


def asking(request_id: str, prompt: Sequence[int], pooling: str, **fields: Any) -> AddRequest:
    extras = RequestExtras(pooling=pooling)
    return request(request_id, prompt, **{"max_tokens": 1, "extras": extras, **fields})


def embeddings(core: EngineCore, *requests: AddRequest) -> dict[str, Vectors]:
    """Each comes once, with the first token."""
    outputs = [output for each in requests for output in core.add(each)]
    found: dict[str, Vectors] = {}
    ended: dict[str, TokenOutput] = {}
    steps = step_outputs(core)
    while len(ended) < len(requests):
        for output in outputs:
            if output.embedding is not None:
                assert output.new_token_ids and output.request_id not in found
                found[output.request_id] = np.frombuffer(output.embedding, "<f8")
            if output.finish_reason is not None:
                ended[output.request_id] = output
                assert output.error is None
        outputs = next(steps) if len(ended) < len(requests) else []
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_backend": "kernels"},
        pytest.param({"distributed_executor_backend": "mp"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_both_poolings_are_those_of_transformers(
    make_core: MakeCore, reference: Reference, options: dict[str, Any]
) -> None:
    """Of prompts of one token and of several chunks, beside one that goes on to generate."""
    core = make_core(**options, max_num_batched_tokens=32)
    lengths = {"a": 1, "b": 8, "c": 31, "d": 150}
    prompts = {name: prompt_of(length, 1) for name, length in lengths.items()}
    requests = [
        asking(f"{name} {pooling}", prompt, pooling)
        for name, prompt in prompts.items()
        for pooling in ("last", "mean")
    ]
    found = embeddings(core, request("other", prompt_of(40), max_tokens=12), *requests)
    assert found.keys() == {each.request_id for each in requests}
    for request_id, vector in found.items():
        name, pooling = request_id.split()
        expected = reference(prompts[name], pooling)
        np.testing.assert_allclose(vector, expected, **NEAR)


def test_prefix_hits_are_for_the_last_token_only(make_core: MakeCore, reference: Reference) -> None:
    """A cached token has no hidden state, so a mean computes all of them."""
    core, prompt = make_core(), prompt_of(60)
    embeddings(core, request("warm", prompt))
    for pooling, cached in (("last", 56), ("mean", 0)):
        before = core.scheduler.stats()["scheduled_tokens"]
        [vector] = embeddings(core, asking(pooling, prompt, pooling)).values()
        assert core.scheduler.stats()["scheduled_tokens"] - before == 60 - cached
        np.testing.assert_allclose(vector, reference(prompt, pooling), **NEAR)


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_and_overlapping_steps_change_nothing(
    tiny_model: Path, reference: Reference, depth: int
) -> None:
    """Prompts are cut into chunks and sent back in the middle, by others that generate."""
    core = EngineCore(
        config_of(tiny_model, num_blocks=26, max_model_len=150, admit_below=1.0,
                  preempt_above=1.0, max_num_batched_tokens=24),
        max_steps_in_flight=depth,
    )  # fmt: skip
    try:
        prompts = {f"{n} {p}": prompt_of(100, n) for n, p in enumerate(("mean", "last") * 3)}
        requests = [
            asking(name, prompt, name.split()[1], max_tokens=1) for name, prompt in prompts.items()
        ]
        others = [request(f"other {n}", prompt_of(30, n), max_tokens=60) for n in range(3)]
        mixed = [each for pair in zip(others, requests, strict=False) for each in pair]
        found = embeddings(core, *mixed, *requests[3:])
        assert core.scheduler.counts["preemptions"] > 0
        assert found.keys() == prompts.keys()
        for name, vector in found.items():
            expected = reference(prompts[name], name.split()[1])
            np.testing.assert_allclose(vector, expected, **NEAR)
    finally:
        core.shutdown(5.0)


def test_an_answer_may_follow(make_core: MakeCore, reference: Reference) -> None:
    """The vector comes with its first token, and the tokens are those without it."""
    core, prompt = make_core(), prompt_of(40)
    plain = run_all(core, request("plain", prompt))
    both = run_all(core, asking("both", prompt, "mean", max_tokens=6))
    tokens = [[token for each in outputs for token in each.new_token_ids]
              for outputs in (plain, both)]  # fmt: skip
    assert tokens[0] == tokens[1] and len(tokens[0]) == 6
    [vector] = [each.embedding for each in both if each.embedding is not None]
    np.testing.assert_allclose(np.frombuffer(vector), reference(prompt, "mean"), **NEAR)


def run_all(core: EngineCore, one: AddRequest) -> list[TokenOutput]:
    outputs = core.add(one)
    for more in step_outputs(core):
        outputs += more
        if outputs and outputs[-1].finish_reason is not None:
            return outputs
    raise AssertionError("it did not end")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pooling": "max"}, "pooling takes last or mean, not 'max'"),
        ({"pooling": "last", "hand_over": True}, "nothing of it is handed over"),
    ],
)
def test_poolings_that_cannot_be(make_core: MakeCore, fields: dict[str, Any], words: str) -> None:
    [output] = make_core().add(request("r", prompt_of(9), extras=RequestExtras(**fields)))
    assert output.finish_reason == "error" and words in (output.error or "")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nodes_of_other_roles_make_them_alone(make_core: MakeCore, role: str) -> None:
    """They wait for nobody, and keep nothing for others."""
    core = make_core()
    builder = core._adder._builder
    builder._role = role
    plain, pooled = request("plain", prompt_of(20)), asking("pooled", prompt_of(20), "last")
    assert builder.make_request(plain).hands_over == (role == "prefill")
    built = builder.make_request(pooled)
    assert not built.hands_over and built.tail_hash is None
    assert builder.elsewhere(pooled) is Elsewhere.NO
    assert (builder.elsewhere(plain) is Elsewhere.PERHAPS) == (role == "decode")
