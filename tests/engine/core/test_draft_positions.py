# SPDX-License-Identifier: Apache-2.0
"""Draft tokens in the batch of a real model runner: every row behind them gets the token that its
request gets there without any.

No engine proposes drafts yet. So a core runs twice: the first run says what comes, and with which
logits; in the second each step is first sampled for the places behind the tokens that come, and
behind wrong ones, by the runner's own sampler and with masks of the core's own grammars, before it
is sampled as it was. What is kept of a draft token by mistake would change the second run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import InProcessExecutor
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.structured_params import StructuredOutputsParams
from stratakv.engine.sampling.sampler import Choice
from stratakv.engine.sampling.token_mask import TokenMask

from ...processor_package import MODULE, SOURCE, packages_in
from .conftest import VOCAB, config_of, prompt_of, request, run

END = VOCAB - 1
MOST_DRAFTS = 4
START_MARK, END_MARK = 1, (2, 3)
REGEX = "[a-f]{5,9}-[0-9]{2}"

# What was sampled where: the logits before any change, and the token, by request and place.
Known = dict[tuple[str, int], tuple[torch.Tensor, int]]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`Counts` is one callable for each request, guarded as all of other packages are."""
    folder = tmp_path_factory.mktemp("site")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    with packages_in(folder):
        yield f"{MODULE}:Counts"


def requests() -> list[AddRequest]:
    """Of every kind whose next token depends on those before it; more than there are rows."""
    thinks = {
        "reasoning_start_token_ids": (START_MARK,), "reasoning_end_token_ids": END_MARK,
        "thinking_token_budget": 3, "max_tokens": 14,
        "logit_bias": {START_MARK: 6.0, END_MARK[0]: -3.0},
    }  # fmt: skip
    follows = {"structured_outputs": StructuredOutputsParams(regex=REGEX), "ignore_eos": False}
    wishes: list[dict[str, Any]] = [
        {},
        thinks,
        {"min_tokens": 5, "ignore_eos": False, "logit_bias": {END: 90.0}, "max_tokens": 9},
        follows,
        {"repetition_penalty": 1.6, "frequency_penalty": 0.7, "bad_words_token_ids": ((9, 9),)},
        {"extra_args": {"from": 40}, "max_tokens": 8},
        {**follows, "min_tokens": 7, "stop_token_ids": [80]},
        {**thinks, "repetition_penalty": 1.3, "min_tokens": 3},
    ]
    made = []
    for number in range(24):
        draws = {"temperature": 0.9, "seed": number} if number % 3 else {}
        fields = {"max_tokens": 12, **wishes[number % len(wishes)], **draws}
        prompt = prompt_of(5 + 7 * (number % 4), number)
        if number % 16 >= 8 and "thinking_token_budget" in fields:
            prompt = [*prompt, START_MARK]  # within a thought from the beginning
        made.append(request(f"r{number}", prompt, **fields))
    return made


