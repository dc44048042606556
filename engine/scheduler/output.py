# SPDX-License-Identifier: Apache-2.0
"""The scheduler's output for the worker, and the worker's result of a step.

The output describes a request that is new to the worker in full, and a known request by its changes
only. A resumed request replaces its block table instead of extending it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...connector.messages import ConnectorMetadata, ConnectorWorkerOutput
from ..cache.kv_block import BlockCopy, BlockIds
from ..cache.state_checkpoints import StateSave
from ..request.core_messages import NOT_FINITE, PROCESSOR_FAILED, TokenOutput
from ..request.logprobs import PositionLogprobs, PromptLogprobs
from ..request.pictures import Picture
from ..request.prompt_embeds import EmbedArray
from ..request.request import Request, RequestStatus, TokenArray
from ..request.routed_rows import RoutedRows
from ..request.sampling_params import SamplingParams
from .request_states import RequestStates


class OutputWriter:
    """Turns the worker's results into outputs for clients: appends tokens, and detects when a
    request ends.

    The last output of a request, and no other, has a finish reason. After a batch of calls to the
    writer, the caller must call `RequestStates.sweep`."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self.num_more = 0  # appended tokens, without the first one of each call
        self._max_model_len = states.context.manager.max_model_len

    def append_tokens(self, request: Request, token_ids: list[int], now: float) -> TokenOutput:
        """Append sampled tokens, up to and including the first token that ends the request."""
        progress = request.progress
        if len(token_ids) > 1:
            return self._take_several(request, token_ids, now)
        token_id = token_ids[0]
        request.append_output_token(token_id)
        if progress.first_token is not None and (
            request.num_tokens < request.max_num_tokens
            and token_id not in progress.end_ids
            and request.repetition_detection is None
        ):
            return TokenOutput(request.request_id, token_ids)  # usually it continues
        status = check_stop(request, token_id, progress.end_ids, self._max_model_len)
        return self._output_of(request, token_ids, status, now)

    def pass_on(self, request: Request, token_id: int, now: float) -> TokenOutput:
        """Append a token that another engine has sampled, before the request has run in this
        engine. The data of a first output (timings, cached tokens) comes with the next token, or
        with this token if it ends the request."""
        progress = request.progress
        request.append_output_token(token_id)
        status = check_stop(request, token_id, progress.end_ids, self._max_model_len)
        output = TokenOutput(request.request_id, [token_id])
        if status is not None:
            progress.first_token = now
            output.num_cached_tokens = 0
            if status is RequestStatus.FINISHED_STOPPED:
                request.stop_reason = stop_reason(request, token_id)
            self._finish_output(output, request, status, now)
        return output

    def _take_several(self, request: Request, token_ids: list[int], now: float) -> TokenOutput:
        end_ids, status = request.progress.end_ids, None
        for count, token_id in enumerate(token_ids, start=1):
            request.append_output_token(token_id)
            status = check_stop(request, token_id, end_ids, self._max_model_len)
            if status is not None:
                token_ids = token_ids[:count]
                break
        self.num_more += len(token_ids) - 1
        # The new full blocks are cached before an ended request releases them.
        self._states.context.manager.cache_accepted(request)
        return self._output_of(request, token_ids, status, now)

    def _output_of(
        self,
        request: Request,
        token_ids: list[int],
        status: RequestStatus | None,
        now: float,
    ) -> TokenOutput:
        progress = request.progress
        is_first = progress.first_token is None
        if is_first:
            progress.first_token = now
        output = TokenOutput(request.request_id, token_ids)
        if is_first:
            output.num_cached_tokens = request.num_cached_tokens
            output.cached_tokens_by_tier = request.cached_tokens_by_tier
            output.timings = request.timings(now)
            output.prompt_logprobs = progress.prompt_logprobs
        if status is not None:
            if status is RequestStatus.FINISHED_STOPPED:
                request.stop_reason = stop_reason(request, token_ids[-1])
            self._finish_output(output, request, status, now)
        return output

    def finish_request(
        self, request: Request, status: RequestStatus, now: float, error: str | None = None
    ) -> TokenOutput:
        """End a request for a reason other than its tokens."""
        output = TokenOutput(request.request_id, [], error=error, ends_without_token=True)
        if status is RequestStatus.FINISHED_NOT_FINITE:
            output.error_code = NOT_FINITE
        elif status is RequestStatus.FINISHED_PROCESSOR_FAILED:
            output.error_code = PROCESSOR_FAILED
        self._finish_output(output, request, status, now)
        return output

    def _finish_output(
        self, output: TokenOutput, request: Request, status: RequestStatus, now: float
    ) -> None:
        output.finish_reason = status.finish_reason
        output.stop_reason = request.stop_reason
        output.timings = request.timings(now)
        self._states.mark_finished(request, status)


