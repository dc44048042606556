# SPDX-License-Identifier: Apache-2.0
"""Cores on the tiny model, stepped by hand: requests for them, and what became of these."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.config.engine_config import EngineConfig
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.structured.processes import limited_thread
from stratakv.tiers.remote import remote_settings

from ...stepping import step_outputs

VOCAB = 257
Reference = Callable[[Sequence[int], int], list[int]]
MakeCore = Callable[..., EngineCore]


def config_of(model: Path, **options: Any) -> EngineConfig:
    defaults = {"dtype": "float64", "block_size": 8, "num_blocks": 80, "max_num_seqs": 8,
                "max_num_batched_tokens": 64, "num_threads": 1}  # fmt: skip
    return engine_config(model, defaults | options)


@pytest.fixture(scope="module", params=["full", "windowed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models whose layers see everything, and of which some see a window."""
    from ...tiny_models import make_llama, make_model

    path = tmp_path_factory.mktemp("model")
    if request.param == "full":
        return make_llama(path, vocab_size=VOCAB)
    return make_model(path, "qwen2", vocab_size=VOCAB, use_sliding_window=True, sliding_window=21,
                      max_window_layers=1)  # fmt: skip


@pytest.fixture
def make_core(tiny_model: Path) -> Iterator[MakeCore]:
    """Makes cores on the tiny model and shuts them down."""
    cores: list[EngineCore] = []

    def make(progress: Callable[[str], None] | None = None, **options: Any) -> EngineCore:
        cores.append(EngineCore(config_of(tiny_model, **options), progress=progress))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown(5.0)


@pytest.fixture
def patient_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of cache servers wait for answers however busy the machine is. As shipped a look-up
    has a tenth of a second, and what comes later is computed."""
    plain = remote_settings.RemoteSettings
    deadlines = {
        "attach_seconds": 20.0,
        "lookup_seconds": 10.0,
        "load_seconds": 20.0,
        "store_seconds": 20.0,
    }

    def patient(**settings: Any) -> remote_settings.RemoteSettings:
        return plain(**{**settings, **deadlines})

    monkeypatch.setattr(remote_settings, "RemoteSettings", patient)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(VOCAB - 1), k=length)


def request(request_id: str, prompt: Sequence[int], **fields: Any) -> AddRequest:
    """A greedy request for 6 tokens; `fields` of AddRequest and of SamplingParams."""
    of_request = {k: fields.pop(k) for k in list(fields) if k in AddRequest.__struct_fields__}
    params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **fields})
    return AddRequest(request_id, pack_token_ids(prompt), params, **of_request)


@pytest.fixture
def no_thread_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other tests take all processors, a request would else sit steps out until the others,
    with which it is to compete for room, have ended."""
    monkeypatch.setattr(limited_thread, "_may_come_back", lambda: False)


def finish(core: EngineCore, outputs: list[TokenOutput], count: int) -> dict[str, TokenOutput]:
    """Step until `count` requests have ended; what each of them got, merged."""
    merged: dict[str, TokenOutput] = {}
    ended = 0
    for more in chain([outputs], step_outputs(core)):
        for output in more:
            whole = merged.setdefault(output.request_id, TokenOutput(output.request_id, []))
            whole.new_token_ids += output.new_token_ids
            whole.cached_tokens_by_tier = (
                output.cached_tokens_by_tier or whole.cached_tokens_by_tier
            )
            whole.finish_reason, whole.error = output.finish_reason, output.error
            whole.timings = output.timings
            whole.ends_without_token = output.ends_without_token
            ended += output.finish_reason is not None
        if ended == count:
            return merged
    raise AssertionError(f"requests did not end: {merged}")


def run(core: EngineCore, *requests: AddRequest) -> dict[str, TokenOutput]:
    return finish(core, [o for r in requests for o in core.add(r)], len(requests))
