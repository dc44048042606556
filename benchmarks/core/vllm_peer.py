# SPDX-License-Identifier: Apache-2.0
"""vLLM's own hashing, cache manager and scheduler, doing the same work as our cases.

An interpreter that has vLLM runs this file without the package stratakv. The first line of its
input is the plan; the answer is vLLM's version. Each further line names a case and how many units
to do; the answer is their seconds. All lines are JSON. A line with `error` is the last."""

from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

# The newest version of vLLM with which all cases have run.
TRIED = "0.33"
# Any model is fine: the scheduler reads only its length and that it is text only.
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
Work = Callable[[int], None]


class WrongWork(RuntimeError):
    """Measured work had a wrong result, so its time means nothing."""


def fitting(make: Callable[..., Any], **given: Any) -> Any:
    """Call `make` with those of the arguments that it has in this version of vLLM."""
    known = inspect.signature(make).parameters
    return make(**{name: value for name, value in given.items() if name in known})


class Bench:
    """The cases by name, with sizes from the plan."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        from vllm.config import CacheConfig
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.plan, self.size = plan, plan["block_size"]
        self.algorithm = CacheConfig(block_size=self.size).prefix_caching_hash_algo
        hash_block = get_hash_fn_by_name(self.algorithm)
        init_none_hash(hash_block)
        self.hasher = get_request_block_hasher(self.size, hash_block)
        self.works = {
            "peer_hash": self._hashing(),
            "peer_cycles": self._cycling(),
            "peer_steps": self._stepping(),
        }

    def _random(self) -> Any:
        import numpy as np

        return np.random.default_rng(self.plan["seed"])

    def _tokens(self, rng: Any, count: int) -> list[int]:
        tokens: list[int] = rng.integers(0, self.plan["vocabulary"], count, "int32").tolist()
        return tokens

    def _request(self, name: str, tokens: list[int], hasher: Any, max_tokens: int = 1) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return fitting(
            Request, request_id=name, prompt_token_ids=tokens, sampling_params=params,
            pooling_params=None, eos_token_id=None, block_hasher=hasher,
        )  # fmt: skip

    def _cache(self, num_blocks: int) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        spec = FullAttentionSpec(
            block_size=self.size, num_kv_heads=1, head_size=16, dtype=torch.bfloat16
        )
        return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])

    def _hashing(self) -> Work:
        count = self.plan["hash_tokens"]
        request = self._request("peer_hash", self._tokens(self._random(), count), None)

        def work(units: int) -> None:
            hashed = len(self.hasher(request))
            if (hashed * self.size, units) != (count, count):
                raise WrongWork(f"{hashed} blocks were hashed of {units} tokens")

        return work

    def _cycling(self) -> Work:
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        length, half, rng = self.plan["prompt_tokens"], self.plan["half"], self._random()
        prefix = self._tokens(rng, half)
        prompts = [prefix + self._tokens(rng, length - half) for _ in range(self.plan["requests"])]
        requests = cycle(
            [self._request(f"r{i}", prompt, self.hasher) for i, prompt in enumerate(prompts)]
        )
        manager = fitting(
            KVCacheManager, kv_cache_config=self._cache(self.plan["pool_blocks"] + 1),
            max_model_len=length + self.size, scheduler_block_size=self.size,
            hash_block_size=self.size, enable_caching=True,
        )  # fmt: skip

        def run_through(request: Any) -> int:
            hits, cached, *_ = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, length - cached, cached, hits) is None:
                raise WrongWork("the pool had no room")
            manager.free(request)
            return int(cached)

        def work(units: int) -> None:
            for _ in range(units):
                cached = run_through(next(requests))
                if cached != half:
                    raise WrongWork(f"{cached} tokens were found, not {half}")

        run_through(next(requests))
        return work

    def _stepping(self) -> Work:
        from vllm.v1.outputs import ModelRunnerOutput

        lengths, max_tokens = self.plan["prompt_lengths"], self.plan["max_tokens"]
        scheduler, running, rng = self._scheduler(lengths, max_tokens), len(lengths), self._random()
        names = [f"r{i}" for i in range(running)]
        for name, length in zip(names, lengths):  # noqa: B905 - as Python 3.9 has it
            tokens = self._tokens(rng, length)
            scheduler.add_request(self._request(name, tokens, self.hasher, max_tokens))
        sampled = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[self.plan["token"]] for _ in names],
        )

        def step(num_tokens: int) -> None:
            scheduled = scheduler.schedule()
            answers = scheduler.update_from_output(scheduled, sampled)
            outputs = sum(len(each.outputs) for each in answers.values())
            done = (scheduled.total_num_scheduled_tokens, outputs, len(scheduler.running))
            if done != (num_tokens, running, running):
                raise WrongWork(f"tokens, outputs and running requests were {done}")

        def work(units: int) -> None:
            for _ in range(units):
                step(running)

        step(sum(lengths))
        return work

    def _scheduler(self, lengths: Sequence[int], max_tokens: int) -> Any:
        """A scheduler that, like ours, makes one step after the other; all else has vLLM's
        defaults."""
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        longest = max(lengths) + max_tokens
        blocks = len(lengths) * -(-longest // self.size) * 2
        described = MODEL | {
            "vocab_size": self.plan["vocabulary"], "max_position_embeddings": longest
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(described))
            model = ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest
            )
        cache = CacheConfig(block_size=self.size, enable_prefix_caching=True)
        cache.num_gpu_blocks = blocks
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=fitting(
                SchedulerConfig, max_num_seqs=len(lengths), max_num_batched_tokens=sum(lengths),
                max_model_len=longest, is_encoder_decoder=False, async_scheduling=False,
            ),
            device_config=DeviceConfig("cpu"),
        )  # fmt: skip
        return fitting(
            Scheduler, vllm_config=config, kv_cache_config=self._cache(blocks),
            structured_output_manager=StructuredOutputManager(config), block_size=self.size,
            hash_block_size=self.size, log_stats=False,
        )  # fmt: skip


def prepare(plan: Mapping[str, Any]) -> tuple[Bench, dict[str, Any]]:
    """The bench, and vLLM's version and hash algorithm. Raises WrongWork if vLLM is missing or
    cannot run the cases."""
    try:
        import vllm
    except Exception as error:  # a broken package may raise anything
        raise WrongWork(f"{sys.executable} cannot import vLLM ({brief(error)})") from error
    try:
        bench = Bench(plan)
    except Exception as error:
        raise WrongWork(
            f"vLLM {vllm.__version__} lacks a package, or has other classes than vLLM {TRIED}, "
            f"with which this was tried ({brief(error)})"
        ) from error
    # vLLM's engine does this before its first step, as our engine does.
    gc.collect()
    gc.freeze()
    return bench, {"version": vllm.__version__, "algorithm": bench.algorithm}


def brief(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0]


def take(bench: Bench, order: Mapping[str, Any]) -> dict[str, float]:
    """Do the work that one line asks for; return its seconds."""
    work = bench.works[order["case"]]
    wall, busy = time.perf_counter(), time.thread_time()
    work(order["count"])
    busy = time.thread_time() - busy
    return {"wall": time.perf_counter() - wall, "busy": busy}


def main() -> int:
    """Answer line by line until the input ends; what libraries print goes into the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        bench, answer = prepare(json.loads(sys.stdin.readline()))
        print(json.dumps(answer), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(take(bench, json.loads(line))), file=answers, flush=True)
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        said = str(error) if isinstance(error, WrongWork) else brief(error)
        print(json.dumps({"error": said}), file=answers, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
