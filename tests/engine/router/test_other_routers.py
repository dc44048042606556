# SPDX-License-Identifier: Apache-2.0
"""Routers of others in front of real nodes: answers are those of one node, prompts are handed over.

They are looked for in the folders that OTHER_ROUTERS lists, as PATH does:

    python -m venv /tmp/routers && /tmp/routers/bin/pip install vllm-router sglang-router
    OTHER_ROUTERS=/tmp/routers/bin:/usr/sbin pytest tests/engine/router/test_other_routers.py

What they send is replayed without them in tests/engine/api/test_router_bodies.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from ...free_ports import free_ports
from ...tiers.cache_server.rig import server_process
from .test_real_nodes import (
    NODE_FLAGS,
    WAIT_SECONDS,
    ask,
    complete,
    events_of,
    figure,
    started,
    wait_for,
)

pytestmark = pytest.mark.timeout(300)

PLACES = os.environ.get("OTHER_ROUTERS")
MODEL = "stratakv-embedded"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Nodes:
    """URLs. One node is alone, without tiers: what it answers is right."""

    prefill: str
    decode: list[str]
    alone: str


@dataclass(frozen=True)
class Kind:
    """A router and its mode. `words` makes its command line of the nodes, its port, another port
    and a folder."""

    name: str
    program: str
    words: Callable[[Nodes, int, int, Path], list[str]]
    hands_over: bool = False  # a prompt is computed on the prefill node alone
    fails_over: bool = False  # plain mode, and a node's requests go to another one
    takes_ids: bool = True  # prompts of token ids


@dataclass(frozen=True)
class Router:
    kind: Kind
    url: str


def _vllm_router(nodes: Nodes, port: int, other: int, _folder: Path) -> list[str]:
    return ["--worker-urls", *nodes.decode, *_common(port, other)]


def _vllm_router_apart(nodes: Nodes, port: int, other: int, _folder: Path) -> list[str]:
    return ["--vllm-pd-disaggregation", *_roles(nodes), *_common(port, other)]


def _sglang_router(nodes: Nodes, port: int, other: int, _folder: Path) -> list[str]:
    return ["launch", "--worker-urls", *nodes.decode, *_common(port, other)]


def _sglang_router_apart(nodes: Nodes, port: int, other: int, _folder: Path) -> list[str]:
    roles = _roles(nodes)
    roles.insert(2, "8998")  # a bootstrap port, which nobody connects to
    return ["launch", "--pd-disaggregation", *roles, *_common(port, other)]


def _roles(nodes: Nodes) -> list[str]:
    words = ["--prefill", nodes.prefill]
    for url in nodes.decode:
        words += ["--decode", url]
    return words


def _common(port: int, other: int) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(other)]
    return [*where, "--policy", "round_robin", "--log-level", "error"]


NGINX = """
daemon off; error_log stderr; pid {folder}/pid; worker_processes 1;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 16m;
  upstream nodes {{ {servers} }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://nodes;
      proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
      proxy_next_upstream error timeout non_idempotent;
    }}
  }}
}}
"""


def _nginx(nodes: Nodes, port: int, _other: int, folder: Path) -> list[str]:
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in nodes.decode)
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, port=port, servers=servers))
    return ["-p", str(folder), "-e", "stderr", "-c", str(file)]


KINDS = [
    Kind("vllm-router", "vllm-router", _vllm_router, fails_over=True),
    Kind("vllm-router-pd", "vllm-router", _vllm_router_apart, hands_over=True),
    Kind("sglang-router", "sglang-router", _sglang_router, fails_over=True, takes_ids=False),
    Kind("sglang-router-pd", "sglang-router", _sglang_router_apart, takes_ids=False),
    Kind("nginx", "nginx", _nginx, fails_over=True),
]


@contextmanager
def running(kind: Kind, nodes: Nodes) -> Iterator[Router]:
    """The router, once a request has come through it. Skips the test where it is not installed."""
    program = shutil.which(kind.program, path=PLACES) if PLACES else None
    if program is None:
        pytest.skip(f"OTHER_ROUTERS={PLACES or ''} names no folder that has {kind.program}")
    port, other = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="stratakv-test-") as folder:
        words = [program, *kind.words(nodes, port, other, Path(folder))]
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
            router = Router(kind, f"http://127.0.0.1:{port}")
            try:
                wait_for(lambda: _answers(router, process, log.name), f"{words} answers")
                yield router
            finally:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)


def _answers(router: Router, process: subprocess.Popen[bytes], log: str) -> bool:
    assert process.poll() is None, Path(log).read_text()[-2000:]
    try:
        complete(router.url, {"model": MODEL, "prompt": "a fox", "max_tokens": 1})
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    if PLACES is None:
        pytest.skip("OTHER_ROUTERS names no folders with routers; see this file's head")
    nursery = request.getfixturevalue("worker_nursery")
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="stratakv-test-"))
        cache = stack.enter_context(server_process("--cpu-bytes", "256MiB"))
        shared = ("--kv-offload", f"cpu,grpc://{cache.address}")
        urls = [
            stack.enter_context(started(nursery, scratch, "serve", *NODE_FLAGS, *words))[1]
            for words in (
                ("--role", "prefill", *shared),
                ("--role", "decode", *shared),
                ("--role", "decode", *shared),
                ("--kv-offload", "cpu"),
            )
        ]
        yield Nodes(urls[0], urls[1:3], urls[3])


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def router(request: pytest.FixtureRequest, nodes: Nodes) -> Iterator[Router]:
    with running(request.param, nodes) as it:
        yield it


def prompt_of(name: str, sentences: int) -> str:
    return f"{name}. " + "Once upon a time there was a fox, and it ran. " * sentences


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": prompt_of("one", 40)}),
    (COMPLETIONS, {"prompt": prompt_of("one", 40), "logprobs": 2, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": prompt_of("one", 40), "n": 2, "temperature": 0.9, "seed": 7}),
    (COMPLETIONS, {"prompt": prompt_of("two", 40), "stop": ["t"], "max_tokens": 30}),
    (COMPLETIONS, {"prompt": [prompt_of("three", 20), "A fox"], "echo": True}),
    (COMPLETIONS, {"prompt": prompt_of("four", 10), "min_tokens": 3, "stop_token_ids": [3114]}),
    (COMPLETIONS, {"prompt": [7 + i % 90 for i in range(400)]}),
    (CHATS, {"messages": [{"role": "user", "content": prompt_of("five", 30)}]}),
    (
        CHATS,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": prompt_of("six", 30)}]},
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": "Why?"},
            ],
            "n": 2, "temperature": 0.8, "seed": 3, "logprobs": True, "top_logprobs": 2,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_those_of_one_node(
    router: Router, nodes: Nodes, path: str, body: dict[str, Any]
) -> None:
    body = {"model": MODEL, "temperature": 0, "max_tokens": 6, **body}
    if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], int):
        if not router.kind.takes_ids:
            with pytest.raises(urllib.error.HTTPError) as refused:
                complete(router.url, body, path)
            assert refused.value.code == 422, "it takes texts only"
            return
    right = complete(nodes.alone, body, path)["choices"]
    for _ in range(2):
        assert rounded(complete(router.url, body, path)["choices"]) == rounded(right)
    chunks = events_of(ask(router.url, path, {**body, "stream": True}))
    for choice in right:
        parts = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert "".join(text_of(part) for part in parts) == text
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def text_of(part: dict[str, Any]) -> str:
    return str(part["text"] if "text" in part else part["delta"].get("content") or "")


def rounded(value: Any) -> Any:
    """Numbers that differ in the last digits by how a prompt was computed are equal."""
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def test_the_openai_client(router: Router, nodes: Nodes) -> None:
    messages: Any = [{"role": "user", "content": prompt_of("seven", 30)}]

    def said(url: str) -> tuple[str, str | None, int]:
        web = openai.DefaultHttpxClient(verify=False)
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, http_client=web
        ) as client:
            (model,) = {each.id for each in client.models.list()}
            assert model == MODEL
            chunks = client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_completion_tokens=8,
                stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            text, tokens = "", 0
            for chunk in chunks:
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
            whole = client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_completion_tokens=8
            )
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model=model, messages=messages, top_p=7)
            return text, whole.choices[0].message.content, tokens

    text, whole, tokens = said(router.url)
    assert text == whole and tokens == 8
    assert (text, whole, tokens) == said(nodes.alone)


def test_a_long_prompt(router: Router, nodes: Nodes) -> None:
    """3,600 tokens; where the router hands over, all of them are computed once."""
    body = {
        "model": MODEL, "prompt": prompt_of(f"long {router.kind.name}", 211), "temperature": 0,
        "max_tokens": 6,
    }  # fmt: skip
    right = complete(nodes.alone, body)
    count = right["usage"]["prompt_tokens"]
    assert 3500 < count < 4000
    before = computed(nodes.prefill), sum(map(computed, nodes.decode))
    assert complete(router.url, body)["choices"] == right["choices"]
    after = computed(nodes.prefill), sum(map(computed, nodes.decode))
    if router.kind.hands_over:
        assert (after[0] - before[0], after[1] - before[1]) == (count, 0)
        handed = figure(nodes.prefill, "stratakv:handed_over_incomplete_total")
        assert handed == 0, "the cache server has every block"


def computed(url: str) -> float:
    """Prompt tokens that the node computed itself."""
    return figure(url, "vllm:prompt_tokens_by_source_total", '"local_compute"')


def test_a_client_that_leaves_a_stream(router: Router, nodes: Nodes) -> None:
    every = [nodes.prefill, *nodes.decode]
    before = sum(figure(url, "vllm:generation_tokens_total") for url in every)
    body = {
        "model": MODEL, "prompt": "A fox", "max_tokens": 4000, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        router.url + COMPLETIONS, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        assert answer.readline().startswith(b"data: ")
    wait_for(lambda: not any(running_at(url) for url in every), "its requests end")
    after = sum(figure(url, "vllm:generation_tokens_total") for url in every)
    assert after - before < 4000, "nobody made the whole answer"


def running_at(url: str) -> float:
    return figure(url, "vllm:num_requests_running") + figure(url, "vllm:num_requests_waiting")


@pytest.mark.parametrize("kind", [k for k in KINDS if k.fails_over], ids=lambda kind: kind.name)
def test_a_node_that_is_killed(
    kind: Kind, nodes: Nodes, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    nursery = request.getfixturevalue("worker_nursery")
    body = {"model": MODEL, "prompt": prompt_of("eight", 5), "temperature": 0, "max_tokens": 6}
    right = complete(nodes.alone, body)["choices"]
    words = ("serve", *NODE_FLAGS, "--kv-offload", "cpu")
    with ExitStack() as stack:
        process, url = stack.enter_context(started(nursery, str(tmp_path), *words))
        pair = Nodes(nodes.prefill, [nodes.decode[0], url], nodes.alone)
        router = stack.enter_context(running(kind, pair))
        wait_for(
            lambda: (
                bool(complete(router.url, body)) and figure(url, "vllm:request_success_total") > 0
            ),
            "it has its share",
        )
        process.kill()
        process.wait(WAIT_SECONDS)
        for _ in range(6):
            assert complete(router.url, body)["choices"] == right
