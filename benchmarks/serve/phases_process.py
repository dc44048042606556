# SPDX-License-Identifier: Apache-2.0
"""A process with an engine, StrataKV's or vLLM's, that reports the seconds of each phase of
answers.

StrataKV's Python runs the file as a module; a Python with vLLM runs it as a file. All lines are
JSON, in the following order; an answer with `error` is the last line.

    {"engine": "stratakv", "environment": {}, "threads": n, "arguments": {}}
                       the answer, when the engine is ready, has version and threads
    {"prompts": [[ids], ...], "max_tokens": n, "forget": true}
                       runs all prompts at the same time; `forget` empties the KV cache first

The engine's core runs in this process and is stepped in a loop, without HTTP. The first phase ends
when every prompt has its first token; then the decode phase begins."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class WrongWork(RuntimeError):
    """Measured work had a wrong result, so the measured time is meaningless."""


class NewTokens(NamedTuple):
    """The new tokens of one request in a step."""

    request_id: str
    token_ids: Sequence[int]
    is_last: bool


class Side(Protocol):
    """An engine, StrataKV's or vLLM's."""

    version: str

    def forget(self) -> None:
        """Empty the engine's KV cache."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None: ...
    def step(self) -> Iterator[NewTokens]: ...


class StrataKvSide:
    """StrataKV's engine core, stepped in this process."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import numpy as np

        from ... import __version__
        from ...engine.config.engine_options import engine_config
        from ...engine.core.engine_core import EngineCore
        from ...engine.request.core_messages import AddRequest
        from ..offload.workbench import greedy

        self.version, options = __version__, dict(arguments)
        self._core = EngineCore(engine_config(options.pop("model"), options))
        self._request, self._greedy, self._array = AddRequest, greedy, np.asarray

    def forget(self) -> None:
        self._core.call("reset_prefix_cache", "pool")

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        packed = self._array(prompt, "<i4").tobytes()
        refused = self._core.add(self._request(request_id, packed, self._greedy(max_tokens)))
        if refused:
            raise WrongWork(f"a request was refused: {refused[0].error}")

    def step(self) -> Iterator[NewTokens]:
        for output in self._core.step():
            if output.error is not None:
                raise WrongWork(f"a request failed: {output.error}")
            is_last = output.finish_reason is not None
            yield NewTokens(output.request_id, output.new_token_ids, is_last)


class VllmSide:
    """vLLM's engine, with its own core and scheduler."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        import vllm

        self.version: str = vllm.__version__
        self._engine = vllm.LLM(**arguments).llm_engine
        self._params, self._seen = vllm.SamplingParams, dict[str, int]()

    def forget(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise WrongWork("vLLM did not forget the prompts in its KV cache")

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        params = self._params(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        self._seen[request_id] = 0
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> Iterator[NewTokens]:
        for output in self._engine.step():
            tokens = list(output.outputs[0].token_ids)  # all tokens of the answer so far
            seen, self._seen[output.request_id] = self._seen[output.request_id], len(tokens)
            yield NewTokens(output.request_id, tokens[seen:], output.finished)


SIDES: dict[str, Callable[[Mapping[str, Any]], Side]] = {"stratakv": StrataKvSide, "vllm": VllmSide}


def answer(side: Side, prompts: Sequence[list[int]], max_tokens: int) -> dict[str, Any]:
    """Run `prompts` together; return the seconds until all prompts have a first token, and the
    tokens and seconds of the decode phase. Raises WrongWork if a token is missing."""
    made: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    unfinished = set(made)
    began = time.perf_counter()
    first = early = 0.0
    for request_id, prompt in zip(made, prompts, strict=True):
        side.add(request_id, prompt, max_tokens)
    while unfinished:
        for request_id, token_ids, is_last in side.step():
            made[request_id] += token_ids
            if is_last:
                unfinished.discard(request_id)
        if not first and all(made.values()):
            first = time.perf_counter() - began
            early = sum(map(len, made.values()))
    seconds = time.perf_counter() - began
    tokens = list(made.values())
    if any(len(each) != max_tokens for each in tokens):
        raise WrongWork(f"not every prompt got {max_tokens} tokens")
    return {
        "first_seconds": first,
        "decode_seconds": seconds - first,
        "decode_tokens": sum(map(len, tokens)) - early,
        "tokens": tokens,
    }


def open_side(plan: Mapping[str, Any]) -> Side:
    """Return the engine that a plan names. Raises WrongWork if the engine is not installed."""
    os.environ.update(plan["environment"])
    try:
        made = SIDES[plan["engine"]](plan["arguments"])
    except ImportError as error:
        raise WrongWork(f"{sys.executable} cannot import {plan['engine']} ({error})") from error
    import torch

    torch.set_num_threads(plan["threads"])  # equal in the two engines, unlike their own choices
    return made


def main() -> int:
    """Answer line by line until the input ends; the output of libraries goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(told: Mapping[str, Any]) -> None:
        print(json.dumps(told), file=answers, flush=True)

    try:
        side = open_side(plan := json.loads(sys.stdin.readline()))
        tell({"version": side.version, "threads": plan["threads"]})
        for line in sys.stdin:
            order = json.loads(line)
            if order["forget"]:
                side.forget()
            tell(answer(side, order["prompts"], order["max_tokens"]))
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}".partition("\n")[0]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
