# SPDX-License-Identifier: Apache-2.0
"""A process with a vLLM engine that answers prompts and reports the times to the first tokens.

A Python with vLLM runs this file. All lines are JSON, in the following order; an answer with
`error` is the last line.

    {"names": folder, "environment": {}}         `names` has stratakv; the answer is vLLM's version
    {"arguments": {}}                            of vLLM's LLM; answered when the engine is ready
    {"prompts": [[ids], ...], "max_tokens": n}   run one after the other, with an empty KV cache
    {"stop": true}                               shuts the engine down and writes tiers back"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from importlib import metadata
from typing import Any

# The pause of vLLM's own loop after a step that computed nothing, during which copies run.
PAUSE_SECONDS = 0.001
SETTLE_SECONDS = 120.0
# Packages that LMCache's server imports and `pip install --no-deps lmcache` does not install.
LMCACHE_NEEDS = ("aiofile", "aiofiles", "caio", "nvtx", "redis", "sortedcontainers")


class WrongWork(RuntimeError):
    """Measured work had a wrong result, so the measured time is meaningless."""


class Engine:
    """vLLM's engine with its core in this process, stepped like in vLLM's own loop."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm import LLM

        if "LMCache" in str(arguments.get("kv_transfer_config")):
            _spare_llvmlite()
        self._engine = LLM(**arguments).llm_engine
        self._core = self._engine.engine_core.engine_core
        self._asked = 0
        connector = self._core.scheduler.connector
        scheduler_side = getattr(connector, "connector_scheduler", None)
        self._manager = getattr(scheduler_side, "manager", None)  # vLLM's offloading manager
        self._peer_chunks: dict[str, int] = {}
        for tier in getattr(self._manager, "secondary_tiers", ()):
            if not hasattr(tier, "_tiers"):
                self._count_loads(tier)

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the prompts of one order, then wait until the tiers are idle."""
        from vllm import SamplingParams

        if not self._engine.reset_prefix_cache():
            raise WrongWork("vLLM did not forget the prompts in its KV cache")
        before, stored = self._loaded(), self._stored()
        params = SamplingParams(
            max_tokens=order["max_tokens"], temperature=0.0, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        done = [self._one(prompt, params) for prompt in order["prompts"]]
        seconds = time.perf_counter() - began
        self._settle()
        moved = {name: count - before.get(name, 0) for name, count in self._loaded().items()}
        return {
            "first_token_seconds": [first for first, _ in done],
            "seconds": seconds,
            "tokens": [list(output.outputs[0].token_ids) for _, output in done],
            "cached": [output.num_cached_tokens for _, output in done],
            "loaded_chunks": moved,
            "stored_chunks": self._stored() - stored,
        }

    def stop(self) -> dict[str, Any]:
        """Shut the engine down, once, which writes the tiers back."""
        self._engine.engine_core.shutdown()
        return {"stopped": True}

    def _one(self, prompt: list[int], params: Any) -> tuple[float, Any]:
        """Return the seconds to a prompt's first token, and the whole output."""
        self._asked += 1
        first, last = 0.0, None
        began = time.perf_counter()
        self._engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if outputs:
                first, last = first or time.perf_counter() - began, outputs[0]
            else:
                time.sleep(PAUSE_SECONDS)
        return first, last

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._core.scheduler.has_requests() or self._is_at_work():
            if time.monotonic() > deadline:
                raise WrongWork(f"tiers were still at work after {SETTLE_SECONDS:g} s")
            self._engine.step()
            time.sleep(PAUSE_SECONDS)

    def _is_at_work(self) -> bool:
        if self._manager is None:
            return False
        for tier in self._our_tiers():
            with tier.transfers.lock:
                if tier.hierarchy.num_unwritten:
                    return True
        return bool(self._manager.has_pending_work())

    def _loaded(self) -> dict[str, int]:
        """Return the chunks loaded from each tier below vLLM's region since the start."""
        loaded = dict(self._peer_chunks)
        for stats in self._stats():
            loaded |= {name: each.loaded_blocks for name, each in stats.items()}
        return loaded

    def _stored(self) -> int:
        """Return the chunks stored in the slabs of StrataKV's tiers since the start."""
        return sum(stats["cpu"].stored_blocks for stats in self._stats())

    def _stats(self) -> list[dict[str, Any]]:
        taken = []
        for tier in self._our_tiers():
            with tier.transfers.lock:
                taken.append(tier.hierarchy.stats())
        return taken

    def _our_tiers(self) -> list[Any]:
        below = getattr(self._manager, "secondary_tiers", ())
        return [tier._tiers for tier in below if hasattr(tier, "_tiers")]

    def _count_loads(self, tier: Any) -> None:
        submit, counts, name = tier.submit_load, self._peer_chunks, tier.tier_type
        counts[name] = 0

        def submit_load(job: Any) -> None:
            counts[name] += len(job.keys)
            submit(job)

        tier.submit_load = submit_load


def _spare_llvmlite() -> None:
    """Prevent a failure at the engine's start: vLLM's CPU build searches all modules for kernels by
    attribute look-ups, to which an llvmlite object, which LMCache loads, answers for any name.
    """
    ffi: Any = importlib.import_module("llvmlite.binding.ffi")
    ffi._lib_fn_wrapper.get = lambda *_: None


def prepare(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of vLLM and LMCache (or None). Raises WrongWork for failed imports."""
    os.environ.update(plan["environment"])
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, plan["names"])
    try:
        import vllm
    except Exception as error:  # a broken package may raise anything
        raise WrongWork(f"{sys.executable} cannot import vLLM ({brief(error)})") from error
    try:
        importlib.import_module("stratakv.connector.vllm.build")
    except Exception as error:
        raise WrongWork(f"{sys.executable} cannot import our tiers ({brief(error)})") from error
    lmcache = metadata.version("lmcache") if importlib.util.find_spec("lmcache") else None
    lacks = [name for name in LMCACHE_NEEDS if importlib.util.find_spec(name) is None]
    return {"version": vllm.__version__, "lmcache": lmcache, "lmcache_lacks": lacks}


def brief(error: BaseException) -> str:
    """Return the type and first line of an error, and of each of its causes."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        lines.append(f"{type(cause).__name__}: {cause}".strip().partition("\n")[0])
        cause = cause.__cause__ or cause.__context__
    return "; ".join(dict.fromkeys(lines))


def main() -> int:
    """Answer line by line until the input ends; the output of libraries goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        tell(prepare(json.loads(sys.stdin.readline())))
        if not (line := sys.stdin.readline()):
            return 0
        engine = Engine(json.loads(line)["arguments"])
        tell({"ready": True})
        for line in sys.stdin:
            order = json.loads(line)
            tell(engine.stop() if "stop" in order else engine.ask(order))
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        traceback.print_exc()
        said = str(error) if isinstance(error, WrongWork) else brief(error)
        tell({"error": said})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
