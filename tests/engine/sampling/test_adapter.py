# SPDX-License-Identifier: Apache-2.0
"""One callable for each request inside the batch interface: its arguments, drafts and faults."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.sampling.processor_loading import LoadedProcessor
from stratakv.engine.sampling.processor_set import LogitsRows, ProcessorSet
from stratakv.engine.sampling.processors.adapter import AdapterLogitsProcessor
from stratakv.engine.sampling.processors.base import ProcessorContext, RowsFailed

from .batches import VOCAB, added, row_of
from .other_processors import Callables
from .processor_contract import check_processor

CONTEXT = ProcessorContext(max_rows=4, vocab_size=VOCAB)
ASKS: dict[str, Any] = {"extra_args": {"call": True}}


def adapter_of(make: Any) -> type[AdapterLogitsProcessor]:
    """An adapter whose requests with `call` get what `make()` gives."""

    class Adapter(AdapterLogitsProcessor):
        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            return make() if params.extra_args else None

    return Adapter


def processors_of(make: Any) -> ProcessorSet:
    return ProcessorSet.built_in(CONTEXT, [LoadedProcessor("mine", adapter_of(make))])


def test_the_promise(rng, scale):
    wishes = [{"extra_args": {"two": 4}}, {"extra_args": {"three": True}}]
    check_processor(Callables, wishes, rng, steps=60 if scale == "ci" else 10_000)


def test_the_callable_gets_prompt_output_and_drafts_in_this_order():
    seen: list[Any] = []

    def three(prompt_ids: list[int], output_ids: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt_ids, list(output_ids), tuple(logits.shape)))
        return logits

    processor = adapter_of(lambda: three)(CONTEXT)
    row = row_of(2, ASKS, prompt=(4, 5), output=(6,))
    processor.update_state(added(row, row_of(3, {})))
    rows, offsets = np.array([2, 3, 2]), np.array([2, 0, 0])
    processor.apply(torch.zeros(3, VOCAB), rows, offsets, [[7, 8, 9], [], [7, 8, 9]])
    row.output_token_ids.append(10)  # it sees what has come since
    processor.apply(torch.zeros(1, VOCAB), rows[:1])
    assert seen == [
        ([4, 5], [6, 7, 8], (VOCAB,)), ([4, 5], [6], (VOCAB,)), ([4, 5], [6, 10], (VOCAB,)),
    ]  # fmt: skip
    assert row.output_token_ids == [6, 10]


@pytest.mark.parametrize("in_place", [True, False])
def test_logits_may_be_changed_in_place_or_not(in_place):
    def two(output_ids: list[int], logits: Tensor) -> Tensor:
        return logits.add_(1.0) if in_place else logits + 1.0

    processors = processors_of(lambda: two)
    processors.update_state(added(row_of(0, {}), row_of(1, ASKS)))
    result = processors.before_choice(torch.zeros(2, VOCAB), LogitsRows(np.array([0, 1])))
    assert result.sum(dim=-1).tolist() == [0.0, VOCAB]


class WithMethods:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output_ids: list[int], logits: Tensor, scale: float = 2.0) -> Tensor:
        self.calls += 1
        return logits * scale


def test_defaults_are_no_parameters_and_methods_have_no_self():
    processors = processors_of(WithMethods)
    processors.update_state(added(row_of(0, ASKS)))
    result = processors.before_choice(torch.ones(1, VOCAB), LogitsRows(np.array([0])))
    assert torch.equal(result, torch.full((1, VOCAB), 2.0))


def raising() -> Any:
    raise KeyError("no such thing")


def misfit(logits: Tensor) -> Tensor:
    return logits


def keyword(output_ids: list[int], logits: Tensor, *, strength: float) -> Tensor:
    return logits


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (raising, "KeyError: 'no such thing'"),
        (lambda: misfit, r"not \(logits\)"),
        (lambda: keyword, r"not \(output_ids, logits, strength\)"),
        (lambda: lambda *many: many, r"not \(\)"),
        (lambda: 5, "returned int; return a callable or None"),
        (lambda: lambda output, logits: None, "its callable returned NoneType; return the logits"),
        (lambda: lambda output, logits: logits[:3], r"its callable returned \[3\]"),
        (lambda: lambda output, logits: logits / output[5], "IndexError"),
    ],
)
def test_a_callable_that_cannot_be_used_fails_its_request_alone(make, words):
    processors = processors_of(make)
    processors.update_state(added(row_of(0, {}), row_of(1, ASKS)))
    logits = torch.randn(2, VOCAB)
    result = processors.before_choice(logits.clone(), LogitsRows(np.array([0, 1])))
    assert torch.equal(result[0], logits[0])
    [(row, error)] = processors.failures(np.array([0, 1])).items()
    assert row == 1 and re.search(words, error), error
    # It is not tried again, and it is not active for anybody else.
    assert torch.equal(
        processors.before_choice(logits.clone(), LogitsRows(np.array([0, 1]))), logits
    )


def test_what_a_callable_keeps_survives_the_failure_of_another():
    made: list[Any] = []

    class Remembers:
        def __init__(self) -> None:
            self.calls = 0
            made.append(self)

        def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
            self.calls += 1
            if output_ids[-1] == 9:
                raise ValueError("nine")
            logits[0] = self.calls
            return logits

    processors = processors_of(Remembers)
    processors.update_state(added(*(row_of(i, ASKS, output=(i,)) for i in (0, 1)), row_of(2, {})))
    rows = LogitsRows(np.array([0, 1, 2]))
    processors.before_choice(torch.zeros(3, VOCAB), rows)
    processors.update_state(added(row_of(3, ASKS, output=(9,))))
    result = processors.before_choice(torch.zeros(4, VOCAB), LogitsRows(np.arange(4)))
    assert result[:, 0].tolist() == [2.0, 2.0, 0.0, 0.0] and len(made) == 3
    assert list(processors.failures(np.arange(4))) == [3]


def test_a_prompt_of_embeddings_has_no_ids_for_three_parameters():
    processor = Callables(CONTEXT)
    rows = [row_of(0, {"extra_args": {"three": True}}), row_of(1, {"extra_args": {"two": 4}})]
    processor.update_state(added(*(one._replace(has_prompt_tokens=False) for one in rows)))
    with pytest.raises(RowsFailed, match=r"row 0: .*a prompt of embeddings has none"):
        processor.apply(torch.zeros(2, VOCAB), np.array([0, 1]))
