# SPDX-License-Identifier: Apache-2.0
"""Parts of an engine that go wrong at random: a store, a copy device, a model and a file.

Each fault is one that the part may show in the field and that its user has promised to survive.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from stratakv.connector import build
from stratakv.connector.device import cpu as cpu_device
from stratakv.engine.core import offload as core_offload
from stratakv.tiers import assemble
from stratakv.tiers.base import Answer, Stored, StoreTier, TierStats
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierBusy, TierError
from stratakv.tiers.tag import Proof, Proofs
from stratakv.tiers.tier_settings import TierSettings

T = TypeVar("T")

MODEL_FAULT = "the model was told to fail"
SLOW_COPY_SECONDS = 0.004


class Mischief:
    """Draws what goes wrong. `rates` are probabilities by the name of a fault, none if missing.
    Any thread may ask."""

    def __init__(self, seed: int, rates: Mapping[str, float]) -> None:
        self._rng = random.Random(seed)
        self._rates = rates
        self._lock = threading.Lock()

    def happens(self, fault: str) -> bool:
        rate = self._rates.get(fault, 0.0)
        if not rate:
            return False
        with self._lock:
            return self._rng.random() < rate

    def below(self, bound: float) -> float:
        """A random number from 0 to `bound`."""
        with self._lock:
            return self._rng.uniform(0.0, bound)


class FaultyStore(StoreTier):
    """Another store, but slow, busy, forgetful and failing by turns."""

    def __init__(self, store: StoreTier, mischief: Mischief, late_seconds: float) -> None:
        self.name = store.name
        self.layout = store.layout
        self._store = store
        self._mischief = mischief
        self._late_seconds = late_seconds

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        if self._mischief.happens("lookup fails"):
            raise TierError("a look-up failed")
        answers = self._store.lookup(keys)
        return [Answer.MISS if self._mischief.happens("lookup lies") else a for a in answers]

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self._refuse()
        return self._late(self._store.load(keys, buffers), self._lose)

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        self._refuse()
        stored = self._store.store(keys, buffers, proofs)
        return self._late(stored, lambda outcomes: outcomes)

    def drop(self, keys: Sequence[bytes]) -> int:
        return self._store.drop(keys)

    def clear(self) -> None:
        self._store.clear()

    def stats(self) -> TierStats:
        return self._store.stats()

    def close(self, timeout_seconds: float) -> None:
        self._store.close(timeout_seconds)

    def _refuse(self) -> None:
        if self._mischief.happens("busy"):
            raise TierBusy("the queue is full")
        if self._mischief.happens("refuses"):
            raise TierError("the call failed")

    def _lose(self, proofs: list[Proof | None]) -> list[Proof | None]:
        return [None if self._mischief.happens("load misses") else proof for proof in proofs]

    def _late(self, inner: Future[T], change: Callable[[T], T]) -> Future[T]:
        """The same result a moment later, or an error in its place."""
        outer: Future[T] = Future()
        outer.set_running_or_notify_cancel()

        def end() -> None:
            error = inner.exception()
            if error is None and self._mischief.happens("future fails"):
                error = TierError("the answer was lost")
            if error is not None:
                outer.set_exception(error)
            else:
                outer.set_result(change(inner.result()))

        def ended(_: Future[T]) -> None:
            if self._mischief.happens("late"):
                timer = threading.Timer(self._mischief.below(self._late_seconds), end)
                timer.daemon = True
                timer.start()
            else:
                end()

        inner.add_done_callback(ended)
        return outer


def faulty_copies(copy: Callable[..., None], mischief: Mischief) -> Callable[..., None]:
    """`copy` of the CPU device, sometimes slow, sometimes broken half way."""

    def copy_runs(source: Any, target: Any, runs: Sequence[tuple[int, int, int]]) -> None:
        if mischief.happens("slow copy"):
            time.sleep(mischief.below(SLOW_COPY_SECONDS))
        if mischief.happens("copy fails"):
            copy(source, target, runs[: len(runs) // 2])
            raise OSError("the copy stopped half way")
        copy(source, target, runs)

    return copy_runs


def faulty_forward(
    forward: Callable[..., torch.Tensor], mischief: Mischief
) -> Callable[..., torch.Tensor]:
    """`forward` of a model that sometimes raises, before or after its work, or answers NaN."""

    def run(*args: Any, **options: Any) -> torch.Tensor:
        if mischief.happens("forward raises"):
            raise MemoryError(MODEL_FAULT)
        hidden = forward(*args, **options)
        if mischief.happens("forward raises"):
            raise MemoryError(MODEL_FAULT)
        if len(hidden) and mischief.happens("logits are NaN"):
            hidden[int(mischief.below(len(hidden) - 1))] = float("nan")
        return hidden

    return run


def damage(path: Path, rng: random.Random) -> None:
    """Do to a file: nothing, flip a bit for every 4 KiB of it, or cut its end off."""
    size = path.stat().st_size
    kind = rng.choice(["nothing", "bits", "cut"])
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(rng.randrange(size))
        for _ in range(size // 4096 if kind == "bits" else 0):
            place = rng.randrange(size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def patch_tiers(
    monkeypatch: pytest.MonkeyPatch,
    mischief: Mischief,
    make_store: Callable[..., StoreTier],
    read_seconds: float,
) -> None:
    """Engines that are started from now on have these copies and SSD stores, and wait so long for
    what a store reads."""
    copies = faulty_copies(cpu_device._copy_runs, mischief)
    monkeypatch.setattr(cpu_device, "_copy_runs", copies)
    monkeypatch.setattr(assemble, "SsdStore", make_store)

    def with_seconds(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(layout: BlockLayout, settings: TierSettings, **options: Any) -> Any:
            settings = copy.copy(settings)  # unchecked: its sizes may be below an operator's
            object.__setattr__(settings, "read_seconds", read_seconds)
            return make(layout, settings, **options)

        return made

    for make in (build.build_offload, build.build_scheduler_side):
        monkeypatch.setattr(core_offload, make.__name__, with_seconds(make))