def add_figures(outputs: Iterable[TokenOutput], runner_output: ModelRunnerOutput) -> None:
    """Add the worker's log-probabilities, embeddings and routed experts to the outputs. An output
    without tokens is skipped, because its request id may meanwhile belong to another request."""
    for output in outputs:
        if not output.new_token_ids:
            continue
        entries = runner_output.logprobs.get(output.request_id)
        if entries is not None:
            output.logprobs = entries[: len(output.new_token_ids)]
        told = runner_output.prompt_logprobs.get(output.request_id)
        if told is not None:
            output.prompt_logprobs = told
        output.embedding = runner_output.embeddings.get(output.request_id)
        rows = runner_output.routed_experts.get(output.request_id)
        if rows is not None:
            output.routed_experts = [*(output.routed_experts or ()), rows]


def fault_of(
    request: Request, num_computed_tokens: int, runner_output: ModelRunnerOutput
) -> str | None:
    """Return the error text of a request for which the step gave no usable token. Return None if
    the request is still in the middle of its prompt; `num_computed_tokens` includes this step."""
    if request.request_id in runner_output.nan_request_ids:
        return "the model's logits for this request were not finite numbers"
    if request.request_id in runner_output.processor_errors:
        return runner_output.processor_errors[request.request_id]
    if request.request_id in runner_output.banned_request_ids:
        if request.sampling_params.structured_outputs is not None:
            return (
                "the grammar of this request allows only tokens that its own biases, bad words and "
                "logits processors ban; drop those"
            )
        return (
            "the biases, bad words and logits processors of this request ban every token; allow at "
            "least one"
        )
    if num_computed_tokens >= request.num_tokens:
        return "the worker returned no token for this request"
    return None


@dataclass(slots=True)
class NewRequestData:
    request_id: str
    prompt_token_ids: TokenArray  # int32 [num_prompt_tokens]
    sampling_params: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int
    # The tokens generated so far, if the worker has forgotten the request.
    output_token_ids: list[int] = field(default_factory=list)
    # float [num_prompt_tokens, hidden]: the model reads these embeddings instead of embedding the
    # ids, which must still be in the vocabulary.
    prompt_embeds: EmbedArray | None = None
    pooling: str = ""  # the pooled hidden states to return: `last`, `mean` or none
    cache_salt: bytes = b""  # the salt of the request's tenant
    # The request whose logits give this request's first token; "" if the request computes tokens.
    fork_of: str = ""
    # The first position whose routed experts are reported; None: no position.
    routed_from: int | None = None
    # Pages with the request's initial states, one per piece; empty: the states begin with zeros.
    state_page_ids: list[int] = field(default_factory=list)
    # For beam search: how many likeliest tokens to return with each token, perhaps more than
    # clients may request. 0: as the sampling parameters say.
    num_likeliest: int = 0
    adapter: bytes = b""  # the fingerprint of the request's adapter; b"": none
    pictures: list[Picture] = field(default_factory=list)  # the prompt's pictures, without pixels


@dataclass(slots=True)
class CachedRequestData:
    """The changes of requests that the worker has already, as parallel lists. A request may be left
    out if it computes only one token, in blocks that it has already."""

    request_ids: list[str] = field(default_factory=list)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)  # None: no new blocks
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_request_ids: set[str] = field(default_factory=set)  # with a new block table
    # The tokens generated so far by each request in `resumed_request_ids`.
    output_token_ids: dict[str, list[int]] = field(default_factory=dict)
    # The pages with a request's initial states; requests without an entry begin with zeros.
    state_page_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """A step in the form that the worker receives.

    The worker computes steps in the order of their ids. After a failed step the worker may lack the
    requests that were new in the step. The worker therefore refuses later steps that were scheduled
    before the scheduler knew of the failure (`last_failed_id`). The scheduler fails these steps
    together with the failed one."""

    new_requests: list[NewRequestData]
    cached_requests: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # request id → tokens this step, in batch order
    total_num_scheduled_tokens: int
    # The requests that ended since the last step; the worker forgets them.
    finished_request_ids: set[str]
    # The requests preempted in this step, which the worker removes from its batch but remembers.
    preempted_request_ids: set[str]
    connector_meta: ConnectorMetadata | None = None
    step_id: int = 0  # larger in every later step
    last_failed_id: int = 0  # the last failed step known to the scheduler
    # Request id → draft tokens, which are the last tokens that the step computes of the request.
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    # Request id → the most draft tokens to propose after the token sampled in this step.
    wanted_drafts: dict[str, int] = field(default_factory=dict)
    # Copies to make after the step's stores have read their blocks, and before any computing.
    block_copies: list[BlockCopy] = field(default_factory=list)
    # Request id → checkpoints of the request's states, written after the forward pass.
    state_saves: dict[str, list[StateSave]] = field(default_factory=dict)
    # Digests of pictures whose embeddings the worker drops before it encodes `new_pictures`.
    dropped_pictures: list[bytes] = field(default_factory=list)
    # Pictures to encode, with pixels; the worker keeps their embeddings until it must drop them.
    new_pictures: list[Picture] = field(default_factory=list)


