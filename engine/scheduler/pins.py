# SPDX-License-Identifier: Apache-2.0
"""Pins: KV blocks of an agent's finished request, kept in the pool for the agent's next request.

A *job* is an agent's sequence of requests with one `job_id`. Each request (a *turn*) contains the
text of the earlier turns, and a tool runs between two turns. When a turn ends, its blocks are
pinned, unless it is the job's last turn or the tool is expected to take longer than
THRESHOLD_SECONDS. A pin lasts PIN_SECONDS at most. A later turn's pin replaces the job's earlier
pin, because both turns share blocks.

Pinned blocks are offered to the tiers at once, so that giving up a pin later needs no copy. If a
request lacks blocks, the oldest pin is given up before a request is preempted. The tiers also keep
a turn's blocks, pinned or not, and load the blocks shortly before the next turn is due."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeVar

from ..request.request import Request
from .context import SchedulerContext

logger = logging.getLogger(__name__)

PIN_SECONDS = 10.0
# The longest expected time of a tool for which blocks are pinned: other requests need the room.
THRESHOLD_SECONDS = 2.0
# The tiers keep a turn's blocks for twice the tool's expected time, TIER_SECONDS if that time is
# unknown, and MOST_TIER_SECONDS at most.
TIER_SECONDS, MOST_TIER_SECONDS = 60.0, 300.0
# How early the tiers load blocks before the next turn, in seconds or as a share of the tool's time.
AHEAD_SECONDS, AHEAD_SHARE = 0.2, 0.2
# The largest share of the pool's blocks that all pins together may hold.
MOST_SHARE = 0.5
MOST_JOBS = 16_384  # the most jobs that the estimator remembers
MOST_TOOLS = 1_024
_NEW_WEIGHT = 0.3  # weight of the latest time in an average

K = TypeVar("K")
V = TypeVar("V")

Job = bytes  # the tenant's salt and the job's id


class Estimator(Protocol):
    """Estimates, in the step thread, how many seconds a tool takes; dropped if it raises."""

    def turn_ended(self, job: Job, now: float) -> None: ...
    def turn_arrives(self, job: Job, tool: str, now: float) -> None: ...
    def tool_seconds(self, job: Job, tool: str) -> float | None: ...


class ToolEstimator:
    """A moving average, for each tool, of the seconds from the end of a turn to the arrival of the
    next turn, which names the tool. If a job's next tool is unknown, its last tool is used."""

    def __init__(self) -> None:
        self._ended: OrderedDict[Job, float] = OrderedDict()
        self._last_tool: OrderedDict[Job, str] = OrderedDict()
        self._average: OrderedDict[str, float] = OrderedDict()

    def turn_ended(self, job: Job, now: float) -> None:
        """Record that a turn of the job has ended and the agent's tool starts."""
        _put(self._ended, job, now, MOST_JOBS)

    def turn_arrives(self, job: Job, tool: str, now: float) -> None:
        """Record the arrival of the job's next turn, which contains the result of `tool` ("" if the
        client did not name the tool)."""
        began = self._ended.pop(job, None)
        if not tool:
            return
        _put(self._last_tool, job, tool, MOST_JOBS)
        if began is not None:
            before = self._average.get(tool)
            took = max(0.0, now - began)
            mean = took if before is None else before + _NEW_WEIGHT * (took - before)
            _put(self._average, tool, mean, MOST_TOOLS)

    def tool_seconds(self, job: Job, tool: str) -> float | None:
        """Return the average seconds of `tool` ("": the job's last tool); None if never timed."""
        return self._average.get(tool or self._last_tool.get(job, ""))


