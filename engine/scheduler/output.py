# SPDX-License-Identifier: Apache-2.0
"""What one `schedule()` hands to the worker, and what the worker hands back.

Two kinds of request data: everything for a request the worker sees first, only the difference for
one it knows. A resumed request replaces its block table instead of growing it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...connector.base import ConnectorMetadata, ConnectorWorkerOutput
from ..cache.kv_block import BlockIds
from ..logprobs import PositionLogprobs, PromptLogprobs
from ..request import TokenArray
from ..sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """A request the worker has not seen."""

    request_id: str
    prompt_token_ids: TokenArray  # int32 [num_prompt_tokens]
    sampling_params: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int
    # Output of an earlier life, where the worker has forgotten the request.
    output_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class CachedRequestData:
    """The difference for requests the worker knows; the lists run in parallel."""

    request_ids: list[str] = field(default_factory=list)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)  # None: nothing new
    num_computed_tokens: list[int] = field(default_factory=list)
    resumed_request_ids: set[str] = field(default_factory=set)  # replace the table
    # Output so far of those among `resumed_request_ids`, which the worker left out of its batch.
    output_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """One step."""

    new_requests: list[NewRequestData]
    cached_requests: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # request id → tokens this step, in batch order
    total_num_scheduled_tokens: int
    # Ended since the last step: the worker forgets them.
    finished_request_ids: set[str]
    # Lost their blocks this step: the worker takes them out of the batch but remembers them.
    preempted_request_ids: set[str]
    connector_meta: ConnectorMetadata | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """What the step computed. A request in the middle of its prompt has no token."""

    sampled_token_ids: dict[str, list[int]]  # request id → new tokens (empty: prefill goes on)
    nan_request_ids: set[str] = field(default_factory=set)  # the model's logits were not finite
    banned_request_ids: set[str] = field(default_factory=set)  # by its own wishes: every token
    connector_output: ConnectorWorkerOutput | None = None
    # Of requests that asked: one for each sampled token, and with the first of them the prompt's.
    logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
