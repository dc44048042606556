# SPDX-License-Identifier: Apache-2.0
"""RequestBuilder: makes the scheduler's Request from a client's message.

The builder checks a message against the model's vocabulary and context length."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ...connector.messages import Elsewhere
from ...tiers.base import NO_CONTEXT, RequestContext
from ...tiers.block import tenant_salt
from ...tiers.settings.format import format_value
from ..config.engine_config import MEAN, POOLINGS
from ..request.adapter import Adapter
from ..request.core_messages import NO_EXTRAS, AddRequest, RequestExtras, ToolCalled, check_priority
from ..request.handover_ticket import Ticket, fits, is_possible
from ..request.pictures import Picture, check_pictures
from ..request.prompt_embeds import EmbedArray, read_embeds
from ..request.request import BYTES_PER_TOKEN, BlockHasher, Request, TokenArray, job_key
from ..request.routed_rows import check_routed_start
from ..request.sampling_params import SamplingParams, check_params_for_embeds
from .adapter_registry import AdapterRegistry, UnknownAdapter

logger = logging.getLogger(__name__)


class Continued(NamedTuple):
    """An ended request, and the tokens that its successor appends to the ended request's prompt."""

    request: Request
    token_ids: Sequence[int] | TokenArray


class RequestBuilder:
    """Builds requests for one model. Without a `hasher`, no request uses the prefix cache."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        max_model_len: int,
        hasher: BlockHasher | None,
        tenant_secret: bytes,
        role: str = "both",
        *,
        takes_priority: bool = False,
        largest_embedding: float = math.inf,
        tells_experts: bool = False,
        adapters: AdapterRegistry | None = None,
        picture_token: int | None = None,
    ) -> None:
        self._picture_token = picture_token
        self._adapters = adapters
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._max_model_len = max_model_len
        self._hasher = hasher
        self._tenant_secret = tenant_secret
        self._role = role
        self._takes_priority = takes_priority
        self._largest_embedding = largest_embedding
        self._tells_experts = tells_experts

    def build_with_ticket(
        self, request: AddRequest, fork_of: Request | None = None
    ) -> tuple[Request, Ticket | None]:
        """Return the request, and its ticket if the ticket fits this prompt and these parameters. A
        ticket comes from the engine that computed the prompt. Raises like `make_request`."""
        built = self.make_request(request, fork_of)
        ticket = None if request.extras is None else request.extras.ticket
        if ticket is None or not is_possible(ticket, self._vocab_size):
            return built, None
        params, num_tokens = built.sampling_params, built.num_prompt_tokens
        needs_prompt = params.prompt_logprobs is not None or built.tail_hash is None
        needs_prompt = needs_prompt or built.routed_from is not None
        # With a grammar, the ticket's first token is unused: this engine samples that token by its
        # own compiled grammar, and computes the prompt's last token again.
        needs_prompt = needs_prompt or params.structured_outputs is not None
        is_good = not needs_prompt and fits(ticket, built.prompt_digest(), num_tokens, params)
        if not is_good:
            logger.info("request %s has a ticket that does not fit", request.request_id)
        return built, ticket if is_good else None

    def max_new_tokens(self, request: AddRequest) -> int:
        """Return the most tokens that the answer may have: 1 if another node generates the answer,
        else as many as fit into the context."""
        extras = request.extras or NO_EXTRAS
        if extras.asked_elsewhere and self._role == "prefill":
            return 1
        return self._max_model_len - len(request.prompt_token_ids) // BYTES_PER_TOKEN

    def make_request(
        self,
        request: AddRequest,
        fork_of: Request | None = None,
        continued: Continued | None = None,
        adapter_of: Request | None = None,
    ) -> Request:
        """Build a request. `fork_of` is a request built from the same message, except for id and
        parameters. `continued` has an ended request of the same message and more tokens; the ended
        request's prompt and these tokens form the new prompt. `adapter_of` is a request whose
        adapter the new request has. Raises ValueError for invalid tokens and unsupported
        parameters."""
        check_priority(request.priority, self._takes_priority)
        if request.sampling_params.n != 1:
            raise ValueError(
                f"n must be 1, got {request.sampling_params.n}: each answer is a request of its own"
            )
        embeds = None
        if continued is not None:
            behind = np.asarray(continued.token_ids, np.int32)
            check_pictures((), behind, self._picture_token)
            tokens = np.append(continued.request.prompt_token_ids, behind)
        elif fork_of is None:
            tokens = self.read_tokens(request.prompt_token_ids)
            embeds = self._check_embeds(request, len(tokens))
        else:
            tokens, embeds = fork_of.prompt_token_ids, fork_of.prompt_embeds
        before = fork_of or (continued and continued.request)
        params, extras = request.sampling_params, request.extras or NO_EXTRAS
        _check_vocabulary(params, self._vocab_size)
        most = self._max_model_len - len(tokens)
        if extras.asked_elsewhere and self._role == "prefill":
            most = min(most, 1)  # the other node generates all further tokens
        self._check_pooling(extras)
        # Cached tokens are not computed, so they have no logits and no hidden states to report.
        needs_all_rows = params.prompt_logprobs is not None or extras.pooling == MEAN
        skips = request.skip_reading_prefix_cache or params.skip_reading_prefix_cache
        return Request(
            request.request_id,
            tokens,
            _fit_max_tokens(params, most),
            cache_salt=tenant_salt(self._tenant_secret, request.tenant, request.cache_salt),
            adapter=self._adapter_of(extras, before or adapter_of),
            pictures=self._check_pictures(extras, tokens) if before is None else before.pictures,
            block_hasher=self._hasher,
            prompt_embeds=embeds,
            skip_reading_prefix_cache=skips or needs_all_rows,
            routed_from=self._routed_from(params, extras, is_part=continued is not None),
            hands_over=not extras.pooling and (self._role == "prefill" or extras.hand_over),
            goes_on=not extras.pooling and (self._role == "decode" or extras.ticket is not None),
            pooling=extras.pooling,
            priority=request.priority,
            job_id=extras.session,
            is_last_step=extras.is_last_step,
            tenant=request.tenant,
            fork_of=fork_of,
            continues=None if continued is None else continued.request,
        )

    def _check_pictures(self, extras: RequestExtras, tokens: TokenArray) -> Sequence[Picture]:
        check_pictures(extras.pictures, tokens, self._picture_token)
        return extras.pictures

    def _adapter_of(self, extras: RequestExtras, before: Request | None) -> Adapter | None:
        """Return the adapter of a request: the adapter of the request that it continues, else the
        adapter with its adapter name. Raises ValueError for an unknown name."""
        if before is not None:
            if before.adapter is not None and self._adapters is not None:
                self._adapters.check_held(before.adapter)
            return before.adapter
        if not extras.adapter:
            return None
        if self._adapters is None:
            raise UnknownAdapter(f"the adapter {format_value(extras.adapter)} is not loaded")
        return self._adapters.find_adapter(extras.adapter)

    def job_of(self, called: ToolCalled) -> bytes:
        salt = tenant_salt(self._tenant_secret, called.tenant, called.cache_salt)
        return job_key(salt, called.job_id)

    def elsewhere(self, request: AddRequest) -> Elsewhere:
        """Return whether the message shows that another engine computes this prompt now. If two
        nodes get the same prompt at once, the decode node waits for the prefill node."""
        extras, decodes = request.extras or NO_EXTRAS, self._role == "decode"
        if self._role == "prefill" or extras.hand_over or extras.ticket is not None:
            return Elsewhere.NO
        if extras.pooling:
            return Elsewhere.NO
        if extras.computed_elsewhere or (decodes and extras.asked_elsewhere):
            return Elsewhere.TOLD
        return Elsewhere.PERHAPS if decodes else Elsewhere.NO

    def _routed_from(
        self, params: SamplingParams, extras: RequestExtras, *, is_part: bool
    ) -> int | None:
        """Return the index of the first token whose routed experts are reported; None to report
        none. Raises ValueError if the client wants experts that cannot be reported."""
        start = params.routed_experts_prompt_start
        is_part = is_part or extras.more_follows or extras.beams is not None
        if self._tells_experts and not is_part:
            return None if extras.pooling else start or 0
        if start is None:
            return None
        check_routed_start(start, self._tells_experts)
        raise ValueError(
            "experts are told of one prompt and its answer, not of beams and prompts in parts; "
            "leave out routed_experts_prompt_start"
        )

    def _check_pooling(self, extras: RequestExtras) -> None:
        pooling = extras.pooling
        if not pooling:
            return
        if pooling not in POOLINGS:
            raise ValueError(f"pooling takes {' or '.join(POOLINGS)}, not {format_value(pooling)}")
        if extras.hand_over or extras.ticket is not None:
            raise ValueError(
                "an embedding is made by one node alone, and nothing of it is handed over; send "
                "the request without the fields of a router"
            )

    def _check_embeds(self, request: AddRequest, num_tokens: int) -> EmbedArray | None:
        """Return a request's prompt embeddings, or None. Raise ValueError if a token has none."""
        data = b"" if request.extras is None else request.extras.prompt_embeds
        if not data:
            return None
        check_params_for_embeds(request.sampling_params)
        embeds = read_embeds(
            data, self._hidden_size, self._max_model_len - 1, self._largest_embedding
        )
        if len(embeds) != num_tokens:
            raise ValueError(
                f"prompt embeddings stand for each of the prompt's {num_tokens} tokens, and they "
                f"are {len(embeds)}"
            )
        return embeds

    def read_tokens(self, packed: bytes, num_before: int = 0) -> TokenArray:
        """Decode the tokens of a prompt, or of a part after `num_before` tokens. Raises ValueError
        for an empty prompt, for ids outside the vocabulary, and if the context has no room for the
        tokens."""
        if not packed or len(packed) % BYTES_PER_TOKEN:
            raise ValueError("the prompt is empty or no list of int32; give at least one token id")
        tokens = np.frombuffer(packed, "<i4")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise ValueError(
                f"token ids must be from 0 to {self._vocab_size - 1}, and the prompt holds "
                f"{low if low < 0 else high}"
            )
        if (num_tokens := num_before + len(tokens)) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, but a context of {self._max_model_len} must "
                "hold it and at least one new token; shorten it"
            )
        return tokens.astype(np.int32, copy=False)


