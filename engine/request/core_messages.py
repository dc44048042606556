# SPDX-License-Identifier: Apache-2.0
"""Messages between the front (the HTTP server or the Python API) and the engine core.

Between processes, ZMQ sends each message as one msgpack frame; in-process mode passes objects.
Messages are arrays on the wire, so a new field goes to the end and needs a default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from .beam_params import BeamSearchParams
from .handover_ticket import Ticket
from .logprobs import PositionLogprobs, PromptLogprobs
from .pictures import Picture
from .routed_rows import RoutedRows
from .sampling_params import SamplingParams

PROTOCOL_VERSION = 1

# The reasons for which a client aborts a request.
ABORTED = "abort"
STOPPED = "stop"

# The error code for logits that are not finite; also the counted cause of blocks dropped then.
NOT_FINITE = "not_finite"
PROCESSOR_FAILED = "logits_processor_failed"  # a processor of another package raised
# The grammar of an answer cannot be compiled, or cannot be followed to its end.
INVALID_GRAMMAR = "invalid_grammar"
UNKNOWN_ADAPTER = "unknown_adapter"
WRONG_PICTURES = "wrong_pictures"
OVERLOADED = "overloaded"  # the engine was full and did not take the request; try again later

MAX_PRIORITY = 2**31


class Fork(msgspec.Struct, array_like=True, frozen=True):
    """Another answer to a request's prompt. The engine computes the prompt once for all answers."""

    request_id: str
    sampling_params: SamplingParams


class RequestExtras(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, frozen=True
):
    """Optional fields of an `AddRequest`. The fields are encoded by name, so a new field does not
    change the array layout of `AddRequest`. A core refuses a request with an unknown field."""

    session: str = ""  # the same for all turns of a conversation or of an agent's job
    is_last_step: bool = False  # no other turn of the job follows
    tool: str = ""  # the tool whose result this turn has; "": no tool, or unknown
    kv_transfer: dict[str, Any] = {}  # passed unchanged to the connector and its tiers
    # Whether the last output has a ticket, and waits until other engines can load the blocks.
    hand_over: bool = False
    ticket: Ticket | None = None  # from the node that computed the prompt
    computed_elsewhere: bool = False  # another node computes the prompt now
    asked_elsewhere: bool = False  # a node of another role got the same request at the same time
    # A safetensors file of embeddings in place of the prompt's tokens, which are zeros.
    prompt_embeds: bytes = b""
    # `last` or `mean`: the prompt's embedding is to come with the first token; "": no embedding.
    pooling: str = ""
    forks: list[Fork] = []  # further answers to this prompt, queued with the request
    # Whether an ExtendPrompt brings the next part of the prompt.
    more_follows: bool = False
    # The beam search whose answers are this request and its forks; None: no beam search.
    beams: BeamSearchParams | None = None
    adapter: str = ""  # the name of the adapter that answers; "": the model alone
    pictures: list[Picture] = []  # in prompt order


NO_EXTRAS = RequestExtras()


class AddRequest(msgspec.Struct, tag="add", array_like=True):
    """The message that adds a request. `prompt_token_ids` are little-endian int32."""

    request_id: str
    prompt_token_ids: bytes
    sampling_params: SamplingParams
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    skip_reading_prefix_cache: bool = False
    extras: RequestExtras | None = None


def share_prompt(requests: Sequence[AddRequest], beams: BeamSearchParams | None = None) -> None:
    """Make all requests but the first forks of the first request, so that the engine core computes
    their common prompt once. The requests may differ only in ids and sampling parameters. If
    `beams` is given, the requests are the answers of this beam search."""
    if beams is not None:
        for each in requests:
            each.extras = msgspec.structs.replace(each.extras or NO_EXTRAS, beams=beams)
    if len(requests) > 1:
        first = requests[0]
        forks = [Fork(each.request_id, each.sampling_params) for each in requests[1:]]
        first.extras = msgspec.structs.replace(first.extras or NO_EXTRAS, forks=forks)


class ExtendPrompt(msgspec.Struct, tag="extend", array_like=True):
    """The next part of a prompt sent in parts. An ended request's part is ignored."""

    request_id: str
    # Little-endian int32. Empty: the client has sent a part whose tokens are not certain yet.
    prompt_token_ids: bytes
    is_last: bool = False
    # How many of the tokens in earlier parts belong to the prompt; -1: all of these tokens.
    num_kept: int = -1


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    """The message that aborts requests whose client has disconnected (ABORTED) or whose output has
    reached a stop string (STOPPED). The engine core ignores unknown ids."""

    request_ids: list[str]
    reason: str = ABORTED


class Call(msgspec.Struct, tag="call", array_like=True):
    """A call of one core function by name: "stats", "follow" (an AddRequest in JSON), "tool_called"
    (a ToolCalled in JSON), "load_adapter" and "unload_adapter" (a LoadAdapter and an UnloadAdapter
    in JSON), "reset_prefix_cache", "pause", "resume", "paused", "shutdown"."""

    call_id: int
    name: str
    argument: str = ""


