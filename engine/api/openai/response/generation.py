# SPDX-License-Identifier: Apache-2.0
"""`Generation`: makes the engine generate one choice of an answer, and records the metrics.

Each prompt of a request has `n` choices (children), which have consecutive indices."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from starlette.requests import HTTPConnection

from .....tiers.settings.format import format_value
from ....pictures.picture_budget import PictureReservation
from ....request.core_messages import (
    INVALID_GRAMMAR,
    NO_EXTRAS,
    OVERLOADED,
    UNKNOWN_ADAPTER,
    WRONG_PICTURES,
    AddRequest,
    RequestExtras,
    ToolCalled,
    share_prompt,
)
from ....request.pictures import Picture
from ....request.request import BYTES_PER_TOKEN, unpack_token_ids
from ....request.sampling_params import SamplingParams, child_params
from ....text.detokenizer import Decoder
from ....text.output_processor import TextOutput, generate_text
from ....text.reasoning import Thoughts
from ...api_errors import ENGINE, ApiError
from ...front import Front
from ...metrics.engine_metrics import Watch
from ..request.beam_fields import beams_of
from ..request.protocol import SamplingFields
from .kv_transfer_params import read_params, without_routers_least
from .tools import CallReader

logger = logging.getLogger(__name__)

MAX_TENANT_CHARACTERS = 256
MAX_JOB_CHARACTERS = 256
JOB_HEADER, LAST_HEADER = "X-Job-Id", "X-Job-Last-Step"
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}


class Task(NamedTuple):
    prompt: bytes
    params: SamplingParams
    embeds: bytes = b""  # a file of embeddings in place of the prompt's tokens
    pictures: Sequence[Picture] = ()
    reservation: PictureReservation | None = None  # of the pictures' memory


@dataclass(slots=True)
class Generation:
    """The generation of one choice. Without `keeps_tokens` the generated tokens are dropped, and
    the client gets only data about the prompt, such as prompt log-probabilities."""

    index: int
    request: AddRequest
    child: int = 0  # the choice's number among the choices of the same prompt
    keeps_tokens: bool = True
    arrival_seconds: float = field(default_factory=time.monotonic)
    hands_over_alone: bool = False  # the request's only choice, handed over to a decode node
    thoughts: Thoughts | None = None  # None: thoughts stay in the text
    calls: CallReader | None = None  # None: calls of tools stay in the text
    decoder: Decoder | None = None  # decodes the tokens; None: the tokenizer decodes the tokens
    tool: str = ""  # the first tool that the answer has called
    has_text: bool = False  # the answer has text besides thoughts and tool calls
    reservation: PictureReservation | None = None  # None: the request holds no pictures

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids) // BYTES_PER_TOKEN

    @property
    def prompt_token_ids(self) -> list[int]:
        return unpack_token_ids(self.request.prompt_token_ids)

    async def run(self, front: Front) -> AsyncGenerator[TextOutput, None]:
        """Yield each output when the engine has made it. Raises EngineDead, and ApiError if the
        engine reports an error for this request. Closing the generator early aborts the request."""
        watch = Watch(front.metrics, self.arrival_seconds, self.num_prompt_tokens)
        try:
            async with aclosing(
                generate_text(
                    front.client, self.request, self.decoder or front.tokenizer, self.thoughts
                )
            ) as stream:
                async for output in stream:
                    if self.reservation is not None:
                        self._drop_pictures()
                    watch.record_output(output)
                    if self.calls is not None:
                        self.calls.read(output)
                        self._note_tool(front, output)
                    self.has_text = self.has_text or bool(output.text)
                    if output.finish_reason == "error":
                        raise _engine_error(output)
                    if not self.keeps_tokens:
                        _drop_tokens(output)
                    yield output
        finally:
            watch.close()
            if self.reservation is not None:
                self._drop_pictures()

    @property
    def begun_too_late(self) -> str:
        """A warning that a structured answer did not begin because the thought used up
        `max_tokens`; else empty. The value is valid only at the end of the choice."""
        asks = self.request.sampling_params.structured_outputs is not None
        if self.thoughts is None or not asks or self.has_text or self.tool:
            return ""
        return (
            "max_tokens was used up in the thought, before the answer began: raise it, or end the "
            "thought sooner with thinking_token_budget"
        )

    def _drop_pictures(self) -> None:
        """Drop the pixels, which the engine has taken over, and their reservation."""
        extras = self.request.extras or NO_EXTRAS
        self.request.extras = msgspec.structs.replace(extras, pictures=[])
        self.reservation = None

    def _note_tool(self, front: Front, output: TextOutput) -> None:
        """Record the first tool that the answer called. At the end of a request that belongs to an
        agent's job, report this tool to the engine."""
        self.tool = self.tool or next((each.name for each in output.tool_calls if each.name), "")
        extras = self.request.extras
        is_turn = front.client.ready.pins_turns and extras is not None and extras.session
        if output.finish_reason is not None and self.tool and is_turn:
            front.in_background(_tell_tool(front, self.request, self.tool))


