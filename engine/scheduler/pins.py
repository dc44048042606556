# SPDX-License-Identifier: Apache-2.0
"""Pins: blocks of an agent's finished turn, kept in the pool until its next turn comes.

A job is a row of requests with one `job_id`, each of which reads what the ones before wrote.
Between two of them a tool runs. A turn that ends is pinned if it is not the job's last one and the
tool is expected to take no longer than THRESHOLD_SECONDS; then its blocks stay for PIN_SECONDS at
most. A job has one pin: that of a later turn takes the place of an earlier one, whose blocks it
shares.

Pinned blocks are offered to the tiers meanwhile, so giving a pin up costs no copy. A request
without room takes it from the oldest pin before another one is preempted. The tiers keep a turn's
blocks too, pinned or not, and have them near when the next one is due."""

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
# A tool that is expected to take longer does not get a pin: others need the room meanwhile.
THRESHOLD_SECONDS = 2.0
# What the tiers keep waits longer: twice as long as the tool is expected to take, and as this says
# where nothing is known; at most MOST_TIER_SECONDS.
TIER_SECONDS, MOST_TIER_SECONDS = 60.0, 300.0
# Before the next turn is due its blocks are read: it may come sooner, and a disk takes its time.
AHEAD_SECONDS, AHEAD_SHARE = 0.2, 0.2
# Of the blocks of the pool, those that all pins hold together at most.
MOST_SHARE = 0.5
MOST_JOBS = 16_384  # whose ends are remembered
MOST_TOOLS = 1_024
_NEW_WEIGHT = 0.3  # of the latest time in an average

K = TypeVar("K")
V = TypeVar("V")

Job = bytes  # the tenant's salt, and the job's id


class Estimator(Protocol):
    """Expected seconds of tools. Called by the step thread; after it has raised once it is called
    no more."""

    def turn_ended(self, job: Job, now: float) -> None: ...
    def turn_arrives(self, job: Job, tool: str, now: float) -> None: ...
    def tool_seconds(self, job: Job, tool: str) -> float | None: ...


class ToolEstimator:
    """Moving averages of the time between a turn's end and the next one's arrival, by the tool
    whose result that brings. Where a job's next tool is not known, its last one is taken."""

    def __init__(self) -> None:
        self._ended: OrderedDict[Job, float] = OrderedDict()
        self._last_tool: OrderedDict[Job, str] = OrderedDict()
        self._average: OrderedDict[str, float] = OrderedDict()

    def turn_ended(self, job: Job, now: float) -> None:
        """A turn of the job has ended, and a tool runs from now on."""
        _put(self._ended, job, now, MOST_JOBS)

    def turn_arrives(self, job: Job, tool: str, now: float) -> None:
        """The next turn has come, with the result of `tool`; "" where the tool is not named."""
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
        """The average seconds of a tool that the job has called; "" for the tool it called last.
        None where no call of it has been seen."""
        return self._average.get(tool or self._last_tool.get(job, ""))


def _put(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


class Pin(NamedTuple):
    """A turn's blocks: `holder` has them in the manager's tables."""

    job_id: str
    tenant: str
    holder: str
    until: float  # monotonic
    num_blocks: int


class Pins:
    """At most one for each job, the oldest first. Called by the engine's step thread only."""

    def __init__(self, context: SchedulerContext, estimator: Estimator | None = None) -> None:
        """`context.config.pin_tenant_share`: of the blocks that may be pinned, those for one tenant
        at most."""
        self._manager = manager = context.manager
        self._counts = context.counts
        self._connector = context.connector
        self._retention = context.connector.job_retention
        tenant_share = context.config.pin_tenant_share
        self._estimator: Estimator | None = ToolEstimator() if estimator is None else estimator
        self._most_blocks = int(MOST_SHARE * manager.pool.num_usable)
        # None: all that may be pinned may be one tenant's, whose oldest pin then gives way.
        self._most_of_tenant = int(tenant_share * self._most_blocks) if tenant_share < 1 else None
        self._of_tenants: Counter[str] = Counter()  # pinned blocks; no entry with none
        self._warned = False
        self._pins: OrderedDict[Job, Pin] = OrderedDict()
        self.num_blocks = 0  # that all pins hold; blocks of several are counted by each

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, job: object) -> bool:
        return job in self._pins

    @property
    def jobs(self) -> Mapping[Job, Pin]:
        """The jobs whose last turn is pinned. Not to be changed."""
        return self._pins

    def job_ids(self) -> list[str]:
        """The ids of those jobs, as their clients gave them."""
        return [pin.job_id for pin in self._pins.values()]

    def next_expiry(self) -> float | None:
        """The time at which the first pin ends by itself (monotonic seconds); None without any."""
        first = next(iter(self._pins.values()), None)
        return None if first is None else first.until

    def is_due(self, now: float) -> bool:
        """Whether a pin has ended, and is to be given back."""
        expiry = self.next_expiry()
        return expiry is not None and expiry <= now

    def arrives(self, request: Request, tool: str, now: float) -> None:
        if request.job:
            self._call_estimator("turn_arrives", request.job, tool, now)

    def pin_turn(self, request: Request, now: float) -> bool:
        """A turn has ended well, and holds its blocks: whether they are pinned now. If not, they
        are the caller's to give back."""
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
        """The last turn of a job has called `tool`; its pin ends where that takes too long."""
        seconds = self._seconds(job, tool)
        if seconds is not None and self._retention is not None:
            self._retention.turn_expected(job, _due(seconds))
        if job in self._pins and not self._pays(job, tool):
            self._unpin_job(job)
            self._counts["pins_not_worth"] += 1

    def expire(self, now: float) -> None:
        """Unpin the turns whose PIN_SECONDS are over."""
        while self.is_due(now):
            self._unpin_job(next(iter(self._pins)))
            self._counts["pins_expired"] += 1

    def release_oldest(self, spare: Job = b"") -> bool:
        """Give up the pin that is the oldest, that of `spare` only if there is no other; whether
        there was one."""
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
        self._retention.turn_ended(request.job, self._manager.names.of_request(request), most, due)

    def _seconds(self, job: Job, tool: str) -> float | None:
        """Expected seconds of a tool; None where the estimator has none, or a number that is not
        finite."""
        seconds = self._call_estimator("tool_seconds", job, tool)
        return seconds if seconds is not None and math.isfinite(seconds) else None

    def _pays(self, job: Job, tool: str) -> bool:
        seconds = self._call_estimator("tool_seconds", job, tool)
        return seconds is None or not seconds > THRESHOLD_SECONDS

    def _call_estimator(self, name: str, *arguments: object) -> float | None:
        """Ask the estimator; one that fails costs the engine nothing."""
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
    """Seconds after which the blocks are to be near, of a tool that takes `seconds`."""
    return max(0.0, seconds - max(AHEAD_SECONDS, AHEAD_SHARE * seconds))
