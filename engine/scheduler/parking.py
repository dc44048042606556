# SPDX-License-Identifier: Apache-2.0
"""The car park: requests whose blocks are being loaded from a tier, until they are reported.

A parked request holds its blocks, is in no queue and computes nothing. It leaves when the connector
reports it, in one of these ways:

    some or all tokens came   its computed part grows and is named; it goes on with its blocks
    nothing came              it gives its blocks back and will compute, never asking again
    its load was cancelled    it gives its blocks back and may load again: it was preempted
    it ended meanwhile        its blocks are given back only now, because the copy wrote to them
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...connector.base import KVConnectorScheduler, LoadReport
from ..cache.kv_cache_coordinator import GroupBlocks
from ..cache.kv_cache_manager import KVCacheManager
from ..request import Request, RequestStatus

_log = logging.getLogger(__name__)


class CarPark:
    """Parked requests by id, the ended ones among them."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_unfinished(self) -> int:
        """Parked requests that somebody still waits for."""
        return sum(not request.is_finished for request in self._requests.values())

    def park(
        self,
        request: Request,
        hits: GroupBlocks,
        num_local_tokens: int,
        num_external_tokens: int,
        connector: KVConnectorScheduler,
        keep_free_blocks: int,
    ) -> bool:
        """Allocate the blocks of a load and hand them to the connector; False: no room, and
        nothing has changed."""
        blocks = self._manager.allocate_slots(
            request,
            num_new_tokens=0,
            num_new_computed_tokens=num_local_tokens,
            new_computed_blocks=hits,
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=True,
            keep_free_blocks=keep_free_blocks,
        )
        if blocks is None:
            return False
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = num_local_tokens
        request.num_external_computed_tokens = num_external_tokens
        self._requests[request.request_id] = request
        connector.update_after_alloc(
            request, [block.block_id for block in blocks[0]], num_external_tokens
        )
        return True

    def hold(self, request: Request) -> None:
        """Take in a request that does not run any more while blocks of it are being written to.
        It is reported when that is over, as one whose load was cancelled."""
        self._requests[request.request_id] = request

    def release(self, reports: Iterable[LoadReport]) -> list[tuple[Request, LoadReport]]:
        """Take out the reported requests; those that go on, each with its report."""
        going_on = []
        for report in reports:
            request = self._requests.pop(report.request_id, None)
            if request is None:
                # Nothing here depends on it, and a fault of the connector may cost no more.
                _log.warning("a load was reported for %s, which is not parked", report.request_id)
            elif request.is_finished:
                self._manager.free(request)
            else:
                self._settle(request, report)
                going_on.append((request, report))
        return going_on

    def _settle(self, request: Request, report: LoadReport) -> None:
        loaded = min(report.num_loaded_tokens, request.num_external_computed_tokens)
        request.status = RequestStatus.WAITING
        request.num_external_computed_tokens = loaded
        if loaded > 0:
            request.num_computed_tokens += loaded
            self._manager.cache_blocks(request, request.num_computed_tokens)
        else:
            # Without its blocks it is admitted like any other request, hits included.
            self._manager.free(request)
            request.num_computed_tokens = 0
            request.external_load_failed = not report.is_cancelled
