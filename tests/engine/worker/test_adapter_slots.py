# SPDX-License-Identifier: Apache-2.0
"""AdapterSlots: the slots that adapters get, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from stratakv.engine.worker.adapter_slots import AdapterSlots, ReadAdapter
from stratakv.engine.worker.input_batch import InputBatch


class NotedSlots:
    """Slots of a model that note what is put into them, by the names of adapters."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.now: list[str | None] = [None] * num_slots
        self.puts: list[str | None] = []

    def put_adapter(self, slot: int, prepared: Any) -> None:
        self.now[slot] = prepared
        self.puts.append(prepared)


class Rig:
    """Adapters of one letter each, whose letter is their fingerprint."""

    def __init__(self, num_slots: int, loaded: str) -> None:
        self.model = NotedSlots(num_slots)
        self.slots = AdapterSlots(cast(Any, self.model), cast(Any, None), torch.float32, 8)
        for letter in loaded:
            self.load(letter)

    def load(self, letter: str, prepared: str = "") -> None:
        made = cast(Any, prepared or letter)
        self.slots.add_adapter(ReadAdapter(Path(letter), letter.encode(), 4, 64, made))

    def step(self, letters: str, counts: Sequence[int] = ()) -> list[str] | None:
        """Plan a step with these adapters in its rows, `-` for none; what each token gets."""
        batch = SimpleNamespace(
            requests=[SimpleNamespace(adapter=each.strip("-").encode()) for each in letters]
        )
        rows = np.arange(len(letters))
        found = self.slots.plan_step(
            cast(InputBatch, batch), rows, np.array(counts or [1] * len(letters))
        )
        if found is None:
            return None
        assert found.dtype == np.int32
        return ["-" if slot < 0 else str(self.model.now[slot]) for slot in found]


def test_each_token_has_the_slot_of_its_requests_adapter() -> None:
    rig = Rig(3, "abc")
    assert rig.step("a-ba", [2, 1, 3, 1]) == list("aa-bbba")
    assert rig.model.puts == ["a", "b"], "what no request has takes no slot"
    assert rig.step("ba") == ["b", "a"] and rig.model.puts == ["a", "b"], "they have slots already"
    assert rig.step("---") is None
    batch: Any = SimpleNamespace(requests=[None, SimpleNamespace(adapter=b"c")])
    found = rig.slots.plan_step(batch, np.array([1, 0]), np.array([1, 2]))
    assert found is not None and found.tolist() == [2, -1, -1]


def test_a_model_without_loaded_adapters_plans_nothing() -> None:
    assert Rig(2, "").step("--") is None


def test_the_adapter_that_was_used_longest_ago_gives_its_slot() -> None:
    rig = Rig(2, "abcd")
    for letters, puts in (("a", "a"), ("b", "b"), ("a", ""), ("c", "c"), ("a", ""), ("bc", "b"),
                          ("cb", ""), ("da", "da"), ("ad", "")):  # fmt: skip
        before = len(rig.model.puts)
        assert rig.step(letters) == list(letters)
        assert rig.model.puts[before:] == list(puts), letters


def test_an_adapter_of_the_step_keeps_its_slot_while_another_one_gets_one() -> None:
    rig = Rig(2, "abc")
    rig.step("ab")  # `a` was used longest ago
    assert rig.step("ca") == ["c", "a"]
    assert rig.model.puts == ["a", "b", "c"]


def test_a_dropped_adapter_leaves_an_empty_slot_and_is_unknown() -> None:
    rig = Rig(2, "abc")
    rig.step("ab")
    rig.slots.drop_adapter(b"a")
    rig.slots.drop_adapter(b"a")
    assert rig.model.now == [None, "b"]
    assert rig.step("bc") == ["b", "c"] and rig.model.now == ["c", "b"]
    with pytest.raises(ValueError, match="the adapter 61 is not loaded"):
        rig.step("a")
    rig.load("a", "newly loaded")
    assert rig.step("ab") == ["newly loaded", "b"]


def test_an_adapter_that_is_loaded_twice_stays_as_it_is() -> None:
    rig = Rig(2, "a")
    rig.step("a")
    rig.load("a", "once more")
    assert rig.step("a") == ["a"] and rig.model.puts == ["a"]


def test_more_adapters_than_slots_are_refused_and_change_nothing() -> None:
    rig = Rig(2, "abc")
    rig.step("ab")
    with pytest.raises(ValueError, match="a step has 3 adapters, and the model has 2 slots"):
        rig.step("abc")
    assert rig.step("ab") == ["a", "b"] and rig.model.puts == ["a", "b"]


def test_an_unknown_adapter_takes_no_slot_of_others() -> None:
    rig = Rig(1, "a")
    rig.step("a")
    with pytest.raises(ValueError, match="is not loaded"):
        rig.step("z")
    assert rig.step("a") == ["a"] and rig.model.puts == ["a"]