@dataclass(slots=True)
class ModelRunnerOutput:
    """The worker's results of a step. A request in the middle of its prompt has no token."""

    sampled_token_ids: dict[str, list[int]]  # request id → new tokens (empty: still prefill)
    nan_request_ids: set[str] = field(default_factory=set)  # requests whose logits were not finite
    banned_request_ids: set[str] = field(default_factory=set)  # the parameters ban every token
    # Requests for which another package's logits processor raised → the error text.
    processor_errors: dict[str, str] = field(default_factory=dict)
    connector_output: ConnectorWorkerOutput | None = None
    # Log-probabilities, on request, of each sampled token; the prompt's come with the first token.
    logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    # Requested pooled embeddings, with the first token: little-endian float64 `[hidden]`.
    embeddings: dict[str, bytes] = field(default_factory=dict)
    # Routed experts, if requested: the rows that were not reported before.
    routed_experts: dict[str, RoutedRows] = field(default_factory=dict)
    # Drafts after this step's tokens, for the next step; requests without drafts are left out.
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def has_figures(self) -> bool:
        """Whether the result contains log-probabilities, embeddings or routed experts."""
        figures = self.logprobs or self.prompt_logprobs or self.embeddings
        return bool(figures or self.routed_experts)


def end_token_ids(request: Request, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the token ids that end a request: its stop ids and, unless ignored, the model's."""
    own = request.sampling_params.stop_token_ids
    eos = frozenset() if request.sampling_params.ignore_eos else eos_token_ids
    return eos.union(own) if own else eos


def check_stop(
    request: Request, token_id: int, end_ids: frozenset[int], max_model_len: int
) -> RequestStatus | None:
    """Return the finished status of `request` after `token_id` was appended; None if the request
    continues.

    An end token counts only after `min_tokens` output tokens. An end token that also reaches a
    length limit counts as an end token."""
    num_output = request.num_output_tokens
    if token_id in end_ids and num_output >= request.sampling_params.min_tokens:
        return RequestStatus.FINISHED_STOPPED
    if num_output >= request.max_tokens or request.num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    detection = request.repetition_detection
    if detection is not None and num_output >= request.sampling_params.min_tokens:
        sizes = detection.min_pattern_size, detection.max_pattern_size
        if repeats(request.output_token_ids, *sizes, detection.min_count):
            return RequestStatus.FINISHED_REPETITION
    return None


def stop_reason(request: Request, token_id: int) -> int | None:
    """Return the client's stop token that ended a request; None for the model's end token."""
    return token_id if token_id in request.sampling_params.stop_token_ids else None


def repeats(token_ids: Sequence[int], min_pattern: int, max_pattern: int, min_count: int) -> bool:
    """Whether `token_ids` ends with at least `min_count` copies of one pattern of `min_pattern` to
    `max_pattern` tokens.

    `check_stop` calls this after each token. In most calls the last token does not occur at the
    needed distances, so no other token is compared. In the worst case `max_pattern * min_count`
    tokens are read. Raises ValueError unless 1 <= min_pattern <= max_pattern and min_count >= 2."""
    if not 1 <= min_pattern <= max_pattern or min_count < 2:
        raise ValueError(
            "a repetition is a pattern of 1 <= min_pattern <= max_pattern tokens, at least twice, "
            f"not min_pattern={min_pattern}, max_pattern={max_pattern}, min_count={min_count}"
        )
    longest = min(max_pattern, len(token_ids) // min_count)
    if longest < min_pattern:
        return False
    before = token_ids[-1 - longest : len(token_ids) - min_pattern]
    if token_ids[-1] not in before:
        return False
    last, again = token_ids[-1], min_count - 1
    likely = [
        size
        for size in range(min_pattern, longest + 1)
        if token_ids[-1 - size] == last and token_ids[-1 - size * again] == last
    ]
    if not likely:
        return False
    # Read backwards, a pattern of `size` tokens is repeated if the text equals itself shifted by
    # `size`, over all repetitions except one.
    same = _agreements(token_ids[: -1 - longest * min_count : -1], likely[-1])
    return any(same[size] >= size * again for size in likely)


def _agreements(tokens: Sequence[int], most: int) -> list[int]:
    """Return, for each `shift` up to `most`, the length of the longest common prefix of `tokens`
    and `tokens[shift:]`. The function uses the Z algorithm, whose time is linear in the number of
    tokens."""
    size = len(tokens)
    found = [size] + [0] * most
    start = end = 0  # the known common prefix that ends last in `tokens`
    for shift in range(1, most + 1):
        length = min(end - shift, found[shift - start]) if shift < end else 0
        while shift + length < size and tokens[length] == tokens[shift + length]:
            length += 1
        found[shift] = length
        if shift + length > end:
            start, end = shift, shift + length
    return found