def _put(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


class Pin(NamedTuple):
    """The pinned blocks of a turn. The `KVCacheManager` stores their block tables under the id
    `holder`."""

    job_id: str
    tenant: str
    holder: str
    until: float  # monotonic
    num_blocks: int


class Pins:
    """The pins of all jobs, oldest pin first, one per job. Called by the step thread only."""

    def __init__(self, context: SchedulerContext, estimator: Estimator | None = None) -> None:
        """`context.config.pin_tenant_share` is the largest share of all pinnable blocks that one
        tenant's pins may take."""
        self._manager = manager = context.manager
        self._counts = context.counts
        self._connector = context.connector
        self._retention = context.connector.job_retention
        tenant_share = context.config.pin_tenant_share
        self._estimator: Estimator | None = ToolEstimator() if estimator is None else estimator
        self._most_blocks = int(MOST_SHARE * manager.pool.num_usable)
        # None: one tenant may pin all pinnable blocks; the oldest pin is then given up.
        self._most_of_tenant = int(tenant_share * self._most_blocks) if tenant_share < 1 else None
        self._of_tenants: Counter[str] = Counter()  # pinned blocks by tenant; zeros are removed
        self._warned = False
        self._pins: OrderedDict[Job, Pin] = OrderedDict()
        self.num_blocks = 0  # blocks of all pins; a block of several pins counts several times

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, job: object) -> bool:
        return job in self._pins

    @property
    def jobs(self) -> Mapping[Job, Pin]:
        """The pins by job. Read only."""
        return self._pins

    def job_ids(self) -> list[str]:
        """Return the `job_id` of every pinned job, as the client gave it."""
        return [pin.job_id for pin in self._pins.values()]

    def next_expiry(self) -> float | None:
        """Return when the oldest pin expires, in monotonic seconds; None without a pin."""
        first = next(iter(self._pins.values()), None)
        return None if first is None else first.until

    def is_due(self, now: float) -> bool:
        """Whether the oldest pin has expired, so that `expire` will release it."""
        expiry = self.next_expiry()
        return expiry is not None and expiry <= now

    def arrives(self, request: Request, tool: str, now: float) -> None:
        if request.job:
            self._call_estimator("turn_arrives", request.job, tool, now)

    def pin_turn(self, request: Request, now: float) -> bool:
        """Pin the blocks of a turn that ended normally, if the pin is worth its memory. Return
        whether the blocks are pinned; if not, the caller must release them."""
        job = request.job
        if not job or request.is_last_step:
            if job:
                self._unpin_job(job)
                if self._retention is not None:
                    self._retention.job_ended(job)
            return False
        self._call_estimator("turn_ended", job, now)
        self._keep_in_tiers(request)
        self._unpin_job(job)
        ids = self._manager.get_block_ids(request.request_id)
        num_blocks = sum(len(table) - table.count(0) for table in ids)  # 0 is the null block
        if (states := self._manager.states) is not None:
            num_blocks += states.num_to_pin(request.request_id)
        if not num_blocks or num_blocks > self._most_blocks or not self._pays(job, ""):
            return False
        most = self._most_of_tenant
        if most is not None and self._of_tenants[request.tenant] + num_blocks > most:
            self._note_over_quota(request.tenant, num_blocks)
            return False
        while self.num_blocks + num_blocks > self._most_blocks:
            self.release_oldest()
        if self._connector.has_tiers:
            self._manager.offer(request)
        holder = f"\0{request.number}"  # no request can have this id
        self._manager.pin(request, holder)
        self._pins[job] = Pin(request.job_id, request.tenant, holder, now + PIN_SECONDS, num_blocks)
        self.num_blocks += num_blocks
        self._of_tenants[request.tenant] += num_blocks
        self._counts["pins"] += 1
        return True

    def tool_called(self, job: Job, tool: str) -> None:
        """Record that a job's last turn called `tool`; release the pin if the tool is slow."""
        seconds = self._seconds(job, tool)
        if seconds is not None and self._retention is not None:
            self._retention.turn_expected(job, _due(seconds))
        if job in self._pins and not self._pays(job, tool):
            self._unpin_job(job)
            self._counts["pins_not_worth"] += 1

    def expire(self, now: float) -> None:
        """Release the pins older than PIN_SECONDS; the counter `pins_expired` counts them."""
        while self.is_due(now):
            self._unpin_job(next(iter(self._pins)))
            self._counts["pins_expired"] += 1

    def release_oldest(self, spare: Job = b"") -> bool:
        """Give up the oldest pin. The pin of the job `spare` is given up only if no other pin
        exists. Return whether a pin was given up."""
        if not self._pins:
            return False
        job = next((each for each in self._pins if each != spare), spare)
        self._unpin_job(job)
        self._counts["pins_given_up"] += 1
        return True

    def release_all(self) -> None:
        while self.release_oldest():
            pass

    def _unpin_job(self, job: Job) -> None:
        pin = self._pins.pop(job, None)
        if pin is not None:
            self.num_blocks -= pin.num_blocks
            self._of_tenants[pin.tenant] -= pin.num_blocks
            if not self._of_tenants[pin.tenant]:
                del self._of_tenants[pin.tenant]
            self._manager.unpin(pin.holder)

    def _note_over_quota(self, tenant: str, num_blocks: int) -> None:
        self._counts["pins_over_quota"] += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "a turn of %d blocks is not kept: tenant %r has %d kept, and may have %d; raise "
                "--pin-tenant-share, or expect its jobs to load or compute again. Said once; "
                "stratakv:pins_over_quota counts",
                num_blocks, tenant, self._of_tenants[tenant], self._most_of_tenant,
            )  # fmt: skip

    def _keep_in_tiers(self, request: Request) -> None:
        if self._retention is None:
            return
        seconds = self._seconds(request.job, "")
        most, due = TIER_SECONDS, None
        if seconds is not None:
            most, due = min(max(PIN_SECONDS, 2 * seconds), MOST_TIER_SECONDS), _due(seconds)
        self._retention.turn_ended(request.job, self._manager.keys.of_request(request), most, due)

    def _seconds(self, job: Job, tool: str) -> float | None:
        """Return the expected seconds of a tool; None if the estimator returns no finite number."""
        seconds = self._call_estimator("tool_seconds", job, tool)
        return seconds if seconds is not None and math.isfinite(seconds) else None

    def _pays(self, job: Job, tool: str) -> bool:
        seconds = self._call_estimator("tool_seconds", job, tool)
        return seconds is None or not seconds > THRESHOLD_SECONDS

    def _call_estimator(self, name: str, *arguments: object) -> float | None:
        """Call a method of the estimator. If it raises, log the error and drop the estimator."""
        if self._estimator is None:
            return None
        try:
            answer = getattr(self._estimator, name)(*arguments)
            return None if answer is None else float(answer)
        except Exception:
            logger.exception("the estimator of tools failed, and is asked no more")
            self._estimator = None
            return None


def _due(seconds: float) -> float:
    """Return the seconds until the tiers must load the blocks, if the tool takes `seconds`."""
    return max(0.0, seconds - max(AHEAD_SECONDS, AHEAD_SHARE * seconds))
