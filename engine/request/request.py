# SPDX-License-Identifier: Apache-2.0
"""`Request`: the inputs, progress and status of one request.

Token ids are in one growing int32 buffer, so hashing and the worker take views of it instead of
rebuilding lists. Output tokens are copied to the buffer when a view is needed, once for each block.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...tiers.base import RequestContext
from .adapter import Adapter
from .logprobs import PromptLogprobs
from .pictures import Picture
from .routed_rows import RoutedRows
from .sampling_params import SamplingParams

# Token ids are sent to the core, and hashed, as little-endian int32. The core checks their range.
BYTES_PER_TOKEN = 4

_PROMPT = b"stratakv.prompt"


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Pack ids as little-endian int32. Raises ValueError for an id that does not fit."""
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise ValueError(
            "token ids must be integers from 0 up to the vocabulary size; one of them is not even "
            "a 32-bit integer"
        ) from error


def unpack_token_ids(packed: bytes) -> list[int]:
    """Unpack little-endian int32. Raises ValueError for a length not divisible by four."""
    if len(packed) % BYTES_PER_TOKEN:
        raise ValueError(f"packed token ids take 4 bytes each, and {len(packed)} bytes came")
    return list(struct.unpack(f"<{len(packed) // BYTES_PER_TOKEN}i", packed))


TokenArray = npt.NDArray[np.int32]


class BlockHasher(NamedTuple):
    """The functions that compute the hashes by which the full blocks of requests are found."""

    block_size: int  # tokens
    root: bytes  # the digest of the identity of all engines that share these blocks
    # The digests (32 bytes each) of a request's full blocks that its `block_hashes` lack.
    digests: Callable[[Request], list[bytes]]
    # The digest of a request's prompt tokens after the full blocks; b"" without such tokens.
    tail: Callable[[Request], bytes]


class RequestStatus(enum.IntEnum):
    """The stage of a request. Every status after PREEMPTED means that the request is finished."""

    WAITING = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()  # the grammar is being compiled
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()
    FINISHED_NOT_FINITE = enum.auto()  # the model's logits were not finite numbers
    FINISHED_REPETITION = enum.auto()  # the answer had begun to repeat itself
    FINISHED_PROCESSOR_FAILED = enum.auto()  # a logits processor of the request raised

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        """The `finish_reason` of OpenAI's API; None while the request is unfinished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_NOT_FINITE: "error",
    RequestStatus.FINISHED_REPETITION: "repetition",
    RequestStatus.FINISHED_PROCESSOR_FAILED: "error",
}


_numbers = itertools.count()


def job_key(cache_salt: bytes | None, job_id: str) -> bytes:
    """Return the key of an agent's job; its cache salt keeps jobs of different tenants apart."""
    return (cache_salt or b"") + b"\0" + job_id.encode()


class LoadKind(enum.Enum):
    """The kind of a KV load from a tier that is under way for a request."""

    BLOCKING = "blocking"  # the request computes nothing until the connector reports the load
    OVERLAPPED = "overlapped"  # the request runs during the load


@dataclass(slots=True)
class DraftRecord:
    """Statistics of one request's draft tokens in speculative decoding."""

    most: int  # how many drafts the request gets next
    num_steps: int = 0  # steps with drafts of this request
    num_drafts: float = 0.0  # drafts of a step, averaged with more weight on newer steps
    num_accepted: float = 0.0  # accepted drafts, averaged in the same way
    num_pauses: int = 0  # pauses in a row
    resume_at: int = 0  # drafts resume at this number of tokens


@dataclass(slots=True)
class KeptEnd:
    """The blocks of a finished request, kept in the pool for the requests that continue it."""

    holder: str  # the id that holds the blocks in the manager's tables
    num_heirs: int = 0  # requests that will continue in these blocks


@dataclass(slots=True)
class Progress:
    """The scheduler's state of one request: end tokens, timestamps, KV load and lost tokens.
    Timestamps are seconds of the monotonic clock, and None before the event."""

    end_ids: frozenset[int] = frozenset()
    is_known: bool = False  # whether the worker has the request
    scheduled: float | None = None
    first_token: float | None = None
    prompt_logprobs: PromptLogprobs | None = None  # came with a dropped token
    routed_experts: list[RoutedRows] | None = None  # came with a dropped token
    # None: no copy writes to its blocks. BLOCKING outlives the request until the load is reported.
    load: LoadKind | None = None
    load_seconds: float = 0.0
    # Tier → tokens that the last load brought, until the request runs.
    loaded_by_tier: dict[str, int] = field(default_factory=dict)
    # How many leading tokens were computed or found before but may be missing, and why.
    lost_tokens: int = 0
    lost_cause: str = ""
    drafting: DraftRecord | None = None  # with speculation, after the first decode
    # Requests that wait for this request's prompt, each with its context for the tiers.
    forks: dict[Request, RequestContext] = field(default_factory=dict)
    kept: KeptEnd | None = None
    # Leading tokens whose K and V another request had, but whose states were missing: a checkpoint
    # is due after these tokens (`engine/cache/state_checkpoints.py`).
    junction: int = 0
    # The context for look-ups in the tiers, if the request continues in kept blocks.
    context: RequestContext | None = None

    def lose(self, num_tokens: int, cause: str) -> None:
        """Record that the first `num_tokens` tokens may have to be recomputed, and why."""
        if num_tokens >= self.lost_tokens:
            self.lost_tokens, self.lost_cause = num_tokens, cause


