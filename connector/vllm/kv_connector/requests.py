# SPDX-License-Identifier: Apache-2.0
"""Reads vLLM's requests and steps: keys of blocks, a router's parameters, computing times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...costs.rates import PrefillRate
from ..identity import ChunkKeys
from .host_keys import HostKeys

# The group in vLLM's key, for the first cache group. Digests are the same for all groups.
_FIRST_GROUP = bytes(4)
MAX_STEPS = 16  # the most measured steps in flight


class HostRequest:
    """A RequestView of a vLLM request, with the tiers' digests of its blocks."""

    tail_hash = None

    def __init__(self, request: Any, keys: ChunkKeys, host_keys: HostKeys) -> None:
        self._request = request
        self._keys = keys
        self._host_keys = host_keys
        self._digests: list[bytes] = []
        self.is_queued = False  # whether the request was queued in the tiers

    @property
    def request_id(self) -> str:
        name: str = self._request.request_id
        return name

    @property
    def num_tokens(self) -> int:
        count: int = self._request.num_tokens
        return count

    @property
    def num_prompt_tokens(self) -> int:
        count: int = self._request.num_prompt_tokens
        return count

    @property
    def block_hashes(self) -> Sequence[bytes]:
        hashes, known = self._host_keys.hashes_of(self._request), self._digests
        for index in range(len(known), len(hashes)):
            known.append(self._keys.derive_chunk_key(hashes[index] + _FIRST_GROUP)[:32])
        return known


def asks_for(request: Any, name: str) -> bool:
    """Whether the router set `name` to true in the parameters of a request."""
    given = getattr(request, "kv_transfer_params", None)
    return isinstance(given, dict) and given.get(name) is True


def params_for_decode(request: Any) -> dict[str, Any]:
    """Return the parameters in a prefill's answer, which a router passes to the decode engine. The
    parameters have no address, because the decode engine finds the blocks by key."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],
        "remote_engine_id": "stratakv",
        "remote_request_id": request.request_id,
        "remote_host": "",
        "remote_port": 0,
        "remote_num_tokens": request.num_computed_tokens,
    }


@dataclass(slots=True)
class _Step:
    began: float
    num_tokens: int
    num_context_tokens: int


class StepTimes:
    """Records the times of steps that compute prompts in `rate`. If steps overlap, the time of a
    step counts from the end of the previous step."""

    def __init__(self, rate: PrefillRate) -> None:
        self._rate = rate
        self._steps: dict[int, _Step] = {}
        self._last_end = 0.0

    def scheduled(self, output: Any, number: int) -> None:
        """Record a scheduled step if it computes over two tokens per request on average."""
        counts = output.num_scheduled_tokens
        total = output.total_num_scheduled_tokens
        if 2 * len(counts) >= total:
            return
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        context = sum(
            (2 * starts.get(name, 0) + count - 1) * count // 2 for name, count in counts.items()
        )
        self._steps[number] = _Step(time.monotonic(), total, context)
        while len(self._steps) > MAX_STEPS:
            del self._steps[next(iter(self._steps))]

    def ended(self, number: int) -> None:
        """Record the time of a step that the worker has run."""
        now = time.monotonic()
        step = self._steps.pop(number, None)
        if step is not None:
            seconds = now - max(step.began, self._last_end)
            self._rate.record_prefill(step.num_tokens, step.num_context_tokens, seconds)
        self._last_end = now
