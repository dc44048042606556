# SPDX-License-Identifier: Apache-2.0
"""What submitting a job costs the step loop, against what copying its blocks costs a thread.

Both in processor time of the calling thread, in turn: submitting is `OffloadWorker.start_step` with
one job, copying is memcpy of as many blocks between as random places of plain memory, which also
leaves caches as a forward pass does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...connector.base import ConnectorMetadata, CopyJob
from ..harness.comparison import WrongWork
from ..harness.report import median
from .rig import WAIT_SECONDS, Rig, copy_plainly
from .scale import JOB_BLOCKS


@dataclass(slots=True)
class Submissions:
    """Processor seconds, one entry for each job; stores and loads in turn."""

    submit_seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of the ratios of neighbours."""
        pairs = zip(self.submit_seconds, self.copy_seconds, strict=True)
        return median([submit / copy for submit, copy in pairs])

    def figures(self) -> dict[str, float]:
        """What the JSON holds of it."""
        return {
            "submissions": len(self.submit_seconds),
            "blocks": JOB_BLOCKS,
            "submit_cpu_seconds": median(self.submit_seconds),
            "copy_cpu_seconds": median(self.copy_seconds),
        }


def take_submissions(rig: Rig, count: int) -> Submissions:
    """Raises WrongWork where a job did not end well."""
    taken = Submissions()
    _submit(rig, 0)  # the first one pays for what is made once
    for number in range(1, count + 1):
        moves = list(zip(_places(rig), _places(rig), strict=True))
        source, target = rig.plain
        taken.copy_seconds.append(_busy(partial(copy_plainly, source, target, moves)))
        taken.submit_seconds.append(_submit(rig, number))
    return taken


def _submit(rig: Rig, job_id: int) -> float:
    job = CopyJob(job_id, _places(rig), _places(rig))
    is_load = bool(job_id % 2)
    meta = ConnectorMetadata(loads=[job]) if is_load else ConnectorMetadata(ahead=[job])
    rig.signal.jobs_given(1)
    seconds = _busy(partial(rig.worker.start_step, meta))
    if not rig.signal.wait_idle(WAIT_SECONDS):
        raise WrongWork(f"a copy did not end within {WAIT_SECONDS:g} s")
    output = rig.worker.poll()
    if (output.finished_loads if is_load else output.finished_stores) != [job_id]:
        raise WrongWork(f"job {job_id} did not end well: {output}")
    return seconds


def _places(rig: Rig) -> list[int]:
    """Random ones for a whole job, each of them once where there are so many."""
    places = rig.rng.sample(range(rig.num_blocks), min(JOB_BLOCKS, rig.num_blocks))
    return (places * -(-JOB_BLOCKS // len(places)))[:JOB_BLOCKS]


def _busy(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
