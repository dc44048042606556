# SPDX-License-Identifier: Apache-2.0
"""What is said of an id in a step belongs to who had it when the step was made."""

from __future__ import annotations

from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.request.logprobs import PositionLogprobs
from stratakv.engine.scheduler.output import ModelRunnerOutput, add_figures


def test_an_end_without_tokens_gets_no_logprobs_of_who_had_its_id() -> None:
    """The step of an aborted request comes back with the failed load of the next of that name."""
    entry = PositionLogprobs([1], [-0.5], 1)
    step = ModelRunnerOutput({"a": [1]}, logprobs={"a": [entry]}, prompt_logprobs={"a": [None]})
    ended = TokenOutput("a", [], "error", error="blocks could not be loaded")
    told = TokenOutput("a", [1])
    add_figures([ended, told], step)
    assert ended.logprobs is None and ended.prompt_logprobs is None
    assert told.logprobs == [entry] and told.prompt_logprobs == [None]
