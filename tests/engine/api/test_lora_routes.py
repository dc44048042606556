# SPDX-License-Identifier: Apache-2.0
"""Adapters over HTTP: named as models, loaded from one folder, unloaded while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stratakv.engine.api import served_adapters
from stratakv.engine.api.api_settings import ApiSettings
from stratakv.engine.config.lora_config import LoraConfig, LoraModule

from ...threads import WAIT_SECONDS
from ..written_adapters import write_adapter
from .conftest import MODEL_NAME, LiveServer

KEY = "the key"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = list(range(7, 47))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """A --lora-dir with adapters, and with much that is none."""
    path = tmp_path_factory.mktemp("adapters")
    base = path / "lora"
    for seed, name in enumerate(("a", "b", "deep/er/c")):
        write_adapter(base / name, model_path, seed)
    write_adapter(base / "rank", model_path, rank=64)
    write_adapter(path / "outside", model_path, 5)
    (base / "link out").symlink_to(path / "outside")
    (base / "link in").symlink_to(base / "b")
    (base / "loop").symlink_to(base / "loop")
    (base / "file").write_text("no folder")
    (base / "empty").mkdir()
    shutil.copytree(base / "a", base / "linked weights")
    (base / "linked weights" / "adapter_model.safetensors").unlink()
    (base / "linked weights" / "adapter_model.safetensors").symlink_to(
        path / "outside" / "adapter_model.safetensors"
    )
    shutil.copytree(base / "a", base / "pipe")
    (base / "pipe" / "adapter_model.safetensors").unlink()
    os.mkfifo(base / "pipe" / "adapter_model.safetensors")
    return base


@pytest.fixture(scope="module")
def live(model_path: Path, folder: Path) -> Iterator[LiveServer]:
    lora = LoraConfig(modules=(LoraModule("first", folder / "a"),), folder=folder, max_loaded=4)
    server = LiveServer(
        model_path, ApiSettings(enable_dev_routes=True, api_key=KEY, lora_dir=folder), lora=lora
    )
    yield server
    server.stop()


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    """A client with the key, before and behind which the first adapter alone is loaded."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=live.url, timeout=30, verify=False, headers=headers) as client:
        yield client
        for name in names(client)[1:]:
            if name != "first":
                unload(client, name)


def load(http: httpx.Client, name: str, path: str, **more: Any) -> httpx.Response:
    return http.post(LOAD, json={"lora_name": name, "lora_path": path, **more})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post(UNLOAD, json={"lora_name": name})


def names(http: httpx.Client) -> list[str]:
    return [each["id"] for each in http.get("/v1/models").json()["data"]]


