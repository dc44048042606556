# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama, and a real server over it: uvicorn on a socket, the engine in its thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.api.app import create_app
from stratakv.engine.api.chat_template import ChatTemplate
from stratakv.engine.api.http.http_server import make_server
from stratakv.engine.client.in_process import InProcessClient
from stratakv.engine.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from stratakv.engine.config.lora_config import LoraConfig
from stratakv.engine.config.offload_config import OffloadConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.sampling.processor_loading import make_params_check
from stratakv.engine.text.reasoning import find_marks
from stratakv.engine.text.tokenizer import Tokenizer

from ...offload_config import offload_config
from ...threads import WAIT_SECONDS

T = TypeVar("T")

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 320
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TEXT = ["the quick brown fox jumps over the lazy dog", "user assistant system hello world"] * 4


class LiveServer:
    """An engine and its HTTP server in a thread with an event loop of its own."""

    def __init__(
        self,
        model_path: Path,
        settings: ApiSettings | None = None,
        offload: OffloadConfig | None = None,
        default_sampling: Mapping[str, float | int] | None = None,
        has_tokenizer: bool = True,
        role: str = "both",
        marks: tuple[str, str] = ("", ""),
        logits_processors: tuple[str, ...] = (),
        tool_call_parser: str = "",
        policy: str = "fcfs",
        chat_template: Path | None = None,
        tells_experts: bool = False,
        lora: LoraConfig | None = None,
        dtype: str = "float32",
    ) -> None:
        self._dtype = dtype
        self._lora = lora or LoraConfig()
        self._tells_experts = tells_experts
        self._chat_template = chat_template
        self._policy = policy
        self._tool_call_parser = tool_call_parser
        self._role = role
        self._logits_processors = logits_processors
        self._tokenizer = Tokenizer.load(model_path) if has_tokenizer else None
        self._marks = find_marks(self._tokenizer, *marks)
        self._default_sampling = default_sampling or {}
        self._model_path = model_path
        self._offload = offload or offload_config()
        self._settings = settings or ApiSettings()
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._sock.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._ready = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()
        assert self._ready.wait(100)
        if self.error is not None:
            raise self.error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def stats(self) -> dict[str, Any]:
        return dict(self.run(self.client.call("stats"))["scheduler"])

    def stop(self) -> None:
        """Begin the graceful shutdown, and wait for its end."""
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.error = error
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        torch.set_num_threads(1)
        config = _engine_config(self._model_path, self._offload, self._role)
        scheduler = replace(config.scheduler, policy=self._policy)
        config = replace(
            config,
            scheduler=scheduler,
            logits_processors=self._logits_processors,
            model=replace(
                config.model, dtype=self._dtype, enable_return_routed_experts=self._tells_experts
            ),
            lora=self._lora,
        )
        self.core = EngineCore(config)
        self.client = InProcessClient(self.core)
        template = None
        if self._chat_template is not None and self._tokenizer is not None:
            template = ChatTemplate.read(self._chat_template, self._tokenizer)
        self.app = create_app(
            self.client,
            model_name=MODEL_NAME,
            model_path=self._model_path,
            tokenizer=self._tokenizer,
            settings=self._settings,
            default_sampling=self._default_sampling,
            marks=self._marks,
            check_params=make_params_check(self._logits_processors),
            tool_call_parser=self._tool_call_parser,
            chat_template=template,
        )
        self.server = make_server(self.app, log_level="warning", shutdown_seconds=1)
        self.loop.call_soon(self._ready.set)
        try:
            await self.server.serve(sockets=[self._sock])
        finally:
            await self.client.close(10)


def _engine_config(model_path: Path, offload: OffloadConfig, role: str) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=model_path, served_name=MODEL_NAME, dtype="float32"),
        cache=CacheConfig(num_blocks=600),
        scheduler=SchedulerConfig(max_num_batched_tokens=1024, max_num_seqs=64),
        offload=offload,
        num_threads=1,
        role=role,
        structured_outputs_backend="guidance",  # the other one takes seconds to import
    )


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with random weights, a byte-level tokenizer and a template."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    _write_weights(directory)
    _write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[LiveServer]:
    """Shared by the tests of a module that leave no trace behind. Not by all modules: tests in
    virtual time would then change the clock under a server that runs."""
    live = LiveServer(model_path, ApiSettings(enable_dev_routes=True))
    yield live
    live.stop()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The client library that people use, of the shared server. It repeats nothing by itself."""
    web = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30, http_client=web
    ) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """Of the shared server. Without TLS, since loading certificates takes longer than a test."""
    with httpx.Client(base_url=server.url, timeout=30, verify=False) as client:
        yield client


def _write_weights(directory: Path) -> None:
    hidden, inner, layers, heads, kv_heads = 32, 64, 2, 4, 2
    head_dim = hidden // heads
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (hidden, hidden),
            f"{name}.self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{name}.self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, hidden),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
        }
    random = np.random.default_rng(20260)
    weights = {
        name: random.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 2
        else np.ones(shape, np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "vocab_size": VOCAB_SIZE, "bos_token_id": 0,
        "eos_token_id": 1, "torch_dtype": "float32", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def _write_tokenizer(directory: Path) -> None:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(_TEXT, trainer)
    fast.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def until(condition: Callable[[], bool]) -> bool:
    """Wait for it to come true; whether it did."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
