# SPDX-License-Identifier: Apache-2.0
"""ConnectorContext: the objects that the classes of one connector's scheduler side share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..tiers.hierarchy.hierarchy import Hierarchy
from ..tiers.mailbox import Alarm
from .copy_signal import CopySignal
from .costs.economics import Choice, Economics
from .costs.rates import PrefillRate, ReadTimes
from .counters import OffloadCounters
from .parts import Parts
from .request_offload import RequestOffload


@dataclass(slots=True, eq=False)
class ConnectorContext:
    """The tiers, estimates and records that the classes of the scheduler side share. The engine
    records the time of prefills in `prefill`."""

    hierarchy: Hierarchy
    parts: Parts  # which blocks make up a position
    signal: CopySignal
    choice: Choice = Choice.AUTO
    prefill: PrefillRate = field(default_factory=PrefillRate)
    copies_beside: bool = True  # whether copies run in parallel with forward passes
    economics: Economics = field(init=False)
    read_times: ReadTimes = field(init=False)
    alarm: Alarm = field(init=False)  # wakes the engine at a set time
    counters: OffloadCounters = field(default_factory=OffloadCounters, init=False)
    job_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)
    requests: dict[str, RequestOffload] = field(default_factory=dict, init=False)  # by id

    def __post_init__(self) -> None:
        self.economics = Economics(self.hierarchy, self.parts, self.choice, prefill=self.prefill)
        self.read_times = ReadTimes(self.hierarchy, self.economics.links)
        self.economics.queued = self.read_times.queued
        self.alarm = Alarm(self.signal.wake)
