# SPDX-License-Identifier: Apache-2.0
"""Runs in an environment that has vLLM and not our tests: an engine that does what it is told on
standard input, a line of JSON at a time, and answers on the descriptor that it was given.

    {"generate": [[ids], …], "max_tokens": n, "together": bool}   tokens, and how many were cached
    {"generate": …, "lora": {…}}  the same with an adapter: the fields of vLLM's LoRARequest
    {"stats": true}      counters of the tiers, and what the decisions were
    {"metrics": true}    what a scrape shows of ours, also of a core in another process
    {"damage": "zero" | "flip"}   every chunk in the slab; how many
    {"spoil_region": true}        every byte of vLLM's region; how many chunks it has
    {"forget": true}     vLLM forgets its own prefix cache, its region too
    {"idle": seconds}    wait until everything below the slab has been written
    {"fault": …}         see tier_faults.py

Its one argument is a JSON object: the model, the connector's settings, other arguments of LLM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cached_property
from typing import Any, TextIO


def main() -> None:
    """Start an engine and serve until the input ends."""
    told = json.loads(sys.argv[1])
    answers = os.fdopen(int(sys.argv[2]), "w")
    try:
        engine = Engine(told)
    except Exception as error:  # the message is what the test looks at
        _answer(answers, {"refused": _causes(error)})
        return
    _answer(answers, {"started": True})
    for line in sys.stdin:
        _answer(answers, engine.do(json.loads(line)))
    engine.stop()
    _answer(answers, {"stopped": True})


def _answer(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _causes(error: BaseException | None) -> list[str]:
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return texts


def _adapter(fields: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(**fields)


class Engine:
    """vLLM's LLM with one process or several."""

    def __init__(self, told: dict[str, Any]) -> None:
        from vllm import LLM

        arguments = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 40,
            "block_size": 32,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "disable_log_stats": False,
        } | told.get("arguments", {})
        extra = told.get("extra")
        if extra is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        self._llm = LLM(told["model"], **arguments)

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """One line."""
        if "generate" in command:
            return self._generate(command)
        if "stats" in command:
            return self._stats()
        if "metrics" in command:
            return _metrics()
        if "damage" in command:
            return {"damaged": self._damage(command["damage"])}
        if "spoil_region" in command:
            rows = self._tier._tiers.transfers._rows
            rows[:] = 0
            return {"spoilt": len(rows)}
        if "forget" in command:
            return {"forgotten": self._llm.reset_prefix_cache(reset_connector=True)}
        if "fault" in command:
            return self._planter.do(command)
        if "idle" in command:
            return {"idle": self._wait_idle(command["idle"])}
        raise ValueError(f"no command: {command}")

    def stop(self) -> None:
        """An orderly stop."""
        self._llm.llm_engine.engine_core.shutdown()

    @cached_property
    def _planter(self) -> Any:
        import tier_faults

        tiers = self._tier._tiers
        moved = tiers.transfers
        return tier_faults.Planter(moved.lock, moved._slab, tiers.hierarchy, lambda: moved.damaged)

    @property
    def _tier(self) -> Any:
        core = self._llm.llm_engine.engine_core.engine_core
        manager = core.scheduler.connector.connector_scheduler.manager
        return manager.secondary_tiers[-1]

    def _generate(self, command: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        how = SamplingParams(
            max_tokens=command["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": ids} for ids in command["generate"]]
        rounds = [prompts] if command.get("together") else [[prompt] for prompt in prompts]
        more = {"lora_request": _adapter(command["lora"])} if command.get("lora") else {}
        began = time.monotonic()
        outputs = [
            o for each in rounds for o in self._llm.generate(each, how, use_tqdm=False, **more)
        ]
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "seconds": time.monotonic() - began,
        }

    def _stats(self) -> dict[str, Any]:
        from dataclasses import asdict

        tiers = self._tier._tiers
        with tiers.transfers.lock:
            stats = {name: asdict(each) for name, each in tiers.hierarchy.stats().items()}
        return {
            "tiers": stats,
            "estimates": tiers.economics.stats(),
            "declined": dict(tiers.economics.declined_tokens),
            "damaged": tiers.transfers.damaged,
            "metrics": _metrics(),
        }

    def _damage(self, how: str) -> int:
        transfers = self._tier._tiers.transfers
        with transfers.lock:
            keys = transfers._slab.keys()
            for slot in transfers._slab.pin(keys, touch=False):
                page = transfers._slab.buffer(slot)
                if how == "zero":
                    page[:] = bytes(page.nbytes)
                else:
                    page[page.nbytes // 2] ^= 1
            transfers._slab.unpin(keys)
        return len(keys)

    def _wait_idle(self, seconds: float) -> bool:
        transfers = self._tier._tiers.transfers
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with transfers.lock:
                backs = transfers._hierarchy._write_backs
                shared = [b for b in backs._all if b._store.is_shared]
                if not backs.in_flight and not any(b.pending for b in shared):
                    return True
            time.sleep(0.02)
        return False


def _metrics() -> dict[str, float]:
    """What a scrape of vLLM's /metrics would show of ours: `name:tier` -> value."""
    from prometheus_client import REGISTRY

    return {
        f"{sample.name}:{sample.labels.get('tier', '')}": sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("stratakv:")
    }


if __name__ == "__main__":
    main()
