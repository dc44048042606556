# SPDX-License-Identifier: Apache-2.0
"""One engine with StrataSpec and its tier, in a host made of what was recorded of vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ...threads import WAIT_SECONDS
from .fake_host import FakeHost, FakeManager

CHUNK = 8192


def extra(chunks: int = 16, **settings: Any) -> dict[str, Any]:
    return {
        "spec_name": "StrataSpec",
        "cpu_bytes_to_use": chunks * CHUNK,
        "stratakv": {"cpu_bytes": "1MiB", "load": "always"} | settings,
    }


def make_spec(host: FakeHost, given: dict[str, Any], **changes: Any) -> Any:
    from stratakv.connector.vllm import StrataSpec

    return StrataSpec(host.config(given, **changes))


def model_fields(host: FakeHost, dtype: str) -> dict[str, Any]:
    fields = {"name": "some/model", "dtype": dtype, "max_model_len": 0}
    return {k: v for k, v in fields.items() if k in host._fields("OffloadingModelConfig")}


def host_keys(count: int, seed: int = 0, group: int = 0) -> list[bytes]:
    numbers = np.random.default_rng(seed)
    return [numbers.bytes(32) + group.to_bytes(4, "big") for _ in range(count)]


class Life:
    """One engine, with its tier's jobs run to their end."""

    def __init__(self, host: FakeHost, given: dict[str, Any], **changes: Any) -> None:
        self.spec = make_spec(host, given, **changes)
        self.manager: FakeManager = self.spec.get_manager()
        self.region = self.manager.region
        self.tier = self.manager.tier
        self.knows_positions = "_offload_key_positions" in host._fields("ReqContext")
        self._count = 0

    def fill(self, keys: list[bytes], seed: int) -> np.ndarray[Any, Any]:
        """Compute chunks, and have the tier take them; their bytes."""
        content = np.random.default_rng(seed).integers(
            -128, 128, (len(keys), self.region.shape[1]), np.int8
        )
        self.region[: len(keys)] = content
        context = self.request(keys)
        self.manager.submit(keys, list(range(len(keys))), context, is_load=False)
        [result] = self.until_ended()
        assert result.success
        self.tier.on_request_finished(context)
        return content

    def request(self, keys: list[bytes]) -> Any:
        """A new request."""
        self._count += 1
        return self.manager.begin(f"request-{self._count}", keys)

    def find(self, keys: list[bytes], context: Any = None) -> int:
        """The leading chunks the tier says it has, to a request that ends then unless given."""
        if context is not None:
            return self.manager.find(keys, context, self.step)
        context = self.request(keys)
        found = self.manager.find(keys, context, self.step)
        self.tier.on_request_finished(context)
        return found

    def load(self, keys: list[bytes]) -> tuple[np.ndarray[Any, Any], Any]:
        """Look chunks up and load them; their rows, and the job's result."""
        context = self.request(keys)
        assert self.find(keys, context) == len(keys)
        self.region[:] = 0
        self.manager.submit(keys, list(range(len(keys))), context, is_load=True)
        [result] = self.until_ended()
        self.tier.on_request_finished(context)
        return self.region[: len(keys)].copy(), result

    def until_ended(self) -> list[Any]:
        """The results of the jobs under way."""
        results: list[Any] = wait_for(self.manager.ended)
        return results

    def step(self) -> bool:
        """Something may change until the next question."""
        self.manager.end_step()
        time.sleep(0.002)
        return True

    def stop(self) -> None:
        """An orderly stop; vLLM can let go of its region then."""
        self.tier.shutdown()
        self.tier.shutdown()
        self.tier._primary_kv_view.release()  # raises where somebody still has it
        self.spec._hold.release_lock()


def wait_for(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return answer


@pytest.fixture
def live(host: FakeHost) -> Any:
    """Makes engines, and stops them."""
    made: list[Life] = []

    def make(given: dict[str, Any], **changes: Any) -> Life:
        made.append(Life(host, given, **changes))
        return made[-1]

    yield make
    for each in made:
        each.stop()
