# SPDX-License-Identifier: Apache-2.0
"""Page-locks a slab in pieces, in the background, and unlocks it at the end.

Locking some gigabytes takes a second, and the copy engine reads only locked memory. So a thread
locks piece after piece while the engine already serves requests. Copies of slots that are not
locked yet are slower. If the system refuses to lock more, the other pieces stay pageable."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable

from ...kernels.copy.copy_engine import CudaError
from ...tiers.settings.sizes import show_size
from .cuda_copy_runtime import Runtime

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20  # small enough for short calls, large enough for few calls

Progress = Callable[[int, int], None]  # (locked bytes, all bytes)


class LockedSlab:
    """The `num_slots` slots of `slot_bytes` bytes from `address` on, page-locked by a thread. If
    slots cannot be locked, the thread calls `refused` once with the reason."""

    def __init__(
        self,
        runtime: Runtime,
        address: int,
        num_slots: int,
        slot_bytes: int,
        *,
        progress: Progress | None = None,
        refused: Callable[[str], None],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._runtime = runtime
        self._address = address
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self.piece_slots = max(1, piece_bytes // slot_bytes)
        self._progress = progress
        self._refused = refused
        self._pieces: list[int] = []
        self._stop = threading.Event()
        # Number of locked slots, from slot 0 on; read without a lock, because it only grows.
        self.num_locked = 0
        self._thread = threading.Thread(target=self._run, name="stratakv-page-lock", daemon=True)
        self._thread.start()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until the thread has locked all it can; return False after `timeout_seconds`."""
        self._thread.join(max(0.0, timeout_seconds))
        return not self._thread.is_alive()

    def close(self, timeout_seconds: float) -> bool:
        """Unlock all pieces, which no copy may use any more. Return False if the thread is still
        locking. Raises the last CudaError if CUDA refuses to unlock pieces."""
        self._stop.set()
        if not self.wait(timeout_seconds):
            return False
        self.num_locked = 0
        pieces, self._pieces = self._pieces, []
        failure: CudaError | None = None
        for address in pieces:
            try:
                self._runtime.unregister_host(address)
            except CudaError as error:
                failure = error
        if failure is not None:
            raise failure
        return True

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._runtime.enter_thread(is_own=True)
            for first in range(0, self._num_slots, self.piece_slots):
                if self._stop.is_set():
                    return
                count = min(self.piece_slots, self._num_slots - first)
                self._lock(first, count)
                if self._progress is not None:
                    self._progress(self.num_locked * self._slot_bytes, self._bytes())
        except CudaError as error:
            self._refused(
                f"{show_size(self.num_locked * self._slot_bytes)} of the slab's "
                f"{show_size(self._bytes())} are page-locked: {error}. "
                f"{locked_memory_advice(self._bytes())}"
            )
            return
        seconds = time.monotonic() - began
        log.info("%s page-locked in %.1f s", show_size(self._bytes()), seconds)

    def _lock(self, first: int, count: int) -> None:
        address = self._address + first * self._slot_bytes
        self._runtime.register_host(address, count * self._slot_bytes)
        self._pieces.append(address)
        self.num_locked = first + count

    def _bytes(self) -> int:
        return self._num_slots * self._slot_bytes


def locked_memory_advice(wanted_bytes: int) -> str:
    """Return a sentence of advice for a machine on which memory cannot be page-locked."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= wanted_bytes:
        return "The limit of locked memory is not the reason; a smaller slab may do"
    return (
        f"The limit of locked memory is {show_size(limit)}; `ulimit -l unlimited` raises it for a "
        "shell, LimitMEMLOCK=infinity for a systemd unit, and --ulimit memlock=-1 for a container"
    )
