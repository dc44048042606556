# SPDX-License-Identifier: Apache-2.0
"""The router in front of real nodes that do not fit: another model, and another dtype."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ...nursery_site.nursery_client import Nursery
from ...tiny_models import VOCAB, make_llama
from .test_real_nodes import ask, complete, figure, prompt_of, started, wait_for

pytestmark = pytest.mark.timeout(300)

FLAGS = ("--port", "0", "--num-blocks", "100", "--num-threads", "1", "--log-level", "warning")
NAME = "stratakv-embedded"


def test_a_node_of_another_model_or_dtype_answers_nobody(
    worker_nursery: Nursery, tmp_path: Path
) -> None:
    """And when the others are gone for good, it is the cluster."""
    llama = str(make_llama(tmp_path / "llama"))
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="stratakv-test-"))
        (right_process, right), (_, model), (_, dtype) = [
            stack.enter_context(started(worker_nursery, scratch, "serve", *words, *FLAGS))
            for words in (
                ("--dtype", "float64"),
                (llama, "--served-model-name", NAME, "--dtype", "float64"),
                ("--dtype", "float32"),
            )
        ]
        nodes = ("--prefill", dtype, "--decode", right, "--decode", model)
        flags = ("--port", "0", "--health-seconds", "0.5", "--log-level", "error")
        _, router = stack.enter_context(
            started(worker_nursery, scratch, "route", "--disaggregate-above", "10", *nodes, *flags)
        )

        def refused() -> dict[str, str]:
            listed: Any = json.loads(ask(router, "/nodes"))["nodes"]
            return {node["url"]: node["refused"] for node in listed if node["refused"]}

        wait_for(lambda: len(refused()) == 2, "both are refused")
        reasons = refused()
        told = {url: json.loads(ask(url, "/node")) for url in (right, model, dtype)}
        beside = f"and that of decode node {right} is"
        assert f"its kv_dtype is 'float32' {beside} 'float64'" in reasons[dtype]
        one, other = told[model]["fingerprint"], told[right]["fingerprint"]
        assert f"its fingerprint is '{one}' {beside} '{other}'" in reasons[model]
        for role in ("prefill", "decode"):
            assert figure(router, "stratakv_router_nodes_refused", f'"{role}"') == 1

        prompt = [token % VOCAB for token in prompt_of(1, 100)]
        body = {
            "model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 6,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        answers = {url: complete(url, body)["choices"] for url in (right, model)}
        assert answers[right] != answers[model]
        for _ in range(4):
            assert complete(router, body)["choices"] == answers[right]
        assert figure(router, "stratakv_router_requests_total", '"prefill"', '"ok"') == 0

        right_process.kill()
        wait_for(lambda: model not in refused(), "the other model is the cluster")
        assert complete(router, body)["choices"] == answers[model]
        assert "fingerprint" in refused()[dtype]