def decode_request(text: str) -> AddRequest:
    """Decode an AddRequest from JSON; raises ValueError for invalid JSON."""
    try:
        return msgspec.json.decode(text, type=AddRequest)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no request: {error}") from None


def context_of(request: AddRequest) -> RequestContext:
    """Return a request's tenant, session and priority as the context that the tiers use."""
    extras = request.extras
    if not request.tenant and not request.priority and extras is None:
        return NO_CONTEXT
    extras = extras or NO_EXTRAS
    return RequestContext(
        tenant=request.tenant or None,
        session=extras.session or None,
        priority=request.priority,
        pin=bool(extras.session) and not extras.is_last_step,
        transfer=extras.kv_transfer or None,
    )


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError if the parameters contain token ids outside the vocabulary."""
    for name, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words_token_ids", list(itertools.chain(*params.bad_words_token_ids))),
        ("reasoning_start_token_ids", params.reasoning_start_token_ids),
        ("reasoning_end_token_ids", params.reasoning_end_token_ids),
    ):
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name} must be token ids from 0 to {vocab_size - 1}, got {wrong}")


def _fit_max_tokens(params: SamplingParams, room: int) -> SamplingParams:
    """Limit `max_tokens` to `room`, and to at least 1: other code refuses a prompt without room."""
    if params.max_tokens <= room:
        return params
    most = max(room, 1)
    changes = {"max_tokens": most, "min_tokens": min(params.min_tokens, most)}
    return msgspec.structs.replace(params, **changes)
