# SPDX-License-Identifier: Apache-2.0
"""The time to the first token of a prompt that is sent in parts, measured from the last part, and
of the same prompt sent whole, without prefix caching."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...engine.config.engine_options import EMBEDDED_MODEL, engine_config
from ...engine.core.engine_core import EngineCore
from ...engine.request.core_messages import AddRequest, ExtendPrompt, RequestExtras, TokenOutput
from ...engine.request.request import pack_token_ids
from ...engine.request.sampling_params import SamplingParams
from ..harness.comparison import WrongWork

NUM_PARTS = 50
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_FIRST_WORD = 4  # smaller ids are special tokens


@dataclass(slots=True)
class Prompts:
    """A sender of random prompts, each in parts and whole."""

    core: EngineCore
    num_tokens: int
    vocab_size: int
    num_sent: int = 0
    said: dict[str, list[list[int]]] = field(default_factory=lambda: {"whole": [], "parts": []})
    _chosen: dict[str, random.Random] = field(
        default_factory=lambda: {name: random.Random(5) for name in ("whole", "parts")}
    )

    def send_whole(self) -> float:
        """Send the next prompt whole; return the seconds to its first token."""
        token_ids = self._next_prompt("whole")
        began = time.perf_counter()
        self._answer("whole", self.core.add(self._request(token_ids)))
        return time.perf_counter() - began

    def send_parts(self) -> float:
        """Send the next prompt in parts; when all parts but the last are computed, send the last
        part, and return the seconds from then to the first token."""
        token_ids = self._next_prompt("parts")
        size = len(token_ids) // NUM_PARTS
        first, *parts = (token_ids[at : at + size] for at in range(0, len(token_ids), size))
        request = self._request(first)
        request.extras = RequestExtras(more_follows=True)
        self._work_off(self.core.add(request))
        for part in parts[:-1]:
            message = ExtendPrompt(request.request_id, pack_token_ids(part))
            self._work_off(self.core.extend_prompt(message))
        last = ExtendPrompt(request.request_id, pack_token_ids(parts[-1]), is_last=True)
        began = time.perf_counter()
        self._answer("parts", self.core.extend_prompt(last))
        return time.perf_counter() - began

    def _next_prompt(self, name: str) -> list[int]:
        words = range(_FIRST_WORD, self.vocab_size)
        return self._chosen[name].choices(words, k=self.num_tokens)

    def _request(self, token_ids: list[int]) -> AddRequest:
        self.num_sent += 1
        return AddRequest(f"r{self.num_sent}", pack_token_ids(token_ids), _ONE_TOKEN)

    def _work_off(self, outputs: list[TokenOutput]) -> None:
        while self.core.has_work():
            outputs += self.core.step()
        if outputs:
            raise WrongWork(f"a part of a prompt was answered: {outputs[0].error}")

    def _answer(self, name: str, outputs: list[TokenOutput]) -> None:
        while not outputs:
            outputs = self.core.step()
        if outputs[0].error:
            raise WrongWork(f"a request failed: {outputs[0].error}")
        self.said[name].append(outputs[0].new_token_ids)


@contextmanager
def prompts_of(num_tokens: int) -> Iterator[Prompts]:
    """Yield a sender of prompts with `num_tokens` tokens, to an engine with the embedded model."""
    config = engine_config(EMBEDDED_MODEL, {
        "dtype": "float32", "num_threads": 1, "max_num_seqs": 1, "num_blocks": num_tokens // 4,
        "max_model_len": num_tokens + 16, "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
    })  # fmt: skip
    core = EngineCore(config, max_steps_in_flight=1)
    try:
        yield Prompts(core, num_tokens, core.spec.vocab_size)
    finally:
        core.shutdown(5.0)