class Steps:
    """The steps of a core's sampler, noted, or tried with drafts before they are taken."""

    def __init__(self, core: EngineCore, known: Known | None, rng: random.Random) -> None:
        executor = core.executor
        assert isinstance(executor, InProcessExecutor)
        self.core, self.runner, self.rng = core, executor.runner, rng
        self.known: Known = {} if known is None else known
        self.tries = known is not None
        self.num_compared = self.num_masked = 0
        self._begin = self.runner._sampler.sample_async
        self.runner._sampler.sample_async = self.begin  # type: ignore[method-assign]

    def begin(
        self,
        logits: torch.Tensor,
        rows: Any,
        mask: TokenMask | None = None,
        masked: Any = (),
        **none: Any,
    ) -> Choice:
        assert not none
        batch = self.runner.batch
        names = [batch.requests[row].request_id for row in rows.tolist()]
        places = [len(batch.requests[row].output_token_ids) for row in rows.tolist()]
        if self.tries:
            self.try_drafts(rows, names, places)
        before = logits.clone()
        choice = self._begin(logits, rows, mask, masked)
        tokens = choice.wait().token_ids
        for index, where in enumerate(zip(names, places, strict=True)):
            if self.tries:
                assert self.known[where][1] == tokens[index], f"{where} changed"
            else:
                self.known[where] = before[index], tokens[index]
        return choice

    def try_drafts(self, rows: Any, names: list[str], places: list[int]) -> None:
        """Several rows of logits for each row of the batch; those behind a wrong draft, whose
        token nobody knows, are sampled and left out."""
        rng, known = self.rng, self.known
        logits, of_rows, offsets, of_drafts = [], [], [], []
        expected: list[int | None] = []
        drafts: dict[str, list[int]] = {}
        for row, name, place in zip(rows.tolist(), names, places, strict=True):
            length = rng.randint(0, MOST_DRAFTS)
            coming = [known[name, at][1] for at in range(place, place + length)
                      if (name, at + 1) in known]  # fmt: skip
            wrong = rng.randrange(len(coming)) if coming and rng.random() < 0.3 else len(coming)
            if wrong < len(coming):
                coming[wrong] = (coming[wrong] + 1) % VOCAB
            drafts[name] = coming
            for offset in range(len(coming) + 1):
                row_logits, token = known[name, place + offset]
                logits.append(row_logits)
                of_rows.append(row)
                offsets.append(offset)
                of_drafts.append(coming)
                expected.append(token if offset <= wrong else None)
        mask, masked = self.mask_of(drafts, np.array(of_rows), offsets)
        sampled = self._begin(
            torch.stack(logits), np.array(of_rows, np.int64), mask, masked,
            offsets=np.array(offsets, np.int64), drafts=of_drafts,
        ).wait()  # fmt: skip
        for index, token in enumerate(expected):
            if token is not None:
                assert sampled.token_ids[index] == token, (of_rows[index], offsets[index])
                self.num_compared += offsets[index] > 0
                self.num_masked += offsets[index] > 0 and index in masked

    def mask_of(
        self, drafts: dict[str, list[int]], rows: Any, offsets: list[int]
    ) -> tuple[TokenMask | None, list[int]]:
        """As the core would have it for these drafts; and the rows of logits that it is for."""
        grammars, scheduler = self.core._grammars, self.core.scheduler
        # One at the end of its grammar has ended by then.
        choosing = [scheduler.requests[name] for name in drafts if name in scheduler.requests]
        mask, ended = grammars.masks(choosing, drafts)
        assert not ended
        if mask is None:
            return None, []
        row_of = self.runner.batch.row_of
        index_of = {
            place: index for index, place in enumerate(zip(rows.tolist(), offsets, strict=True))
        }
        seen: dict[str, int] = {}
        masked = []
        for name in mask.request_ids:
            offset = seen[name] = seen.get(name, -1) + 1
            masked.append(index_of[row_of[name], offset])
        return mask, masked


def answers_of(
    model: Path, package: str, known: Known | None, rng: random.Random
) -> tuple[dict[str, list[int]], Steps]:
    # One step at a time: its own tokens are known, and there is little room, so that some are
    # preempted and come back.
    config = config_of(
        model, structured_outputs_backend="guidance", logits_processors=(package,), num_blocks=26,
        max_model_len=100, admit_below=1.0, preempt_above=1.0,
    )  # fmt: skip
    core = EngineCore(config, max_steps_in_flight=1)
    try:
        steps = Steps(core, known, rng)
        merged: dict[str, TokenOutput] = run(core, *requests())
        assert core.scheduler.counts["preemptions"] > 0
    finally:
        core.shutdown(5.0)
    for output in merged.values():
        assert output.error is None
    return {name: output.new_token_ids for name, output in merged.items()}, steps


def test_rows_behind_drafts_get_what_comes_there(
    tiny_model: Path, package: str, rng: random.Random, no_thread_gives_way: None
) -> None:
    first, noted = answers_of(tiny_model, package, None, rng)
    again, tried = answers_of(tiny_model, package, noted.known, rng)
    assert again == first
    assert tried.num_compared > 200 and tried.num_masked > 20
    for number, asked in enumerate(requests()):
        params, output = asked.sampling_params, first[asked.request_id]
        if params.thinking_token_budget is not None:
            assert_within_budget(asked, output)
        if params.min_tokens:
            assert END not in output[: params.min_tokens]
        if (params.extra_args or {}).get("from") == 40:
            assert output == list(range(40, 48)), number


def assert_within_budget(asked: AddRequest, output: list[int]) -> None:
    """No thought has more tokens than the budget and the end mark."""
    budget = asked.sampling_params.thinking_token_budget
    assert budget is not None
    prompt = np.frombuffer(asked.prompt_token_ids, np.int32).tolist()
    length = 0 if prompt[-1] == START_MARK else None
    for at, token in enumerate(output):
        if length is None:
            length = 0 if token == START_MARK else None
            continue
        length += 1
        if tuple(output[max(0, at - 1) : at + 1]) == END_MARK:
            length = None
        else:
            assert length < budget + len(END_MARK)