class Request:
    """A prompt and the output that the engine generates for it.

    `num_tokens` counts prompt and verified output. `num_computed_tokens` counts positions whose K
    and V are computed or are being loaded. The scheduler schedules the tokens between these two
    counts. The scheduler may go past `num_tokens` by `num_placeholders`, the number of tokens that
    steps in flight will choose. `draft_token_ids` are unverified tokens after `num_tokens`; the
    next step computes them too."""

    __slots__ = (
        "_block_hasher",
        "_hash_at",
        "_num_packed",
        "_tail_hash",
        "_tokens",
        "adapter",
        "arrival_seconds",
        "block_hashes",
        "cache_salt",
        "cached_tokens_by_tier",
        "continues",
        "draft_token_ids",
        "external_load_failed",
        "fork_of",
        "hands_over",
        "is_last_step",
        "job",
        "job_id",
        "keeps_blocks",
        "max_num_tokens",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_computed_tokens",
        "num_likeliest",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "num_told_tokens",
        "number",
        "output_token_ids",
        "pictures",
        "pooling",
        "priority",
        "progress",
        "prompt_embeds",
        "repetition_detection",
        "request_id",
        "routed_from",
        "sampling_params",
        "skip_reading_prefix_cache",
        "status",
        "stop_reason",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | TokenArray,
        sampling_params: SamplingParams,
        *,
        arrival_seconds: float | None = None,
        cache_salt: bytes | None = None,
        adapter: Adapter | None = None,
        block_hasher: BlockHasher | None = None,
        prompt_embeds: npt.NDArray[Any] | None = None,
        pictures: Sequence[Picture] = (),
        skip_reading_prefix_cache: bool = False,
        routed_from: int | None = None,
        hands_over: bool = False,
        goes_on: bool = False,
        pooling: str = "",
        priority: int = 0,
        job_id: str = "",
        is_last_step: bool = False,
        tenant: str = "",
        fork_of: Request | None = None,
        continues: Request | None = None,
    ) -> None:
        """`fork_of` is a request with the same prompt; `continues` is a request whose prompt is a
        prefix of this prompt. The hashes of the common blocks are copied from that request."""
        if len(prompt_token_ids) == 0:
            raise ValueError("a request needs at least one prompt token")
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.arrival_seconds = time.monotonic() if arrival_seconds is None else arrival_seconds
        self.cache_salt = cache_salt
        self.adapter = adapter
        # [num_prompt_tokens, hidden]: the model's input instead of the prompt's token ids.
        self.prompt_embeds = prompt_embeds
        self.pictures = pictures  # pictures in prompt order
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        # The first token whose experts are reported (so it is computed); None: no experts.
        self.routed_from = routed_from
        self.pooling = pooling  # see `RequestExtras`
        self.priority = priority  # a lower number comes first, if the policy uses it
        # The name of an agent's job, unique to its tenant; b"" without a job.
        self.job = job_key(cache_salt, job_id) if job_id else b""
        self.job_id = job_id
        self.tenant = tenant  # "": shared by all clients without a tenant
        # The id of a request with the same prompt, which gets its first token in the same step.
        self.fork_of = "" if fork_of is None else fork_of.request_id
        # The request that this one continues, until this request runs; kept blocks of the other
        # request are then used.
        self.continues = continues
        self.keeps_blocks = False  # whether other requests continue this request after its end
        self.num_likeliest = 0  # see `NewRequestData`
        self.is_last_step = is_last_step
        self.number = next(_numbers)  # counts the requests of this process in order

        self.num_prompt_tokens = len(prompt_token_ids)
        # Copied from the parameters, because every token reads these values.
        self.max_tokens = sampling_params.max_tokens
        self.repetition_detection = sampling_params.repetition_detection
        # The limit of prompt and output together, which a scheduler may lower.
        self.max_num_tokens = self.num_prompt_tokens + self.max_tokens
        self._tokens: TokenArray = np.empty(self.max_num_tokens, np.int32)
        self._tokens[: self.num_prompt_tokens] = prompt_token_ids
        self._num_packed = self.num_tokens = self.num_prompt_tokens
        # The output is also a list, whose newest entries samplers and stop checks read by
        # reference.
        self.output_token_ids: list[int] = []

        self.num_computed_tokens = 0
        self.num_external_computed_tokens = 0
        self.num_placeholders = 0
        self.draft_token_ids: Sequence[int] = ()
        # The worker's `num_computed_tokens` of the request; -1: the worker has no such number.
        self.num_told_tokens = -1
        self.num_cached_tokens = -1  # set once, when first scheduled
        self.cached_tokens_by_tier: dict[str, int] = {}
        self.num_preemptions = 0
        # Whether the tiers are not looked up: after a failed load, look-ups could repeat without
        # end; after a request that this one continues, no tier has more than the pool.
        self.external_load_failed = continues is not None or routed_from is not None

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.progress = Progress()

        self._block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        if (before := fork_of or continues) is not None and block_hasher is not None:
            num_common = min(before.num_prompt_tokens, self.num_prompt_tokens)
            self.block_hashes = before.block_hashes[: num_common // block_hasher.block_size]
        self._hash_at: float = math.inf  # number of tokens with which the next block is full
        self._extend_hashes()
        # Whether other engines will load the blocks of the prompt.
        self.hands_over = hands_over and block_hasher is not None
        # Set if another engine has computed the prompt.
        self._tail_hash = self.prompt_tail_hash() if goes_on and block_hasher is not None else None

    @property
    def most_cached_tokens(self) -> int:
        """The number of leading tokens that may come from the prefix cache. The last token must be
        computed for its logits, and so must tokens whose experts are reported."""
        most = self.num_tokens - 1
        return most if self.routed_from is None else min(most, self.routed_from)

    @property
    def tail_hash(self) -> bytes | None:
        """The digest of the prompt's tokens after its full blocks, if another engine has computed
        the prompt; else None. The digest is also None if the output has more tokens than the other
        engine's."""
        return self._tail_hash if self.num_tokens - 1 <= self.num_prompt_tokens else None

    def prompt_tail_hash(self) -> bytes:
        """Return the digest of the prompt's tokens after its full blocks; b"" without any."""
        assert self._block_hasher is not None
        return self._block_hasher.tail(self)

    def prompt_digest(self) -> str:
        """Return a digest that is equal for all requests with the same prompt, model, tenant and
        salt. The digest has 64 hexadecimal digits, whatever form block hashes have."""
        assert self._block_hasher is not None
        num_full = self.num_prompt_tokens // self._block_hasher.block_size
        last = self.prompt_tail_hash() or self.block_hashes[num_full - 1]
        return hashlib.sha256(_PROMPT + self._block_hasher.root + last).hexdigest()

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def all_token_ids(self) -> TokenArray:
        """A view of prompt and output, int32 `[num_tokens]`; valid until tokens are appended."""
        packed, length = self._num_packed, self.num_tokens
        if packed < length:
            if length > len(self._tokens):
                grown = np.empty(2 * length, np.int32)
                grown[:packed] = self._tokens[:packed]
                self._tokens = grown
            self._tokens[packed:length] = self.output_token_ids[packed - length :]
            self._num_packed = length
        return self._tokens[:length]

    @property
    def prompt_token_ids(self) -> TokenArray:
        """The prompt, int32 `[num_prompt_tokens]`; a view into the token buffer."""
        return self._tokens[: self.num_prompt_tokens]

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def embed_bytes(self) -> int:
        """Bytes of the prompt embeddings and pictures in memory."""
        embeds = 0 if self.prompt_embeds is None else self.prompt_embeds.nbytes
        return embeds + sum([len(each.pixels) for each in self.pictures])

    def timings(self, now: float) -> dict[str, float]:
        """Return the timings for the last output, in seconds (and the number of preemptions).

        A stage that the request did not reach has 0 seconds. `queue_seconds` includes the time of a
        KV load for which the request waits."""
        progress, arrival = self.progress, self.arrival_seconds
        scheduled = now if progress.scheduled is None else progress.scheduled
        first_token = now if progress.first_token is None else progress.first_token
        return {
            "queue_seconds": scheduled - arrival,
            "prefill_seconds": first_token - scheduled,
            "decode_seconds": now - first_token,
            "load_seconds": progress.load_seconds,
            "first_token_seconds": first_token - arrival,
            "total_seconds": now - arrival,
            "num_preemptions": float(self.num_preemptions),
        }

    def append_output_token(self, token_id: int) -> None:
        """Add a verified token, and hash the block if the token completes one."""
        self.output_token_ids.append(token_id)
        self.num_tokens = num_tokens = self.num_tokens + 1
        if num_tokens >= self._hash_at:
            self._extend_hashes()

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens})"
        )

    def _extend_hashes(self) -> None:
        hasher = self._block_hasher
        if hasher is not None:
            self.block_hashes.extend(hasher.digests(self))
            self._hash_at = (len(self.block_hashes) + 1) * hasher.block_size
