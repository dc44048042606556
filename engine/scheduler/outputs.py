# SPDX-License-Identifier: Apache-2.0
"""From what the worker computed to what a client is told: tokens taken in, ends noticed.

Knows nothing of how steps are made up. Every request that ends gets exactly one output with a
finish reason, and it is its last.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Request, RequestStatus
from ..wire import TokenOutput
from .output import ModelRunnerOutput
from .places import Places
from .stop import check_stop, stop_reason


class OutputWriter:
    """Moves requests on, or to their end. `places.sweep` must follow a batch of calls."""

    def __init__(self, places: Places, max_model_len: int) -> None:
        self._places = places
        self._max_model_len = max_model_len

    def take(self, request: Request, token_ids: list[int], now: float) -> TokenOutput:
        """Append sampled tokens up to the first that ends the request."""
        progress = self._places.progress[request.request_id]
        is_first = progress.first_token is None
        if is_first:
            progress.first_token = now
        status = None
        for count, token_id in enumerate(token_ids, start=1):
            request.append_output_tokens((token_id,))
            status = check_stop(request, token_id, progress.end_ids, self._max_model_len)
            if status is not None:
                token_ids = token_ids[:count]
                break
        output = TokenOutput(request.request_id, token_ids)
        if is_first:
            output.num_cached_tokens = request.num_cached_tokens
            output.cached_tokens_by_tier = request.cached_tokens_by_tier
            output.timings = progress.timings(request, now)
        if status is not None:
            if status is RequestStatus.FINISHED_STOPPED:
                request.stop_reason = stop_reason(request, token_ids[-1])
            self._close(output, request, status, now)
        return output

    def end(
        self, request: Request, status: RequestStatus, now: float, error: str | None = None
    ) -> TokenOutput:
        """End a request for another reason than its tokens."""
        output = TokenOutput(request.request_id, [], error=error)
        self._close(output, request, status, now)
        return output

    def _close(
        self, output: TokenOutput, request: Request, status: RequestStatus, now: float
    ) -> None:
        output.finish_reason = status.finish_reason
        output.stop_reason = request.stop_reason
        output.timings = self._places.progress[request.request_id].timings(request, now)
        self._places.end(request, status)


def add_logprobs(outputs: Iterable[TokenOutput], runner_output: ModelRunnerOutput) -> None:
    """Give outputs what the worker sent along with their tokens, as far as the tokens were kept."""
    for output in outputs:
        entries = runner_output.logprobs.get(output.request_id)
        if entries is not None:
            output.logprobs = entries[: len(output.new_token_ids)]
        output.prompt_logprobs = runner_output.prompt_logprobs.get(output.request_id)


def fault_of(request: Request, runner_output: ModelRunnerOutput) -> str | None:
    """Why a request that got no usable token cannot go on; None in the middle of its prompt."""
    if request.request_id in runner_output.nan_request_ids:
        return "the model's logits for this request were not finite numbers"
    if request.request_id in runner_output.banned_request_ids:
        return "the biases and bad words of this request ban every token; allow at least one"
    if request.num_computed_tokens >= request.num_tokens:
        return "the worker returned no token for this request"
    return None