def ask(http: httpx.Client, model: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    response = http.post("/v1/completions", json={"model": model, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def tokens(http: httpx.Client, model: str, **more: Any) -> list[int]:
    choice = ask(http, model, return_token_ids=True, **more)["choices"][0]
    return list(choice["token_ids"])


def held(live: LiveServer) -> set[str]:
    """The fingerprints of the adapters that the worker has."""
    return {each.hex() for each in live.core.executor.runner.adapters._loaded}  # type: ignore[attr-defined]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def refused(response: httpx.Response, status: int, *said: str) -> None:
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert all(each in message for each in said), message


def test_a_request_that_races_with_an_unload_is_not_found(
    http: httpx.Client, live: LiveServer
) -> None:
    """The front has checked the name when the core unloads the adapter."""
    assert load(http, "x", "a").status_code == 200
    live.run(live.client.call("unload_adapter", '{"name": "x"}'))
    for more in ({}, {"n": 2}, {"stream": True}):
        answer = http.post("/v1/completions", json={"model": "x", "prompt": PROMPT, **more})
        refused(answer, 404, "the adapter x is not loaded")
        assert answer.json()["error"]["code"] == "model_not_found"


def test_an_adapter_is_loaded_listed_named_and_unloaded(
    http: httpx.Client, live: LiveServer, folder: Path
) -> None:
    base, first = tokens(http, MODEL_NAME), tokens(http, "first")
    refused(http.post("/v1/completions", json={"model": "b", "prompt": "x"}), 404, "`b`")
    loaded = load(http, "b", "b").json()
    assert loaded["name"] == "b"
    assert loaded["rank"] == 4
    assert names(http) == [MODEL_NAME, "first", "b"]
    card = http.get("/v1/models/b").json()
    assert (card["id"], card["parent"], card["root"]) == ("b", MODEL_NAME, str(folder / "b"))
    assert card["fingerprint"] == loaded["fingerprint"]
    assert card["fingerprint"] in held(live)
    other = tokens(http, "b")
    assert len({tuple(each) for each in (base, first, other)}) == 3
    assert unload(http, "b").json() == {"unloaded": "b"}
    assert names(http) == [MODEL_NAME, "first"]
    for response in (http.get("/v1/models/b"), unload(http, "b"),
                     http.post("/v1/completions", json={"model": "b", "prompt": "x"})):  # fmt: skip
        refused(response, 404, "b")
    wait_for(lambda: card["fingerprint"] not in held(live))


def test_every_route_answers_with_the_name_of_the_adapter(
    http: httpx.Client, live: LiveServer
) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/embeddings", {"input": PROMPT}),
    ]
    for route, body in asked:
        answers = {}
        for model in (MODEL_NAME, "first"):
            tried = {**body, "model": model}
            if "embeddings" not in route:
                tried |= {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
            response = http.post(route, json=tried)
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["model"] == model
            answers[model] = json.dumps(answer.get("choices") or answer["data"])
            refused(http.post(route, json={**tried, "model": "none"}), 404, "`none`")
            if "embeddings" in route:
                continue
            with http.stream("POST", route, json={**tried, "stream": True}) as stream:
                lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
            assert lines
            assert {json.loads(line)["model"] for line in lines} == {model}
        assert answers[MODEL_NAME] != answers["first"]
    counted = [http.post("/tokenize", json={"model": model, "prompt": "hello"}).json()
               for model in (MODEL_NAME, "first")]  # fmt: skip
    assert counted[0] == counted[1]
    refused(http.post("/tokenize", json={"model": "none", "prompt": "hello"}), 404, "`none`")
    web = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, http_client=web) as official:
        assert [each.id for each in official.models.list()] == [MODEL_NAME, "first"]
        made = official.completions.create(model="first", prompt=PROMPT, n=2, max_tokens=3)
        assert (made.model, len(made.choices)) == ("first", 2)


@pytest.mark.parametrize(
    ("name", "path", "said"),
    [
        ("x", "missing", "is no folder in the server's --lora-dir"),
        ("x", "..", "is no folder"),
        ("x", ".", "is no folder"),
        ("x", "", "is no folder"),
        ("x", "../outside", "is no folder"),
        ("x", "a/../../outside", "is no folder"),
        ("x", "/etc", "is no folder"),
        ("x", "{outside}", "is no folder"),
        ("x", "link out", "is no folder"),
        ("x", "loop", "is no folder"),
        ("x", "file", "is no folder"),
        ("x", "a/adapter_config.json", "is no folder"),
        ("x", "nul\0", "is no folder"),
        ("x", "a" * 5000, "is no folder"),
        ("x", "linked weights", "has links to files outside"),
        ("x", "empty", "adapter_config.json is missing"),
        ("x", "pipe", "adapter_model.safetensors"),
        ("x", "rank", "has rank 64 and --max-lora-rank is 16"),
        (MODEL_NAME, "a", "is the name of the model itself"),
        ("{model}", "a", "is the name of the model itself"),
        ("{model}/../{folder}/.", "a", "is the name of the model itself"),
        ("first", "b", "an adapter first is loaded; unload it before, or replace it"),
        ("", "a", "lora_name takes a text that is not empty"),
        ("x\n", "a", "control characters"),
        ("x,y", "a", "without `,` and `=`"),
        (" x", "a", "printable characters without spaces around them, not ' x'"),
        ("x ", "a", "printable characters without spaces around them"),
        ("x\u202ey", "a", "printable characters without spaces around them, not 'x\\u202ey'"),
        ("x" * 257, "a", "up to 256 characters"),
    ],
)
def test_loads_that_cannot_be_are_refused(
    http: httpx.Client, folder: Path, model_path: Path, name: str, path: str, said: str
) -> None:
    path = path.replace("{outside}", str(folder.parent / "outside"))
    name = name.replace("{model}", str(model_path)).replace("{folder}", model_path.name)
    refused(load(http, name, path), 400, said)
    assert names(http) == [MODEL_NAME, "first"]


def test_folders_may_be_named_in_other_ways(http: httpx.Client, folder: Path) -> None:
    for path in (str(folder / "b"), "./b/", "a/../b", "link in", "deep/er/c"):
        assert load(http, "x", path, load_inplace=True, lora_int_id=3).status_code == 200
    refused(http.post(LOAD, json={"lora_name": "y"}), 400, "lora_path")
    refused(load(http, "y", "a", more=1), 400, "more")
    assert load(http, "y", "a").status_code == 200
    assert load(http, "z", "a").status_code == 200
    answers = [load(http, "one too many", "a"), load(http, "z", "a"), load(http, "q", "empty")]
    refused(answers[0], 400, "--max-cpu-loras is 4")
    faults = [answer.json()["error"] for answer in answers]
    assert [(each["param"], each["code"]) for each in faults] == [
        ("lora_name", "too_many_adapters"), ("lora_name", "name_in_use"),
        ("lora_name", "too_many_adapters"),
    ]  # fmt: skip
    assert unload(http, "z").status_code == 200
    fault = load(http, "q", "empty").json()["error"]
    assert (fault["param"], fault["code"]) == ("lora_path", "invalid_adapter")


def test_the_key_is_asked_for(live: LiveServer) -> None:
    with httpx.Client(base_url=live.url, verify=False) as bare:
        assert load(bare, "x", "b").status_code == unload(bare, "first").status_code == 401


def test_without_a_folder_there_are_no_routes(server: LiveServer) -> None:
    with httpx.Client(base_url=server.url, verify=False) as client:
        for response in (load(client, "x", "b"), unload(client, "x")):
            refused(response, 404, "start the server with --lora-dir FOLDER")


class SlowLoads:
    """Holds loads up until a test lets them go on."""

    def __init__(self, live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self._read = live.core.executor.read_adapter
        monkeypatch.setattr(live.core.executor, "read_adapter", self._slow)

    def begin(self, pool: ThreadPoolExecutor, *args: Any, **options: Any) -> Future[httpx.Response]:
        """Begin a load in a thread, and wait until the engine reads the adapter."""
        future = pool.submit(load, *args, **options)
        assert self.begun.wait(WAIT_SECONDS)
        return future

    def _slow(self, path: Path) -> Any:
        self.begun.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        return self._read(path)


def test_two_loads_of_one_name_at_once(
    http: httpx.Client, live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLoads(live, monkeypatch)
    with ThreadPoolExecutor() as pool:
        first = slow.begin(pool, http, "x", "b")
        refused(load(http, "x", "a", load_inplace=True), 400, "is being loaded; wait for that")
        refused(unload(http, "x"), 404, "x")
        assert tokens(http, "first"), "requests go on"
        slow.may_go_on.set()
        assert first.result().status_code == 200
    assert names(http) == [MODEL_NAME, "first", "x"]


def test_a_client_that_leaves_during_a_load(
    http: httpx.Client, live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list follows the core all the same."""
    slow = SlowLoads(live, monkeypatch)

    async def leave() -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=live.url, verify=False, headers=headers) as client:
            body = {"lora_name": "x", "lora_path": "b"}
            task = asyncio.create_task(client.post(LOAD, json=body))
            assert await asyncio.to_thread(slow.begun.wait, WAIT_SECONDS)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    slow.may_go_on.set()
    wait_for(lambda: "x" in names(http))
    assert tokens(http, "x") != tokens(http, "first")


@pytest.mark.parametrize("name", ["x", "first"])
def test_a_load_that_lasts_too_long_for_its_client(
    http: httpx.Client, live: LiveServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The list follows the core all the same."""
    before = http.get("/v1/models/first").json()["fingerprint"]
    slow = SlowLoads(live, monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(served_adapters, "LOAD_SECONDS", 0.05)
        answer = load(http, name, "b", load_inplace=True)
    refused(answer, 504, f"the adapter {name} is not loaded after 0.05 s; its load continues")
    assert http.get("/v1/models/first").json()["fingerprint"] == before
    refused(load(http, name, "b", load_inplace=True), 400, "is being loaded")
    slow.may_go_on.set()
    wait_for(lambda: name in names(http))
    wait_for(lambda: http.get(f"/v1/models/{name}").json()["fingerprint"] != before)
    assert http.get(f"/v1/models/{name}").json()["fingerprint"] in held(live)
    assert load(http, "first", "a", load_inplace=True).status_code == 200


def test_a_load_that_the_shutdown_ends(
    http: httpx.Client, live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLoads(live, monkeypatch)
    with ThreadPoolExecutor() as pool:
        first = slow.begin(pool, http, "x", "b")
        live.loop.call_soon_threadsafe(live.app.state.in_flight.abort_all)
        try:
            refused(first.result(WAIT_SECONDS), 503, "the server is shutting down")
        finally:
            slow.may_go_on.set()
            live.app.state.in_flight._ended = None
    wait_for(lambda: "x" in names(http))


@pytest.mark.parametrize("how", ["unload", "replace", "delete"])
def test_a_request_that_runs_keeps_its_adapter(
    http: httpx.Client, live: LiveServer, folder: Path, how: str
) -> None:
    old = load(http, "x", "a").json()["fingerprint"]
    unload(http, "first")  # which is the same
    many = 400
    expected = tokens(http, "x", max_tokens=many, cache_salt="before")
    body = {"model": "x", "prompt": PROMPT, "max_tokens": many, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True}  # fmt: skip
    said: list[int] = []
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines()
                 if line.startswith("data: {"))  # fmt: skip
        said += next(lines)["choices"][0]["token_ids"]
        assert live.run(live.client.call("stats"))["adapters"]["running"] == {"x": 1}
        if how == "unload":
            unload(http, "x")
            refused(http.post("/v1/completions", json={**body, "stream": False}), 404, "`x`")
        elif how == "replace":
            assert load(http, "x", "b", load_inplace=True).status_code == 200
            new = tokens(http, "x")
        else:
            shutil.move(folder / "a", folder / "moved")
        assert live.run(live.client.call("stats"))["adapters"]["running"] == {"x": 1}
        assert old in held(live)
        for line in lines:
            said += line["choices"][0]["token_ids"] if line["choices"] else []
    if how == "delete":
        assert tokens(http, "x") == expected[:8]
        refused(load(http, "y", "a"), 400, "is no folder")
        shutil.move(folder / "moved", folder / "a")
        unload(http, "x")
    assert said == expected
    wait_for(lambda: old not in held(live))
    assert load(http, "first", "a").status_code == 200
    if how == "replace":
        answer = ask(http, "x", return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == new != expected[:8]
        assert tokens(http, "first") == expected[:8]


def test_a_new_adapter_of_a_name_finds_no_blocks_of_the_old_one(http: httpx.Client) -> None:
    load(http, "x", "b")
    long = [5, *PROMPT, *PROMPT]

    def cached() -> int:
        usage = ask(http, "x", prompt=long)["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    counts = [cached(), cached()]
    load(http, "x", "deep/er/c", load_inplace=True)
    counts += [cached(), cached()]
    load(http, "x", "b", load_inplace=True)
    counts.append(cached())
    assert counts == [0, 80, 0, 80, 80]


def test_the_metrics_have_each_adapter(http: httpx.Client, live: LiveServer) -> None:
    body = {"model": "first", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True,
            "stream": True}  # fmt: skip
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        text = http.get("/metrics").text
        assert list(lines)
    found = {
        family.name: family.samples
        for family in text_string_to_metric_families(text)
        if "lora" in family.name
    }
    [info] = found["vllm:lora_requests_info"]
    labels = [info.labels[f"{each}_lora_adapters"] for each in ("running", "waiting")]
    assert (labels, info.labels["max_lora"]) == (["first", ""], "4")
    counts = {each.labels["state"]: each.value for each in found["stratakv:lora_requests"]}
    assert counts == {"running": 1, "waiting": 0}
