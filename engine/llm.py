# SPDX-License-Identifier: Apache-2.0
"""The Python API: `LLM(model).generate(prompts)`, and `chat` for conversations.

Calls of `LLM` are synchronous. The calls use an engine client whose event loop runs in a separate
thread, so they work in scripts, threads and notebooks."""

from __future__ import annotations

import atexit
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np

from ..tiers.settings.format import format_value
from ..tiers.settings.readers import one_of, switch
from ..tiers.settings.values import ConfigError
from .client.base import EngineClient, EngineDead
from .config.engine_options import engine_config
from .core.setup.model_check import check_model
from .core.start import tell_import
from .logs import LOG_LEVELS
from .models.checkpoint.generation_config import load_default_sampling
from .offline.arguments import (
    NO_LISTS,
    Conversation,
    Prompt,
    check_salt,
    check_switch,
    conversations_in,
    embeds_extras,
    naming,
    params_for,
    priorities_for,
    prompts_in,
    type_name,
)
from .offline.beam_outputs import beam_search_output, params_of_beams
from .offline.event_loop_thread import EventLoopThread
from .offline.llm_adapters import LlmAdapters
from .offline.outputs import BeamSearchOutput, EmbeddingRequestOutput, RequestOutput
from .offline.prompt_runner import CheckedPrompt, PromptRunner
from .offline.prompt_session import PromptSession
from .request.beam_params import BeamSearchParams
from .request.core_messages import NO_EXTRAS, AddRequest, check_priority
from .request.pictures import Picture
from .request.pooling import EMBEDDING_PARAMS, Dimensions, with_pooling
from .request.request import pack_token_ids
from .request.routed_rows import check_routed_start
from .request.sampling_params import SamplingParams
from .sampling.processor_loading import make_params_check
from .text.bad_words import with_spelt_bad_words
from .text.output_processor import OutputProcessor, TextOutput, generate_text
from .text.reasoning import find_marks, with_reasoning_marks
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .core.engine_core import EngineCore

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The time to close, added to the time in which the tiers write back.
_CLOSE_GRACE_SECONDS = 10.0