def make_generations(
    front: Front,
    request: SamplingFields,
    tasks: Sequence[Task],
    request_id: str,
    arrival_seconds: float,
    *,
    tenant: str = "",
    job: Job | None = None,
    keeps_tokens: bool = True,
    num_generated: int = 0,
) -> list[Generation]:
    """Return a `Generation` for each choice of a request: `num_generated`, or `n` if that is 0, for
    each prompt. `request_id` begins the engine's request ids. Raises ApiError for too many choices
    or log-probabilities."""
    n = num_generated or request.n or 1
    _check_amount(front, tasks, n, shares=not request.stream)
    is_alone = len(tasks) * n == 1 and not request.use_beam_search
    handed = read_params(
        request.kv_transfer_params,
        is_alone=is_alone,
        asked_elsewhere=request.bootstrap_room is not None,
    )
    adapter = "" if request.model in (None, front.model_name) else request.model
    generations = []
    for place, (prompt, asked, embeds, pictures, reservation) in enumerate(tasks):
        params = without_routers_least(asked, request)
        asked_beams, beams = beams_of(request, params, embeds), None
        # A prefill node only computes the prompt, so a prefill node runs no beam search.
        if asked_beams is not None and not (handed is not None and handed.hand_over):
            beams, params = asked_beams
        for child in range(n):
            # In a stream each choice needs its own prompt log-probabilities, because the output of
            # the prompt's first choice may arrive later than another choice's output.
            with_prompt = child == 0 or bool(request.stream)
            own = child_params(params, child, with_prompt=with_prompt) if n > 1 else params
            index = place * n + child
            message = AddRequest(
                f"{request_id}-{index}",
                prompt,
                own,
                cache_salt=request.cache_salt or "",
                tenant=tenant,
                priority=request.priority or 0,
                extras=_extras(handed, embeds, job, adapter, pictures),
            )
            generation = Generation(index, message, child, keeps_tokens, arrival_seconds)
            generation.reservation = reservation
            generation.hands_over_alone = is_alone and handed is not None and handed.hand_over
            generations.append(generation)
        share_prompt([each.request for each in generations[-n:]], beams)
    return generations


def tenant_of(front: Front, http: HTTPConnection) -> str:
    """Return a request's tenant, the value of the header `--tenant-header`; "" without the header.
    Raises ApiError for several tenants, and for a tenant that is too long."""
    name = front.settings.tenant_header
    if name is None:
        return ""
    given = http.headers.getlist(name)
    tenant = given[0].strip() if given else ""
    if len(given) > 1 or len(tenant) > MAX_TENANT_CHARACTERS:
        message = (
            f"the header `{name}` names one tenant in up to {MAX_TENANT_CHARACTERS} characters"
        )
        raise ApiError(message, code="invalid_tenant")
    return tenant


class Job(NamedTuple):
    """An agent's job, to which a request belongs as one step."""

    job_id: str
    is_last_step: bool
    tool: str  # the tool whose result is the request's last message; "": unknown


