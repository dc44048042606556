# SPDX-License-Identifier: Apache-2.0
"""Over HTTP: a request whose blocks could not be loaded fails with the reason, others go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from stratakv.tiers.settings.values import MIB

from ...offload_config import offload_config
from .conftest import MODEL_NAME, LiveServer

PROMPT = list(range(10, 90))
REQUEST = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}


@pytest.fixture
def drill(
    server: LiveServer, model_path: Path, tmp_path: Path
) -> Iterator[tuple[httpx.Client, LiveServer]]:
    """A server whose ssd tier has the blocks of PROMPT and cannot bring them."""
    offload = offload_config(
        tiers=("cpu", "ssd"), load="always", cpu_bytes=1 * MIB, ssd_bytes=16 * MIB,
        ssd_path=tmp_path / "ssd",
    )  # fmt: skip
    first = type(server)(model_path, offload=offload)
    with httpx.Client(base_url=first.url, timeout=30, verify=False) as http:
        assert http.post("/v1/completions", json=REQUEST).status_code == 200
    first.stop()
    faulty = dataclasses.replace(offload, load_failure="fail", faults="ssd:load:error=1")
    live = type(server)(model_path, offload=faulty)
    with httpx.Client(base_url=live.url, timeout=30, verify=False) as http:
        yield http, live
    live.stop()


def test_it_is_a_500_with_the_reason(drill: tuple[httpx.Client, LiveServer]) -> None:
    http, live = drill
    failed = http.post("/v1/completions", json=REQUEST)
    error = failed.json()["error"]
    assert (failed.status_code, error["type"], error["code"]) == (
        500, "engine_error", "request_failed",
    )  # fmt: skip
    assert "blocks did not come from ssd (InjectedFault)" in error["message"]
    assert "--kv-offload-load-failure fail" in error["message"]
    other = http.post("/v1/completions", json=REQUEST | {"prompt": list(range(100, 140))})
    assert other.status_code == 200
    assert other.json()["choices"][0]["finish_reason"] in ("length", "stop")
    assert live.stats()["ended_error"] == 1


def test_a_stream_ends_with_the_error(drill: tuple[httpx.Client, LiveServer]) -> None:
    http, _ = drill
    with http.stream("POST", "/v1/completions", json=REQUEST | {"stream": True}) as response:
        text = response.read().decode()
    assert "blocks did not come from ssd (InjectedFault)" in text