class LLM:
    """An engine. `options` are the flags of `stratakv serve` with underscores: `LLM("model",
    kv_offload="cpu,ssd", kv_offload_cpu_bytes="512MiB")`. Without `model`, the engine runs
    StrataKV's embedded model. With `in_process=False` the engine core runs in another process,
    which logs from `log_level` up. With `in_process=True`, `progress` is called with a line of text
    at each stage of the start. Raises ConfigError for invalid settings. Close it, or use it as a
    context manager; at exit, Python closes open engines."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        in_process: bool = True,
        log_level: str = "warning",
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(model, options)
        one_of(*LOG_LEVELS)("log_level", log_level)
        in_process = switch("in_process", in_process)
        if progress is not None and not callable(progress):
            raise ConfigError(
                f"progress takes a function of one text, not {format_value(progress)}"
            )
        check_model(self.config)
        chosen = self.config.model
        self.tokenizer = Tokenizer.load_if_present(chosen.path)
        self.marks = find_marks(self.tokenizer, chosen.reasoning_start, chosen.reasoning_end)
        self._check_params = make_params_check(self.config.logits_processors)
        self._ids = itertools.count(1)
        self._closed = False
        self._loop = EventLoopThread("llm")
        try:
            self._client = self._start_client(in_process, log_level, progress)
        except BaseException:
            self._loop.close()
            raise
        self.adapters = LlmAdapters(self, self._client.ready.adapters)
        atexit.register(self.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Generate answers to prompts, each a text or a list of token ids. Returns one output per
        prompt, in order. `priority` has one number for each prompt and needs
        `scheduling_policy="priority"`. `adapter` names a loaded LoRA adapter to answer with.

        If standard error is a terminal and several prompts take longer than a second, a line there
        counts finished prompts, unless `use_tqdm` is False. Raises EngineDead, and ValueError for
        an invalid prompt before any prompt runs. A request that fails later has the finish reason
        "error"; the other requests continue."""
        self._check_open()
        check_switch("use_tqdm", use_tqdm)
        chosen = prompts_in(prompts)
        params = params_for(len(chosen), sampling_params, "prompts")
        priorities = priorities_for(len(chosen), priority, "prompts")
        checked = []
        for index, (prompt, own) in enumerate(zip(chosen, params, strict=True)):
            with naming(f"prompt {index}"):
                request = self.make_request(
                    prompt, own, cache_salt, priorities[index], adapter=adapter
                )
            checked.append(CheckedPrompt(request, prompt if isinstance(prompt, str) else None))
        return self._run(checked, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        *,
        cache_salt: str = "",
        adapter: str = "",
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of prompts, each a text or a list of token ids.
        Returns one output per prompt, in order. `BeamSearchParams` describes the parameters. Raises
        like `generate`."""
        self._check_open()
        check_switch("use_tqdm", use_tqdm)
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"a beam search takes BeamSearchParams, not {type_name(params)}")
        if params.beam_width > (most := self.config.scheduler.max_waiting_requests):
            raise ValueError(f"beam_width is {params.beam_width}, and {most} requests may wait")
        own = params_of_beams(params)
        checked = []
        for index, prompt in enumerate(prompts_in(prompts)):
            with naming(f"prompt {index}"):
                request = self.make_request(prompt, own, cache_salt, adapter=adapter)
            text = prompt if isinstance(prompt, str) else None
            checked.append(CheckedPrompt(request, text, beams=params))
        return [
            beam_search_output(answer, params, self.tokenizer)
            for answer in self._run(checked, use_tqdm)
        ]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several. Returns one output per
        conversation, in order. Messages are dicts as in /v1/chat/completions. If the model reads
        pictures, a part of a message may be {"type": "image", "image": a PIL image}.

        The model's chat template, or `chat_template`, makes the prompt; `chat_template_kwargs` are
        variables for the template. The template shows `tools`, dicts as in /v1/chat/completions, to
        the model; tool calls stay in the text of the answer. With `continue_final_message` the
        answer continues the last message; otherwise the answer is a new message, unless
        `add_generation_prompt` is False. If the model's reasoning marks are known, the reasoning is
        returned apart from the text, as `reasoning`. All other arguments are as in `generate`."""
        self._check_open()
        check_switch("use_tqdm", use_tqdm)
        from .api.openai.request.conversation import ChatOptions
        from .api.openai.response.tools import template_tools_of
        from .offline.chat_prompts import ChatPrompts

        conversations = conversations_in(messages)
        params = params_for(len(conversations), sampling_params, "conversations")
        priorities = priorities_for(len(conversations), priority, "conversations")
        tokenizer, longest = self._need_tokenizer(), self._client.ready.max_model_len - 1
        goes_on = continue_final_message
        options = ChatOptions(add_generation_prompt, goes_on, chat_template_kwargs)
        shown = template_tools_of(tools)
        prompts = ChatPrompts(self.config.model.path, tokenizer, chat_template)
        checked = []
        for index, (conversation, own) in enumerate(zip(conversations, params, strict=True)):
            with naming(f"conversation {index}"):
                prompt = self._loop.run(prompts.make_prompt(conversation, options, shown, longest))
                request = self.make_request(
                    prompt.token_ids,
                    own,
                    cache_salt,
                    priorities[index],
                    splits_thoughts=True,
                    adapter=adapter,
                    pictures=prompt.pictures,
                )
            text, marks = prompt.text, self.marks
            is_inside = None if marks is None else marks.is_open(text, goes_on=goes_on)
            checked.append(CheckedPrompt(request, text, is_inside))
        return self._run(checked, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        cache_salt: str = "",
        adapter: str = "",
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts, each a text or a list of token ids: hidden states,
        pooled by the option `pooling`, scaled to length 1 if `normalize`. Raises like `generate`;
        ValueError for `dimensions` that the model's config.json does not allow."""
        self._check_open()
        check_switch("use_tqdm", use_tqdm)
        check_switch("normalize", normalize)
        path, pooling = self.config.model.path, self.config.model.pooling
        Dimensions.load(path).check_asked_count(dimensions, self._client.ready.hidden_size)
        checked = []
        for index, prompt in enumerate(prompts_in(prompts)):
            with naming(f"prompt {index}"):
                request = self.make_request(prompt, EMBEDDING_PARAMS, cache_salt, adapter=adapter)
            text = prompt if isinstance(prompt, str) else None
            checked.append(CheckedPrompt(with_pooling(request, pooling), text))
        answers = self._run(checked, use_tqdm)
        return [
            EmbeddingRequestOutput.from_request_output(
                each, normalize=normalize, dimensions=dimensions
            )
            for each in answers
        ]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        adapter: str = "",
    ) -> Iterator[TextOutput]:
        """Continue one prompt and yield new text as it is generated. Closing the iterator early
        aborts the request. The call itself raises like `generate`."""
        params = sampling_params or SamplingParams()
        if isinstance(params, SamplingParams) and params.n != 1:
            raise ValueError(f"n must be 1 in a stream, got {params.n}; use generate")
        return self._stream(self.make_request(prompt, params, cache_salt, adapter=adapter))

    def open_session(
        self,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        adapter: str = "",
    ) -> PromptSession:
        """Open a session: a prompt sent in parts, each computed before the next part arrives. A
        session without a part for `session_idle_seconds` ends. Raises ValueError for parameters
        that sessions do not support."""
        params = sampling_params or SamplingParams()
        if isinstance(params, SamplingParams) and params.n != 1:
            raise ValueError(f"n must be 1 in a session, got {params.n}; use generate")
        self.make_request([0], params, cache_salt, adapter=adapter)  # raises for invalid parameters
        return PromptSession(self, params, cache_salt, adapter)

    @property
    def client(self) -> EngineClient:
        """The engine's client, for use on its own event loop only, through `wait_for`."""
        return self._client

    @property
    def max_prompt_tokens(self) -> int:
        """The largest number of prompt tokens that leaves room for one token of the answer."""
        return self._client.ready.max_model_len - 1

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of `client` on the client's event loop, and return its result. Raises
        EngineDead after `close`."""
        try:
            self._check_open()
        except EngineDead:
            work.close()
            raise
        return self._loop.run(work)

    def run_checked(self, prompts: Sequence[CheckedPrompt]) -> list[RequestOutput]:
        """Run requests made by `make_request`, and return their outputs in order."""
        return self._run(prompts, False)

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json; a missing parameter
        is as in `SamplingParams()`, the default of all other methods. Raises ConfigError for an
        invalid file."""
        found: dict[str, Any] = load_default_sampling(self.config.model.path)
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        return SamplingParams(**found)

    def reset_prefix_cache(self, reset_tiers: bool = False) -> None:
        """Empty the prefix cache of the pool, or with `reset_tiers` also all tiers. Raises
        ValueError, and changes nothing, while requests run."""
        self._check_open()
        scope = "all" if reset_tiers else "pool"
        self._loop.run(self._client.call("reset_prefix_cache", scope))

    def pause(self, which: str = "new") -> None:
        """Pause requests that have not run yet (`new`), or all requests (`all`), until `resume`.
        Paused requests keep their blocks, and calls such as `generate` block until `resume`. Raises
        ValueError for another value."""
        self._check_open()
        self._loop.run(self._client.call("pause", which))

    def resume(self) -> None:
        """Continue all requests after a `pause`; does nothing if the engine is not paused."""
        self._check_open()
        self._loop.run(self._client.call("resume"))

    def stats(self) -> dict[str, Any]:
        self._check_open()
        result: dict[str, Any] = self._loop.run(self._client.call("stats"))
        return result

    def close(self) -> None:
        """Shut the engine down, after the tiers have written their pending blocks. A second call
        does nothing, nor does a call in a forked child of the engine's process."""
        if self._closed or not self._loop.is_here:
            return
        self._closed = True
        atexit.unregister(self.close)
        seconds = self.config.offload.shutdown_seconds + _CLOSE_GRACE_SECONDS
        try:
            self._loop.run(self._client.close(seconds))
        finally:
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_client(
        self, in_process: bool, log_level: str, progress: Callable[[str], None] | None
    ) -> EngineClient:
        if in_process:
            tell_import(progress or logger.info)
            from .core.engine_core import EngineCore

            # The core is built in the caller's thread, so that an interrupt ends the start.
            core = EngineCore(self.config, progress=progress)
            return self._loop.run(_in_process_client(core))
        from .client.process_client import ProcessClient

        return self._loop.run(ProcessClient.start(self.config, log_level=log_level))

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str,
        priority: int = 0,
        *,
        splits_thoughts: bool = False,
        adapter: str = "",
        pictures: Sequence[Picture] = (),
    ) -> AddRequest:
        """Check a prompt, and make a request with a new id. Raises ValueError for invalid input."""
        self._check_open()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling parameters are SamplingParams, not {type_name(params)}")
        check_salt(cache_salt)
        self.adapters.check_name(adapter)
        ready = self._client.ready
        longest = ready.max_model_len - 1
        extras = None
        if isinstance(prompt, np.ndarray) and (prompt.ndim != 1 or prompt.dtype.kind == "f"):
            extras = embeds_extras(prompt, params, ready, longest)
            ids: Sequence[int] = [0] * len(prompt)
        elif isinstance(prompt, str):
            ids = self._need_tokenizer().encode(prompt, max_tokens=longest)
        elif isinstance(prompt, NO_LISTS) or not hasattr(prompt, "__len__"):
            raise ValueError(
                f"a prompt is a text or a list of token ids, not {type_name(prompt)}; put a single "
                "list of ids into a list"
            )
        else:
            ids = cast("Sequence[int]", prompt)
        packed = pack_token_ids(ids)
        if len(ids) == 0:
            raise ValueError("it is empty; give at least one token")
        if len(ids) > longest:
            raise ValueError(f"it has {len(ids)} tokens and at most {longest} fit; shorten it")
        if min(ids) < 0 or max(ids) >= ready.vocab_size:
            raise ValueError(
                f"token ids must be from 0 to {ready.vocab_size - 1}, and it holds "
                f"{min(ids) if min(ids) < 0 else max(ids)}"
            )
        params = with_spelt_bad_words(params, self.tokenizer)
        params = with_reasoning_marks(params, self.marks, are_split=splits_thoughts)
        OutputProcessor(self.tokenizer, params)  # raises for stop strings without a tokenizer
        self._check_params(params)
        name = f"llm-{next(self._ids)}"
        check_priority(priority, ready.takes_priority)
        check_routed_start(params.routed_experts_prompt_start, ready.tells_experts)
        if adapter or pictures:
            extras = msgspec.structs.replace(
                extras or NO_EXTRAS, adapter=adapter, pictures=list(pictures)
            )
        return AddRequest(
            name, packed, params, cache_salt=cache_salt, priority=priority, extras=extras
        )

    def _need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises ValueError if the model has none."""
        if self.tokenizer is None:
            raise ValueError(
                f"{self.config.model.path} holds no tokenizer.json; copy the model's there, "
                "or give prompts as lists of token ids"
            )
        return self.tokenizer

    def _run(self, prompts: Sequence[CheckedPrompt], use_tqdm: bool) -> list[RequestOutput]:
        """Run all choices of all prompts to their ends, and return the outputs."""
        tokenizer, most = self.tokenizer, self.config.scheduler.max_waiting_requests
        runner = PromptRunner(self._client, tokenizer, self.marks, max_at_once=most)
        answers = self._loop.run(runner.run(prompts, use_tqdm=use_tqdm))
        asking = [
            answer
            for prompt, answer in zip(prompts, answers, strict=True)
            if prompt.request.sampling_params.logprobs is not None
        ]
        if asking:
            runner.name_logprobs(asking)
        return answers

    def _stream(self, request: AddRequest) -> Iterator[TextOutput]:
        parts = generate_text(self._client, request, self.tokenizer)

        async def following() -> TextOutput | None:
            return await anext(parts, None)

        try:
            while (part := self._loop.run(following())) is not None:
                yield part
                self._check_open()
        finally:
            if not self._closed and self._loop.is_here:  # otherwise it ended with the engine
                self._loop.run(parts.aclose())

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM was closed; make a new one")
        if not self._loop.is_here:
            raise EngineDead(
                "this LLM belongs to the process that this one was forked from, and its threads "
                "are there; make an LLM in this process, or ask that one"
            )


async def _in_process_client(core: EngineCore) -> EngineClient:
    from .client.in_process import InProcessClient

    return InProcessClient(core)