class ToolCalled(msgspec.Struct, forbid_unknown_fields=True):
    """The message that the last finished request of an agent's job has called a tool."""

    job_id: str
    tool: str
    tenant: str = ""
    cache_salt: str = ""


class LoadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """The call that loads the adapter in a folder under a name. With `replaces`, the name may be in
    use; running requests keep the adapter with which they began."""

    name: str
    path: str
    replaces: bool = False


class UnloadAdapter(msgspec.Struct, forbid_unknown_fields=True):
    """The call that drops the name of an adapter. Running requests keep the adapter."""

    name: str


class LoadedAdapter(msgspec.Struct):
    """An adapter that requests can name."""

    name: str
    path: str
    fingerprint: str  # hexadecimal
    rank: int
    num_bytes: int


# Untracked by the garbage collector: a step has hundreds of these objects, and no cycles.
class TokenOutput(msgspec.Struct, array_like=True, gc=False):
    """The output of one engine step for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # Only with the first token of a request:
    num_cached_tokens: int | None = None
    cached_tokens_by_tier: dict[str, int] | None = None  # name in `Ready.tiers` → tokens
    error: str | None = None
    # Seconds in the queue, in prefill, ..., with the first token and with the last output.
    timings: dict[str, float] | None = None
    # The code of an error to which a client can react: OVERLOADED, INVALID_GRAMMAR,
    # UNKNOWN_ADAPTER, WRONG_PICTURES.
    error_code: str | None = None
    # Requested log-probabilities of each new token; the prompt's come with the first token.
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    # The ticket of a handed-over prompt, with the last output.
    ticket: Ticket | None = None
    # A requested embedding, with the first token: little-endian float64 `[hidden]`.
    embedding: bytes | None = None
    # Requested experts of computed tokens; the last entry of a repeated position counts.
    routed_experts: list[RoutedRows] | None = None
    # Whether the grammar, not a token, ended the request; with the last output.
    ends_without_token: bool = False


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """All `TokenOutput`s of one engine step."""

    outputs: list[TokenOutput]
    num_failed_steps: int = 0  # steps failed since the last good step


class CallRefused(ValueError):
    """A refusal whose `code` tells the caller the kind of reason; "" is any other."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The answer to a Call; `error` is empty on success. `result` holds JSON."""

    call_id: int
    result: str = "null"
    error: str = ""
    code: str = ""  # of a CallRefused


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The message that the core has started, with the values that the front needs from it."""

    protocol_version: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    eos_token_ids: list[int]
    # The names of the pool and of the tiers from which cached prompt tokens can come.
    tiers: tuple[str, ...] = ("pool",)
    tiers_down: list[str] = []
    hidden_size: int = 0  # how many numbers a prompt embedding has
    identity: dict[str, str] = {}  # values that engines must share to find each other's blocks
    takes_priority: bool = False  # whether requests may have a priority
    tells_experts: bool = False  # whether answers may have the experts of their tokens
    pins_turns: bool = False  # whether blocks are kept between the turns of a job
    largest_embedding: float = math.inf  # the largest number of the model's type
    session_idle_seconds: float = 0.0  # time that a prompt in parts may wait for its next part
    adapters: list[LoadedAdapter] = []  # adapters loaded at the start
    max_adapters: int = 0  # different adapters in one step; 0: no adapters


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The last message of an engine core that cannot start or cannot continue."""

    message: str
    is_config_error: bool = False


ToCore = AddRequest | AbortRequests | Call | ExtendPrompt
FromCore = Outputs | Reply | Ready | Fatal

to_core_decoder = msgspec.msgpack.Decoder(ToCore)
from_core_decoder = msgspec.msgpack.Decoder(FromCore)
encoder = msgspec.msgpack.Encoder()


def check_priority(priority: int, is_taken: bool) -> None:
    """Raise ValueError for a priority out of bounds, and for any except 0 unless the engine's
    policy uses priorities (`is_taken`)."""
    if priority and not is_taken:
        raise ValueError(
            f"priority must be 0, got {priority}: requests are served in the order in which they "
            "come, unless the engine is started with --scheduling-policy priority"
        )
    if abs(priority) > MAX_PRIORITY:
        raise ValueError(f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}")


def refuse(frame: bytes, why: str) -> FromCore | None:
    """Return the error reply to a frame that the core cannot decode; None if its id is missing."""
    try:
        fields = msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    text = f"the engine core cannot read this request ({why}); use one version of StrataKV"
    match fields:
        case ["add", str(request_id), *_]:
            return Outputs([TokenOutput(request_id, [], "error", error=text)])
        case ["call", int(call_id), *_]:
            return Reply(call_id, error=text)
    return None
