# SPDX-License-Identifier: Apache-2.0
"""ConnectorContext: what the parts of one connector's scheduler side have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..tiers.hierarchy.hierarchy import Hierarchy
from ..tiers.mailbox import Alarm
from .copy_signal import CopySignal
from .costs.economics import Economics
from .costs.rates import ReadTimes
from .counters import OffloadCounters
from .parts import Parts
from .request_offload import RequestOffload


@dataclass(frozen=True, slots=True, eq=False)
class ConnectorContext:
    """The tiers, the estimates and the records that the parts share. Each part is given all of it
    and keeps what it works with."""

    hierarchy: Hierarchy
    parts: Parts  # the blocks of a position
    signal: CopySignal
    alarm: Alarm  # wakes the engine at a moment
    economics: Economics
    read_times: ReadTimes
    requests: dict[str, RequestOffload]  # by request id; the scheduler side's own
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    job_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
