# SPDX-License-Identifier: Apache-2.0
"""TenantStoreCalls: calls tenant stores without blocking the event loop.

    run_quick   on the loop if the tenant store's lock is free, else on a thread
    run         on a thread, for work that may wait or take long

Each tenant has a limited number of threads, so a slow store leaves threads for other tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from .served_store import ServedStore

_THREADS = 16
_MOST_SHARES = 8
_Result = TypeVar("_Result")


class TenantStoreCalls:
    """The calls of one event loop to tenant stores."""

    def __init__(self, num_tenants: int) -> None:
        self._share = _THREADS // min(num_tenants, _MOST_SHARES)
        threads = max(_THREADS, self._share * num_tenants)  # at most; made when needed
        self._executor = ThreadPoolExecutor(threads, "stratakv-call")
        self._places: dict[str, asyncio.Semaphore] = {}

    async def submit(self, tenant: str, work: Callable[[], _Result]) -> Future[_Result]:
        """Wait until one of the tenant's threads is free, and begin `work` on it."""
        places = self._places.setdefault(tenant, asyncio.Semaphore(self._share))
        await places.acquire()
        loop = asyncio.get_running_loop()

        def ended(_future: Future[_Result]) -> None:
            try:
                loop.call_soon_threadsafe(places.release)
            except RuntimeError:
                pass  # the event loop has been closed

        try:
            future = self._executor.submit(work)
        except BaseException:
            places.release()
            raise
        # The place is freed when the thread ends, perhaps after the call.
        future.add_done_callback(ended)
        return future

    async def run(
        self,
        tenant: str,
        work: Callable[[], _Result],
        undo: Callable[[_Result], object] | None = None,
    ) -> _Result:
        """Do `work` on a thread. `undo` gets the result if the caller is cancelled meanwhile."""
        future = await self.submit(tenant, work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                future.add_done_callback(
                    lambda done: (
                        None if done.cancelled() or done.exception() else undo(done.result())
                    )
                )
            raise

    async def run_quick(
        self,
        tenant: str,
        tenant_store: ServedStore,
        work: Callable[[], _Result],
        undo: Callable[[_Result], object] | None = None,
    ) -> _Result:
        """Do `work` on the event loop if the tenant store's lock is free, else on a thread."""
        if not tenant_store.try_hold():
            return await self.run(tenant, work, undo)
        try:
            return work()
        finally:
            tenant_store.let_go()

    def run_later(
        self, tenant_store: ServedStore, work: Callable[[], object], after: Future[object] | None
    ) -> None:
        """Queue `work` on a thread, to run after the future `after` has ended. Does not wait."""

        def begin(_done: object = None) -> None:
            if tenant_store.try_hold():
                try:
                    work()
                finally:
                    tenant_store.let_go()
                return
            try:
                self._executor.submit(work)
            except RuntimeError:
                pass  # the threads have ended, and the tenant store is about to be closed

        if after is None:
            begin()
        else:
            after.add_done_callback(begin)

    def close(self) -> None:
        """Stop beginning work. Does not wait for running work. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
