# SPDX-License-Identifier: Apache-2.0
"""AdapterSlots: the adapters in a worker's memory, and the adapters' slots in the model.

    loaded ──► host memory, in the form of the model's products
    in use ──► a slot: written before the first step that needs it, kept until another adapter
               needs the slot

The copies into a slot are queued before the step's forward pass and after all earlier forward
passes, so no step reads a slot while the slot changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...tiers.settings.values import ConfigError
from ..batch.batch_update import IntArray
from ..models.dtypes import dtype_name
from ..models.lora.adapter_file import AdapterFile
from ..models.lora.layer_adapters import layer_adapters
from ..models.lora.model_slots import ModelSlots, PreparedAdapter
from ..models.lora.row_slots import NO_SLOT
from ..models.model_spec import ModelSpec
from .input_batch import InputBatch


class ReadAdapter(NamedTuple):
    """An adapter that was read from its files."""

    path: Path
    fingerprint: bytes
    rank: int
    num_bytes: int
    # The weights in the form of the model's products; None: a worker process has them.
    prepared: PreparedAdapter | None = None
    number: int = 0  # under which the worker process has the weights


class AdapterSlots:
    """The adapters of one model."""

    def __init__(
        self, slots: ModelSlots, spec: ModelSpec, dtype: torch.dtype, max_rank: int
    ) -> None:
        self._slots, self._spec, self._dtype, self._max_rank = slots, spec, dtype, max_rank
        self._loaded: dict[bytes, PreparedAdapter] = {}
        self._slot_of: dict[bytes, int] = {}  # the least recently used adapter first

    def read_adapter(self, path: Path) -> ReadAdapter:
        """Read an adapter. Any thread may call this. Raises ConfigError like `AdapterFile.read`."""
        file = AdapterFile.read(path, self._spec, self._max_rank)
        layers = layer_adapters(file, self._spec, self._dtype)
        matrices = (each for own in layers for low in own.values() for each in (low.ins, *low.outs))
        if not all(bool(torch.isfinite(each).all()) for each in matrices):
            raise ConfigError(
                f"{path} has numbers too large for {dtype_name(self._dtype)}; start the engine "
                "with --dtype bfloat16 or float32"
            )
        prepared = self._slots.prepare_adapter(layers)
        return ReadAdapter(path, file.fingerprint, file.rank, file.num_bytes, prepared)

    def add_adapter(self, adapter: ReadAdapter) -> None:
        """Keep an adapter for the steps from now on."""
        assert adapter.prepared is not None
        self._loaded.setdefault(adapter.fingerprint, adapter.prepared)

    def drop_adapter(self, fingerprint: bytes) -> None:
        """Drop an adapter that no request has any more; an unknown adapter is ignored."""
        self._loaded.pop(fingerprint, None)
        slot = self._slot_of.pop(fingerprint, None)
        if slot is not None:
            self._slots.put_adapter(slot, None)

    def plan_step(
        self, batch: InputBatch, rows: IntArray, counts: IntArray
    ) -> npt.NDArray[np.int32] | None:
        """Give each adapter of a step a slot. Return the slot of each token, int32 `[tokens]`; None
        if no request has an adapter. `rows` of the batch compute `counts` tokens each. Raises
        ValueError for an unknown adapter, and for more adapters than slots."""
        if not self._loaded:
            return None
        requests = [batch.requests[row] for row in rows.tolist()]
        names = [b"" if request is None else request.adapter for request in requests]
        used = dict.fromkeys(name for name in names if name)
        if not used:
            return None
        self._take_slots(list(used))
        slot_of = {**self._slot_of, b"": NO_SLOT}
        return np.repeat(np.array([slot_of[name] for name in names], np.int32), counts)

    def _take_slots(self, used: Sequence[bytes]) -> None:
        if len(used) > self._slots.num_slots:
            raise ValueError(
                f"a step has {len(used)} adapters, and the model has {self._slots.num_slots} slots"
            )
        for fingerprint in used:  # adapters with a slot come first, to keep the slot
            if fingerprint in self._slot_of:
                self._slot_of[fingerprint] = self._slot_of.pop(fingerprint)
        for fingerprint in used:
            if fingerprint in self._slot_of:
                continue
            if fingerprint not in self._loaded:
                raise ValueError(f"the adapter {fingerprint.hex()[:16]} is not loaded")
            slot = self._free_slot()
            self._slots.put_adapter(slot, self._loaded[fingerprint])
            self._slot_of[fingerprint] = slot

    def _free_slot(self) -> int:
        taken = set(self._slot_of.values())
        free = next((slot for slot in range(self._slots.num_slots) if slot not in taken), None)
        if free is None:
            return self._slot_of.pop(next(iter(self._slot_of)))
        return free
