# SPDX-License-Identifier: Apache-2.0
"""As vllm_process.py, with StrataConnector in the place of vLLM's offloading. The commands are the
same, and mean our slab; others are

    {"forget": true}     vLLM forgets its own prefix cache, and we nothing
    {"break": "scheduler" | "worker"}   a mistake in one of our sides, in the next step
    {"events": true}     the kinds and media of the KV cache events so far
    {"generate": …, "params": {…}}      with these kv_transfer_params; also what came back of them
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np
import vllm_process


class ConnectorEngine(vllm_process.Engine):
    """The engine, and our connector in its process."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(told)
        self._events: list[tuple[str, str]] = []
        if told["arguments"].get("kv_events_config"):
            self._listen()

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """One line."""
        if "forget" in command:
            return {"forgotten": self._llm.reset_prefix_cache()}
        if "break" in command:
            return self._spoil(command["break"])
        if "params" in command:
            return self._generate_with(command)
        if "events" in command:
            return {"events": self._events}
        return super().do(command)

    @property
    def _connector(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler.connector

    @property
    def _role(self) -> Any:
        return self._connector._scheduler

    @cached_property
    def _planter(self) -> Any:
        import tier_faults

        role = self._role
        hierarchy = role._side._hierarchy
        return tier_faults.Planter(role._lock, role._slab, hierarchy, lambda: role.damaged_blocks)

    def _stats(self) -> dict[str, Any]:
        stats = self._role.stats()
        if self._role.is_broken:
            return {"broken": True}
        return {
            "tiers": stats["tiers"],
            "declined": stats["declined_tokens"],
            "damaged": stats["damaged_blocks"],
            "failures": stats["failures"],
            "loads": stats["loads"],
            "broken": self._role.is_broken,
            "metrics": vllm_process._metrics(),
        }

    def _damage(self, how: str) -> int:
        slab = self._role._slab
        slots = np.frombuffer(slab.memory(), np.uint8).reshape(slab.num_slots, -1)
        with self._role._lock:
            keys = slab.keys()
            for slot in slab.pin(keys, touch=False):
                if how == "zero":
                    slots[slot] = 0
                else:
                    slots[slot][slab.layout.page_bytes // 2] ^= 1
            slab.unpin(keys)
        return len(keys)

    def _wait_idle(self, seconds: float) -> bool:
        role = self._role
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with role._lock:
                is_idle = role._side._hierarchy.num_unwritten == 0
            if is_idle and not role.has_pending_work():
                return True
            if role.has_pending_work():
                self._llm.llm_engine.step()  # as the core does by itself where it has a process
            time.sleep(0.02)
        return False

    def _spoil(self, side: str) -> dict[str, Any]:
        def fail(*_args: Any, **_more: Any) -> Any:
            raise RuntimeError("a mistake, for a test")

        if side == "scheduler":
            self._role._side.build_meta = fail
        else:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group()._worker._worker.poll = fail
        return {"spoilt": side}

    def _generate_with(self, command: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        how = SamplingParams(
            max_tokens=command["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": command["params"]},
        )
        prompts = [{"prompt_token_ids": ids} for ids in command["generate"]]
        outputs = self._llm.generate(prompts, how, use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "params": [output.kv_transfer_params for output in outputs],
        }

    def _listen(self) -> None:
        publisher = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
        publish = publisher.publish

        def heard(batch: Any) -> None:
            self._events += [(type(each).__name__, str(each.medium)) for each in batch.events]
            publish(batch)

        publisher.publish = heard


if __name__ == "__main__":
    vllm_process.Engine = ConnectorEngine  # type: ignore[misc] # it is what its main makes
    vllm_process.main()
