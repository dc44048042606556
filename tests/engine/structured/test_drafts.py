# SPDX-License-Identifier: Apache-2.0
"""Rows behind draft tokens are those of a request whose output these tokens are, on either side of
a thought and where a request has ends of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.request.core_messages import AddRequest
from stratakv.engine.request.request import Request, pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.request.structured_params import StructuredOutputsParams
from stratakv.engine.structured.guidance_backend import GuidanceBackend
from stratakv.engine.structured.manager import GrammarManager
from stratakv.engine.structured.vocabulary import Vocabulary

from .vocabularies import END, VOCAB, embedded
from .waiting import wait_for

OPENS, ENDS, LAST, STOP = 4100, 4101, 4102, 4103  # no tokens of the vocabulary
MARKS = {"reasoning_start_token_ids": (OPENS,), "reasoning_end_token_ids": (ENDS,)}
TWO_MARKS = MARKS | {"reasoning_end_token_ids": (ENDS, LAST)}
STOPS = {"stop_token_ids": [STOP]}
LETTERS = StructuredOutputsParams(regex="[a-z]+")


def spell(text: str) -> list[int]:
    return [token for letter in text for token in embedded().spell(letter.encode())]


class Requests:
    """Of one manager."""

    def __init__(self, end_ids: tuple[int, ...]) -> None:
        vocabulary = Vocabulary.load(EMBEDDED_MODEL, VOCAB, [END])
        backend = GuidanceBackend(vocabulary)
        self.manager = GrammarManager(
            Path(), VOCAB, end_ids, most_waiting=9, opener=lambda: backend
        )
        self._count = 0

    def make(self, prompt: list[int], output: list[int], **options: Any) -> Request:
        """One that runs and has made these tokens."""
        self._count += 1
        params = SamplingParams(**{"structured_outputs": LETTERS, "max_tokens": 99, **options})
        request = Request(str(self._count), prompt, params)
        message = AddRequest(request.request_id, pack_token_ids(prompt), params)
        waiting = self.manager.ask(message, request)
        if request.request_id in self.manager:
            wait_for(lambda: self.manager.is_due)
            [waiting] = self.manager.take_compiled()
        self.manager.activate_grammar(waiting)
        for token in output:
            request.append_output_token(token)
        return request


def allows(row: np.ndarray, token: int) -> bool:
    return bool(row[token // 32] >> (token % 32) & 1)


@pytest.mark.parametrize("end_ids", [(END,), ()], ids=["ends", "no ends"])
@pytest.mark.parametrize(
    ("prompt", "output", "drafts", "options"),
    [
        ([5], [], spell("abc"), {}),
        ([5], spell("x"), spell("abc"), MARKS),
        ([5, OPENS], [], [7, 8, ENDS, *spell("abc")], MARKS),
        ([5, OPENS], [7], [8, ENDS], MARKS),
        ([5, OPENS], [7], [8, 9], MARKS),
        ([5, OPENS], [7, ENDS], [LAST, *spell("ab")], TWO_MARKS),
        ([5, OPENS], [7, ENDS], [8, ENDS, LAST, *spell("a")], TWO_MARKS),
        ([5], [], [OPENS, 7, ENDS, *spell("ab")], MARKS),
        ([5], [], [OPENS, ENDS, *spell("ab")], MARKS),
        ([5], [], [OPENS, 7, 8], MARKS),
        ([5], [OPENS], [7, ENDS, *spell("ab")], MARKS),
        ([5], [], [*spell("a"), OPENS], MARKS),
        ([5, OPENS], [], [ENDS, *spell("abcd")], MARKS | {"min_tokens": 4}),
        ([5], [], [OPENS, ENDS, *spell("abc")], MARKS | STOPS | {"min_tokens": 4}),
        ([5], spell("a"), spell("bcd"), STOPS),
        ([5, OPENS], [], [ENDS, *spell("ab")], MARKS | STOPS),
        ([5], [], spell("ab"), STOPS | {"ignore_eos": True, "min_tokens": 2}),
    ],
)  # fmt: skip
def test_rows_behind_drafts_are_those_of_an_output(
    prompt: list[int],
    output: list[int],
    drafts: list[int],
    options: dict[str, Any],
    end_ids: tuple[int, ...],
) -> None:
    requests = Requests(end_ids)
    manager = requests.manager
    try:
        request = requests.make(prompt, output, **options)
        others = [
            requests.make([5], spell("ab")),
            requests.make([5, OPENS], [7], **MARKS),
            requests.make([5], spell("a")),
        ]
        others_drafts = {others[2].request_id: spell("bc")}
        step = [others[0], request, others[1], others[2]]
        masks = manager.masks(step, {request.request_id: drafts, **others_drafts})
        assert masks.mask is not None and not masks.ended
        names = masks.mask.request_ids
        assert len(names) == len(masks.mask.allowed) == 1 + len(drafts) + 1 + 1 + 3
        for other, count in zip(others, (1, 1, 3), strict=True):
            assert names.count(other.request_id) == count
        first = names.index(request.request_id)
        rows = masks.mask.allowed[first : first + 1 + len(drafts)]
        assert set(names[first : first + len(rows)]) == {request.request_id}  # in one piece
        for count, row in enumerate(rows):
            behind = requests.make(prompt, output + drafts[:count], **options)
            expected = manager.masks([behind]).mask
            assert expected is not None
            assert np.array_equal(row, expected.allowed[0]), count
            if count < len(drafts) and not allows(row, drafts[count]):
                break  # nobody gets behind it
        # Drafts are no output: it goes on as without them.
        alone = manager.masks([requests.make(prompt, output, **options)]).mask
        again = manager.masks([request]).mask
        assert alone is not None and again is not None
        assert np.array_equal(alone.allowed, again.allowed)
    finally:
        manager.close()
