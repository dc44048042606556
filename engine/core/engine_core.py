# SPDX-License-Identifier: Apache-2.0
"""The engine core: model, pool, tiers, scheduler and worker put together, and stepped.

One thread calls it. It takes and gives the messages of `wire.py` and knows nothing of how they
travel, of text, or of HTTP.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import torch

from ...connector.base import KVConnectorScheduler, KVConnectorWorker
from ...connector.build import build_offload
from ...tiers.block import BlockLayout, Identity, tenant_salt
from ...tiers.errors import TierConfigError
from ..cache.block_hash import make_block_hasher
from ..cache.kv_cache_manager import KVCacheManager
from ..config import ConfigError, EngineConfig
from ..models.dtypes import compute_dtype, dtype_name
from ..models.fingerprint import fingerprint
from ..models.spec import load_model_spec, resolve_max_model_len
from ..request import BlockHasher, Request, TokenArray
from ..sampling_params import SamplingParams
from ..scheduler.output import SchedulerOutput
from ..scheduler.scheduler import RETRY_SECONDS, QueueFull, Scheduler
from ..token_ids import BYTES_PER_TOKEN
from ..wire import OVERLOADED, PROTOCOL_VERSION, AddRequest, Ready, TokenOutput
from ..worker.kv_pool import check_pool_size, num_blocks_in
from ..worker.model_runner import ModelRunner
from .figures import Figures
from .offload import describe_tiers, offload_settings

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

# A worker that fails without any request to blame would fail for ever.
_MAX_EMPTY_FAILURES = 3
_IDLE_SECONDS = 5.0
_PROGRESS_STEPS = 10


class EngineCore:
    """One model being served.

    Raises ConfigError for settings, a model directory or tiers that cannot work; nothing stays
    open then. `progress` hears what the start is busy with.
    """

    def __init__(self, config: EngineConfig, *, progress: Progress | None = None) -> None:
        self.config = config
        self._progress = progress or logger.info
        self._closed = False
        self._empty_failures = 0
        self.spec = load_model_spec(config.model.path)
        self.max_model_len = resolve_max_model_len(self.spec, config.model.max_model_len)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        kv_dtype = dtype_name(compute_dtype(config.model.dtype))
        layout = self.spec.layout(config.cache.block_size, kv_dtype)
        self.num_blocks = config.cache.num_blocks or num_blocks_in(
            layout, config.cache.memory_bytes
        )
        check_pool_size(layout, self.num_blocks, self.max_model_len)
        identity = Identity(
            fingerprint(config.model.path, self.spec),
            config.model.revision,
            kv_dtype,
            config.cache.block_size,
        )
        self._hasher = self._make_hasher(identity.root())
        self._figures = Figures(config, layout, self.num_blocks)
        self._connector: KVConnectorScheduler | None = None
        self._connector_worker: KVConnectorWorker | None = None
        try:
            if config.offload.enabled:
                self._build_offload(layout, identity.root())
            self._build_engine()
        except BaseException:
            self._close_connector(0.0)
            raise

    def ready(self) -> Ready:
        """What clients must know."""
        return Ready(
            protocol_version=PROTOCOL_VERSION,
            max_model_len=self.max_model_len,
            vocab_size=self.spec.vocab_size,
            num_blocks=self.num_blocks,
            block_size=self.config.cache.block_size,
            eos_token_ids=list(self.spec.eos_token_ids),
        )

    def add(self, request: AddRequest) -> list[TokenOutput]:
        """Queue a request. One that cannot run ends here: its only output is returned."""
        code = None
        try:
            self.scheduler.check_queue()
            self.scheduler.add_request(self._make_request(request))
            return []
        except QueueFull as error:
            text, code = str(error), OVERLOADED
        except ValueError as error:
            text = str(error)
        except Exception as error:  # one request must not stop the others
            logger.exception("request %s could not be queued", request.request_id)
            text = f"the request could not be queued ({type(error).__name__}: {error})"
        refusal = TokenOutput(request.request_id, [], "error", error=text, error_code=code)
        return [refusal]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests whose client is gone; unknown ids are ignored."""
        self.scheduler.finish_requests(request_ids)

    def call(self, name: str, argument: str) -> Any:
        """Answer a `wire.Call` with plain values; raises ValueError, with the reason, for one that
        is unknown or cannot be followed now."""
        if name == "stats":
            connector = None if self._connector is None else self._connector.stats()
            return {
                "scheduler": self.scheduler.stats(),
                "connector": connector,
                "pool": self.scheduler.manager.pool.residency.stats(),
                "core": self._figures.stats(),
            }
        if name == "reset_prefix_cache":
            return self._reset_prefix_cache(argument or "pool")
        raise ValueError(f"the core answers stats and reset_prefix_cache, not {name!r}")

    def has_work(self) -> bool:
        """Whether a step could do anything now."""
        return self.scheduler.has_runnable_work()

    def idle_seconds(self) -> float:
        """How long to wait for an event, at most, before asking `has_work` again."""
        return RETRY_SECONDS if self.scheduler.num_waiting else _IDLE_SECONDS

    def step(self) -> list[TokenOutput]:
        """Schedule, compute, take in. A fault of the worker ends the requests of this step only."""
        output = self.scheduler.schedule()
        began = time.monotonic()
        try:
            result = self._runner.execute(output)
        except Exception as error:  # noqa: BLE001 - it is logged, and told to the step's requests
            return self._fail_step(output, error)
        self._empty_failures = 0
        cost = self._figures.note_step(output, result, time.monotonic() - began)
        if cost is not None and self._connector is not None:
            self._connector.note_step(*cost)
        outputs = self.scheduler.update_from_output(output, result)
        self._figures.ledger.credit(self.scheduler.counts)
        return outputs

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called, from any thread, when `has_work` may have become True."""
        if self._connector is not None:
            self._connector.set_wakeup(wakeup)

    def shutdown(self, timeout_seconds: float | None = None) -> None:
        """Abort what runs, hand the pool's blocks to the tiers, write back. Idempotent.

        The time is that of the configuration unless given.
        """
        if self._closed:
            return
        self._closed = True
        if timeout_seconds is None:
            timeout_seconds = self.config.offload.shutdown_seconds
        deadline = time.monotonic() + timeout_seconds
        self.scheduler.finish_requests(list(self.scheduler.requests))
        if self._connector is not None and self._connector_worker is not None:
            resident = self.scheduler.manager.pool.resident()
            self._progress(f"shutting down, {len(resident)} blocks of the pool go to the tiers")
            self._connector_worker.start_step(self._connector.build_final_meta(resident))
        self._close_connector(deadline - time.monotonic())

    def _build_offload(self, layout: BlockLayout, root: bytes) -> None:
        offload = self.config.offload
        self._progress(f"preparing the tiers: {describe_tiers(offload)}")
        try:
            self._connector, self._connector_worker = build_offload(
                layout,
                offload_settings(offload),
                # Digests of the other form do not carry the identity, so the store must.
                namespace=root if self.config.cache.block_hash == "sha256_cbor" else b"",
                progress=_steps_of(self._progress, "memory of the cpu tier"),
            )
        except TierConfigError as error:
            raise ConfigError(str(error)) from error

    def _build_engine(self) -> None:
        config = self.config
        # Before the weights are loaded, since it may refuse the settings.
        self.scheduler = Scheduler(
            config.scheduler,
            KVCacheManager(
                self.num_blocks,
                config.cache.block_size,
                self.max_model_len,
                enable_caching=config.cache.enable_prefix_caching,
                watermark=config.cache.watermark,
            ),
            max_model_len=self.max_model_len,
            eos_token_ids=frozenset(self.spec.eos_token_ids),
            connector=self._connector,
        )
        self._progress(f"loading {config.model.path}")
        self._runner = ModelRunner(
            self.spec,
            config.model.path,
            dtype=config.model.dtype,
            num_blocks=self.num_blocks,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            connector=self._connector_worker,
        )

    def _make_hasher(self, root: bytes) -> BlockHasher | None:
        cache = self.config.cache
        if not cache.enable_prefix_caching:
            return None
        return make_block_hasher(root, cache.block_size, cache.block_hash)

    def _make_request(self, request: AddRequest) -> Request:
        """Raises ValueError for tokens that cannot be."""
        tokens = self._check_tokens(request.prompt_token_ids)
        params = request.sampling_params
        _check_vocabulary(params, self.spec.vocab_size)
        # What is found in a cache is not computed, so it has no logits to tell of.
        needs_all_logits = params.prompt_logprobs is not None
        return Request(
            request.request_id,
            tokens,
            _fit_max_tokens(params, self.max_model_len - len(tokens)),
            priority=request.priority,
            cache_salt=tenant_salt(self.config.tenant_secret, request.tenant, request.cache_salt),
            block_hasher=self._hasher,
            skip_reading_prefix_cache=request.skip_reading_prefix_cache or needs_all_logits,
        )

    def _check_tokens(self, packed: bytes) -> TokenArray:
        if not packed or len(packed) % BYTES_PER_TOKEN:
            raise ValueError("the prompt is empty or no list of int32; give at least one token id")
        tokens = np.frombuffer(packed, "<i4")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.spec.vocab_size:
            raise ValueError(
                f"token ids must be from 0 to {self.spec.vocab_size - 1}, and the prompt holds "
                f"{low if low < 0 else high}"
            )
        if len(tokens) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens, but a context of {self.max_model_len} must "
                "hold it and at least one new token; shorten it"
            )
        return tokens.astype(np.int32, copy=False)

    def _reset_prefix_cache(self, scope: str) -> dict[str, bool]:
        if scope not in ("pool", "all"):
            raise ValueError(f"reset_prefix_cache takes pool or all, not {scope!r}")
        if not self.scheduler.reset_prefix_cache(scope == "all"):
            raise ValueError("requests still hold blocks of the pool; wait until they have ended")
        return {"done": True}

    def _fail_step(self, output: SchedulerOutput, error: Exception) -> list[TokenOutput]:
        count = len(output.num_scheduled_tokens)
        logger.error("a step of %d requests failed in the worker", count, exc_info=error)
        outputs = self.scheduler.fail_step(output, error)
        self._empty_failures = 0 if outputs else self._empty_failures + 1
        if self._empty_failures >= _MAX_EMPTY_FAILURES:
            raise RuntimeError(f"the worker fails even without requests: {error}") from error
        return outputs

    def _close_connector(self, timeout_seconds: float) -> None:
        """Let copies end and be taken in, then close the tiers."""
        if self._connector is None or self._connector_worker is None:
            return
        self._connector_worker.shutdown()
        self._connector.update_from_worker(self._connector_worker.poll())
        self._connector.shutdown(max(0.0, timeout_seconds))


def _check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError for token ids in the parameters that the model does not have."""
    for name, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words_token_ids", list(itertools.chain(*params.bad_words_token_ids))),
    ):
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"{name} must be token ids from 0 to {vocab_size - 1}, got {wrong}")


def _fit_max_tokens(params: SamplingParams, room: int) -> SamplingParams:
    """The same with no more tokens than the context has left (at least 1, refused elsewhere)."""
    if params.max_tokens <= room:
        return params
    most = max(room, 1)
    changes = {"max_tokens": most, "min_tokens": min(params.min_tokens, most)}
    return msgspec.structs.replace(params, **changes)


def _steps_of(progress: Progress, what: str) -> Callable[[int, int], None]:
    """Bytes done and in all, told as a few lines and no more."""
    told = 0

    def tell(done: int, total: int) -> None:
        nonlocal told
        step = done * _PROGRESS_STEPS // max(total, 1)
        if step > told:
            told = step
            progress(f"{what}: {100 * step // _PROGRESS_STEPS} %")

    return tell
