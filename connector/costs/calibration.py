# SPDX-License-Identifier: Apache-2.0
"""Calibration: measures the rates of the tiers at the start, before the first request."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

from ..base import TierEstimates
from ..connector_context import ConnectorContext
from ..messages import ConnectorMetadata, ConnectorWorkerOutput, CopyJob
from .economics import Economics

log = logging.getLogger(__name__)

COPIES = 3  # of which the quickest counts, because other work of the machine only adds time
COPY_BYTES = 32 * 1024**2  # bytes of a copy; more than caches hold
# The least bytes of a read that shows a disk's speed.
LEAST_READ_BYTES = 2 * 1024**2
_TYPICAL_PROMPT = 1024  # tokens


class Calibration(TierEstimates):
    """Times loads before the first request, so that the first choice between loading and computing
    uses measured rates.

    stores   each store reads some of its blocks and discards them
    slab     empty slots are copied to unused blocks of the pool"""

    def __init__(self, context: ConnectorContext) -> None:
        self._economics = context.economics
        self._hierarchy = context.hierarchy
        self._signal = context.signal
        self._job_ids = context.job_ids
        self._links = context.economics.links
        self._slab_link = self._links[context.hierarchy.tiers[0]]
        self._num_copies = 0  # begun
        self.job: CopyJob | None = None  # the copy under way; read only
        self._quickest = math.inf  # seconds a byte

    def build_calibration_meta(self, block_ids: Sequence[int], seconds: float) -> ConnectorMetadata:
        if self.job is not None or self._num_copies == COPIES or not block_ids:
            return ConnectorMetadata()
        if not self._num_copies:
            self._read_stores(seconds)
        self.job = self._next_copy(block_ids)
        self._signal.jobs_given(1)
        return ConnectorMetadata(loads=[self.job])

    def describe(self) -> str:
        return in_words(self._economics, self.tiers_down())

    def cpu_blocks(self) -> tuple[int, int]:
        return self._hierarchy.num_free_slots, self._hierarchy.num_slots

    def tiers_down(self) -> list[str]:
        return [store.name for store in self._hierarchy.stores if not store.is_up]

    def pop_calibration_job(self, output: ConnectorWorkerOutput) -> int:
        """Remove the calibration's job from the ended jobs. Return the number of removed jobs."""
        job = self.job
        if job is None:
            return 0
        for ids in (output.finished_loads, output.failed_loads):
            if job.job_id in ids:
                ids.remove(job.job_id)
                break
        else:
            return 0
        self.job = None
        # The calibration's time is unknown if other loads ended too.
        if not (output.finished_loads or output.failed_loads):
            if ids is output.finished_loads:
                self._learn(len(job.slots) * self._hierarchy.block_bytes, output.load_copy_seconds)
            output.load_copy_seconds = 0.0
        return 1

    def _read_stores(self, seconds: float) -> None:
        """Measure the stores one after the other, each for an equal share of `seconds`."""
        stores = self._hierarchy.stores
        for store in stores:
            try:
                sample = store.trial_read(seconds / len(stores))
                if sample is not None and sample.num_bytes >= LEAST_READ_BYTES:
                    self._links[store.name].believe(*sample)
            except Exception as error:  # noqa: BLE001 - a foreign tier may raise anything
                log.warning("the %s tier could not be tried: %s", store.name, error)

    def _next_copy(self, block_ids: Sequence[int]) -> CopyJob:
        num_slots = self._hierarchy.num_slots
        most = max(1, COPY_BYTES // self._hierarchy.block_bytes)
        num_blocks = min(len(block_ids), num_slots, most)
        # Each copy reads other memory, because caches would make a repeated copy quicker.
        start = self._num_copies * num_blocks
        places = range(start, start + num_blocks)
        self._num_copies += 1
        return CopyJob(
            next(self._job_ids),
            [block_ids[place % len(block_ids)] for place in places],
            # Backwards, because neighbours in the pool are seldom neighbours in the slab.
            [place % num_slots for place in reversed(places)],
        )

    def _learn(self, num_bytes: int, seconds: float) -> None:
        if 0.0 < seconds / num_bytes < self._quickest:
            self._quickest = seconds / num_bytes
            self._slab_link.believe(num_bytes, seconds)


def in_words(economics: Economics, down: Collection[str] = ()) -> str:
    """Return one line of text with the estimates, and the prompt lengths from which loading is
    quicker than computing. Tiers in `down` are listed without estimates."""
    compute = economics.prefill.estimate_prefill(0, _TYPICAL_PROMPT)
    parts = ["prefill not measured"]
    if compute:
        parts = [f"prefill {_TYPICAL_PROMPT / compute:,.0f} tokens/s"]
    for name, link in economics.links.items():
        if name in down:
            parts.append(f"{name} is down")
            continue
        rate = f"{1e-9 / link.seconds_per_byte:.2g} GB/s"
        parts.append(f"{name} loads {rate}{'' if link.is_measured else ' (not measured)'}")
    if not compute:
        return ", ".join(parts)
    up = [name for name in economics.links if name not in down]
    from_on = {name: economics.break_even_tokens(name) for name in up}
    pays = [
        f"never from {name}" if tokens is None else f"from {tokens} tokens ({name})"
        for name, tokens in from_on.items()
    ]
    return f"{', '.join(parts)}: loading pays {', '.join(pays)}"
