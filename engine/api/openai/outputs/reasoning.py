# SPDX-License-Identifier: Apache-2.0
"""Which part of an answer is reasoning, and what a request says about that."""

from __future__ import annotations

from ....text.reasoning import ReasoningMarks, Thoughts
from ..protocol import ChatRequest


def thoughts_of(marks: ReasoningMarks | None, request: ChatRequest, prompt: str) -> Thoughts | None:
    """What splits the thoughts of one answer to this prompt off; None: they stay in the text."""
    if marks is None or request.separate_reasoning is False:
        return None
    goes_on = bool(request.continue_final_message)
    return Thoughts(
        marks,
        is_inside=marks.is_open(prompt, goes_on=goes_on),
        included=request.include_reasoning is not False,
        streamed=request.stream_reasoning is not False,
    )