def job_of(http: HTTPConnection, request: SamplingFields, tool: str = "") -> Job | None:
    """Return the job of a request, from the fields `job_id` and `is_last_step`, else from the
    headers `X-Job-Id` and `X-Job-Last-Step`. Raises ApiError for invalid values."""
    job_id, is_last = request.job_id, request.is_last_step
    if job_id is None:
        job_id = http.headers.get(JOB_HEADER, "")
    if is_last is None:
        said = http.headers.get(LAST_HEADER, "false").strip().lower()
        if said not in _SWITCHES:
            message = f"the header `{LAST_HEADER}` is true or false, not {format_value(said)}"
            raise ApiError(message, code="invalid_value")
        is_last = _SWITCHES[said]
    if len(job_id) > MAX_JOB_CHARACTERS or not job_id.isprintable():
        message = f"`job_id` takes up to {MAX_JOB_CHARACTERS} printable characters"
        raise ApiError(message, param="job_id", code="invalid_value")
    if not job_id:
        if request.is_last_step:
            message = "`is_last_step` is of a job; send its `job_id` too"
            raise ApiError(message, param="is_last_step", code="invalid_value")
        return None
    return Job(job_id, is_last, tool[:MAX_JOB_CHARACTERS])


async def _tell_tool(front: Front, request: AddRequest, tool: str) -> None:
    """Report to the engine which tool the answer to a job's request has called."""
    assert request.extras is not None
    called = ToolCalled(request.extras.session, tool, request.tenant, request.cache_salt)
    try:
        await front.client.call("tool_called", msgspec.json.encode(called).decode())
    except Exception as error:  # noqa: BLE001 - a hint; the engine's end is reported elsewhere
        logger.debug("the engine was not told of a tool: %s", error)


def _extras(
    handed: RequestExtras | None,
    embeds: bytes,
    job: Job | None,
    adapter: str | None,
    pictures: Sequence[Picture],
) -> RequestExtras | None:
    extras = handed
    if pictures:
        extras = msgspec.structs.replace(extras or NO_EXTRAS, pictures=list(pictures))
    if adapter:
        extras = msgspec.structs.replace(extras or NO_EXTRAS, adapter=adapter)
    if embeds:
        extras = msgspec.structs.replace(extras or NO_EXTRAS, prompt_embeds=embeds)
    if job is not None:
        extras = msgspec.structs.replace(
            extras or NO_EXTRAS,
            session=job.job_id,
            is_last_step=job.is_last_step,
            tool=job.tool,
        )
    return extras


def _check_amount(front: Front, tasks: Sequence[Task], n: int, *, shares: bool) -> None:
    settings = front.settings
    count, most = len(tasks) * n, settings.max_choices_per_request
    if count > most:
        message = (
            f"`n` is {n} for {len(tasks)} prompts, which makes {count} answers, and at most {most} "
            "are given at once; send fewer prompts in one request"
        )
        raise ApiError(message, param="n", code="too_many_choices")
    entries = sum(
        len(task.prompt) // BYTES_PER_TOKEN * (1 + task.params.prompt_logprobs)
        for task in tasks
        if task.params.prompt_logprobs is not None
    ) * (1 if shares else n)  # fmt: skip
    most = settings.max_prompt_logprobs_per_request
    if entries > most:
        message = (
            f"the request asks for {entries} log-probabilities of prompt tokens and at most {most} "
            "are given at once; send fewer prompts in one request, or ask for fewer likely tokens"
        )
        raise ApiError(message, param="prompt_logprobs", code="too_many_logprobs")


def _drop_tokens(output: TextOutput) -> None:
    output.text, output.token_ids = "", []
    output.logprobs = None if output.logprobs is None else []
    if output.finish_reason is not None:
        output.finish_reason, output.stop_reason = "length", None


def _engine_error(output: TextOutput) -> ApiError:
    message = output.error or "the engine failed on this request"
    if output.error_code == OVERLOADED:
        return ApiError(message, status=503, kind=ENGINE, code=OVERLOADED, retry_seconds=1)
    if output.error_code == INVALID_GRAMMAR:  # the client's error: the client wrote the grammar
        return ApiError(message, code=INVALID_GRAMMAR)
    if output.error_code == UNKNOWN_ADAPTER:  # unloaded after the front had checked the name
        return ApiError(message, status=404, param="model", code="model_not_found")
    if output.error_code == WRONG_PICTURES:  # the client's error: it wrote the placeholders
        return ApiError(message, param="prompt", code="invalid_value")
    return ApiError(message, status=500, kind=ENGINE, code=output.error_code or "request_failed")
