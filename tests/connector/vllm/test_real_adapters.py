# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with LoRA adapters: with StrataConnector the tokens are those of vLLM without, and
two adapters of one name share nothing, in one life and across restarts. StrataSpec refuses them.

Needs what test_real_vllm.py needs: `make test-vllm` and docs/vllm.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .adapter_files import RANK, make_adapter
from .real_vllm import (
    WHOLE,
    ConnectorEngine,
    SpecEngine,
    check_refused,
    model,
    needs_vllm,
    on_disk,
    prompts,
)
from .vllm_engine import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MAX_TOKENS,
    VllmEngine,
)

__all__ = ["model", "prompts"]

pytestmark = needs_vllm

WITH_LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
SIZES: dict[str, Any] = {
    "ins": HIDDEN, "layers": LAYERS,
    "outs": (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM),
}  # fmt: skip

Tokens = list[list[int]]


def lora(number: int, path: Path, name: str = "ann", **more: Any) -> dict[str, Any]:
    return {"lora_name": name, "lora_int_id": number, "lora_path": str(path), **more}


def generate(
    engine: VllmEngine, prompts: Tokens, adapter: dict[str, Any] | None
) -> tuple[Tokens, list[int]]:
    """The tokens, and how many of each prompt were not computed, with vLLM's own cache empty."""
    command = {"generate": prompts, "max_tokens": MAX_TOKENS, "lora": adapter}
    answer = engine.do(command)
    assert engine.do({"idle": 30})["idle"]
    assert engine.do({"forget": True})["forgotten"]
    return answer["tokens"], answer["cached"]


def test_two_adapters_of_one_name(model: Path, prompts: Tokens, tmp_path: Path) -> None:
    prompts = prompts[:3]
    none, whole = [0] * 3, [WHOLE] * 3
    first, second = (make_adapter(tmp_path / f"{seed}", seed, **SIZES) for seed in (1, 2))
    wanted = []
    with VllmEngine(model, tmp_path, **WITH_LORA) as engine:
        for adapter in (None, lora(1, first), lora(2, second)):
            command = {"generate": prompts, "max_tokens": MAX_TOKENS, "lora": adapter}
            wanted.append(engine.do(command)["tokens"])
    base, of_first, of_second = wanted
    assert base != of_first != of_second != base
    settings = on_disk(tmp_path, cpu_bytes="8MiB", arguments=WITH_LORA)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        assert generate(engine, prompts, None) == (base, none)
        assert generate(engine, prompts, lora(1, first)) == (of_first, none)
        assert generate(engine, prompts, lora(2, second)) == (of_second, none)
        assert generate(engine, prompts, lora(1, first)) == (of_first, whole)
        assert generate(engine, prompts, lora(2, second)) == (of_second, whole)
        assert generate(engine, prompts, None) == (base, whole)
        stats = engine.do({"stats": True})
        assert stats["failures"] == {} and not stats["broken"]
    # The name, the path and the id of before, with other content.
    make_adapter(first, 2, **SIZES)
    settings = on_disk(tmp_path, cpu_bytes="8MiB", arguments=WITH_LORA)
    with ConnectorEngine(model, tmp_path, **settings) as engine:
        assert generate(engine, prompts, lora(1, first)) == (of_second, whole)
        copy = make_adapter(tmp_path / "copy", 1, **SIZES)
        assert generate(engine, prompts, lora(2, copy, "bob")) == (of_first, whole)
        # In place, as vLLM reloads adapters; without saying so nothing is stored or loaded.
        make_adapter(first, 1, **SIZES)
        assert generate(engine, prompts, lora(1, first)) == (of_second, none)
        assert engine.do({"stats": True})["failures"] == {"adapter": 3}
        inplace = lora(1, first, load_inplace=True)
        assert generate(engine, prompts, inplace) == (of_first, whole)
        assert generate(engine, prompts, None) == (base, whole)
        assert not engine.do({"stats": True})["broken"]


def test_strata_spec_refuses_adapters(model: Path, tmp_path: Path) -> None:
    engine = SpecEngine(model, tmp_path, cpu_bytes="8MiB", arguments=dict(WITH_LORA))
    check_refused(engine, "use StrataConnector")
