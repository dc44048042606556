# SPDX-License-Identifier: Apache-2.0
"""Adapters in Python: every call takes one by name, and they come and go between calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratakv import LLM, SamplingParams
from stratakv.engine.request.beam_params import BeamSearchParams
from stratakv.tiers.settings.values import ConfigError

from .written_adapters import write_adapter

PROMPT = list(range(40, 70))
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float64", "num_blocks": 80, "num_threads": 1, "max_num_seqs": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(path / name, tiny_model, seed) for seed, name in enumerate("ab")}


def streamed(llm: LLM, adapter: str) -> list[int]:
    return [
        token for each in llm.stream(PROMPT, PARAMS, adapter=adapter) for token in each.token_ids
    ]


def in_parts(llm: LLM, adapter: str) -> list[int]:
    with llm.open_session(PARAMS, adapter=adapter) as session:
        session.feed(PROMPT[:9])
        return list(session.answer(PROMPT[9:]).outputs[0].token_ids)


def of_beams(llm: LLM, adapter: str) -> list[int]:
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    [found] = llm.beam_search([PROMPT], params, adapter=adapter)
    return [int(token) for token in found.sequences[0].tokens]


def embedded(llm: LLM, adapter: str) -> list[float]:
    return list(llm.embed([PROMPT], adapter=adapter)[0].outputs.embedding)


CALLS: list[Callable[[LLM, str], list[Any]]] = [
    lambda llm, adapter: list(llm.generate([PROMPT], PARAMS, adapter=adapter)[0].token_ids),
    streamed, in_parts, of_beams, embedded,
]  # fmt: skip


def test_every_call_takes_an_adapter(tiny_model: Path, folders: dict[str, Path]) -> None:
    with LLM(tiny_model, lora_modules=folders, **OPTIONS) as llm:
        assert llm.adapters.names == ["a", "b"]
        said = [[tuple(call(llm, name)) for name in ("", "a", "b")] for call in CALLS]
        assert all(len(set(of_call)) == 3 for of_call in said)
        assert said[0] == said[1] == said[2]
        for call in CALLS:
            with pytest.raises(
                ValueError, match=r"adapter takes one of those loaded \(a, b\), not"
            ):
                call(llm, "c")


@pytest.mark.parametrize("backend", ["uni", pytest.param("mp", marks=pytest.mark.slow)])
def test_adapters_come_and_go(
    tiny_model: Path, folders: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    ask = CALLS[0]
    with LLM(tiny_model, enable_lora=True, distributed_executor_backend=backend, **OPTIONS) as llm:
        base = ask(llm, "")
        with pytest.raises(ValueError, match="those loaded \\(none\\), not 'x'"):
            ask(llm, "x")
        loaded = llm.adapters.load("x", folders["a"])
        first = ask(llm, "x")
        with pytest.raises(ValueError, match="an adapter x is loaded"):
            llm.adapters.load("x", folders["b"])
        with pytest.raises(ValueError, match=r"adapter_config.json is missing"):
            llm.adapters.load("y", tmp_path)
        for name in ("", "x=y", 3):
            with pytest.raises(ConfigError, match="name takes a text"):
                llm.adapters.load(name, folders["b"])  # type: ignore[arg-type]
        for name in (tiny_model.name, f"{tiny_model}/"):
            with pytest.raises(ValueError, match="is the name of the model itself; give the"):
                llm.adapters.load(name, folders["b"])
        other = llm.adapters.load("x", folders["b"], replaces=True)
        assert other.fingerprint != loaded.fingerprint
        assert ask(llm, "x") not in (base, first)
        llm.adapters.load("again", folders["a"])
        assert ask(llm, "again") == first
        for name in ("x", "again"):
            llm.adapters.unload(name)
        with pytest.raises(ValueError, match="the adapter x is not loaded"):
            llm.adapters.unload("x")
        for name in ([], {}, None):
            with pytest.raises(ConfigError, match="name takes a text"):
                llm.adapters.unload(name)  # type: ignore[arg-type]
        assert llm.adapters.names == []
        assert ask(llm, "") == base
