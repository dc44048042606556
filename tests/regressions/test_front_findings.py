# SPDX-License-Identifier: Apache-2.0
"""What users met at the front door and what was mended: names, tiers, fields, CORS, TLS.

Two servers run as processes: a plain one with tiers, a cache server that is not there among them,
and one with a certificate, a key and a page of another origin. Clients are those that people use.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from stratakv.engine.api.http.http_server import make_server
from stratakv.engine.api.http.tls_context import make_tls_context
from stratakv.engine.config.engine_options import EMBEDDED_MODEL
from stratakv.engine.config.server_options import ServerConfig
from stratakv.engine.llm import LLM
from stratakv.engine.request.sampling_params import SamplingParams

from ..nursery_site import nursery_client
from .refusals import refused

pytestmark = pytest.mark.regression

KEY = "a-key-for-the-front"
PAGE = "https://app.example.org"
TIERS = ["pool", "cpu", "ssd", "remote"]
READY = re.compile(r"StrataKV serves (?P<name>\S+) at (?P<url>https?://127\.0\.0\.1:\d+) ")
START_SECONDS = 60
FLAGS = [
    "--port", "0", "--num-blocks", "300", "--num-threads", "1", "--max-model-len", "1024",
    "--kv-offload-cpu-bytes", "8MiB", "--log-level", "warning",
]  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A server that runs, and what it said of itself."""

    url: str
    ready: str
    home: Path


@contextmanager
def serving(home: Path, *words: str) -> Iterator[Served]:
    """`stratakv serve` in `home`, where ./models/my-model is the embedded model."""
    shutil.copytree(EMBEDDED_MODEL, home / "models" / "my-model")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("STRATAKV_", "XDG_"))}
    with tempfile.TemporaryDirectory(prefix="stratakv-test-") as scratch:
        process = nursery_client.popen(
            [sys.executable, "-m", "stratakv.engine.cli.main", "serve", *words, *FLAGS],
            cwd=home,
            env=environment | {"HOME": str(home), "TMPDIR": scratch, "STRATAKV_API_KEY": KEY},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            found = READY.match(ready)
            assert found, f"no ready line: {ready!r}"
            yield Served(found["url"], ready, home)
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_SECONDS) == 0
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """No name, three tiers; nothing listens at the address of the last one."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    words = ["./models/my-model/", "--kv-offload", f"cpu,ssd,grpc://127.0.0.1:{port}"]
    home = tmp_path_factory.mktemp("plain")
    with serving(home, *words, "--kv-offload-ssd-bytes", "32MiB") as served:
        yield served


@pytest.fixture(scope="module")
def client(plain: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@dataclass(frozen=True)
class Authority:
    """Who signed the server's certificate, and a client's."""

    ca: trustme.CA
    folder: Path

    def context(self, *, with_certificate: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / "ca.pem")
        if with_certificate:
            context.load_cert_chain(self.folder / "client.pem")
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    folder, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    server, user = ca.issue_cert("127.0.0.1"), ca.issue_cert("user@example.org")
    server.private_key_pem.write_to_path(folder / "key.pem")
    for blob in server.cert_chain_pems:
        blob.write_to_path(folder / "cert.pem", append=True)
    user.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    return Authority(ca, folder)


@pytest.fixture(scope="module")
def guarded(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A name, TLS for clients with a certificate, a page of another origin, open metrics."""
    at = authority.folder
    with serving(
        tmp_path_factory.mktemp("guarded"), "models/my-model", "--served-model-name", "tiny",
        "--kv-offload", "cpu", "--metrics-without-key", "--allowed-origins", f'["{PAGE}"]',
        "--ssl-certfile", f"{at}/cert.pem", "--ssl-keyfile", f"{at}/key.pem",
        "--ssl-ca-certs", f"{at}/ca.pem", "--ssl-cert-reqs", "2",
    ) as served:  # fmt: skip
        yield served


@pytest.fixture(scope="module")
def web(guarded: Served, authority: Authority) -> Iterator[httpx.Client]:
    """Of the guarded server, with a certificate and without the key."""
    with httpx.Client(
        base_url=guarded.url, verify=authority.context(with_certificate=True), timeout=30
    ) as client:
        yield client


def by_tier(usage: Any) -> dict[str, int]:
    found: dict[str, int] = usage.prompt_tokens_details.model_extra["cached_tokens_by_tier"]
    return found


def sources(text: str, name: str) -> dict[str, float]:
    return {
        sample.labels["source"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


# U7


def test_u07_a_first_scrape_shows_the_tiers_that_are_configured(plain: Served) -> None:
    """Before any request, so this test comes first."""
    answer = httpx.get(f"{plain.url}/metrics", headers={"authorization": f"Bearer {KEY}"})
    of_cached = sources(answer.text, "vllm:prompt_tokens_cached_by_source_total")
    assert list(of_cached) == TIERS
    of_all = sources(answer.text, "vllm:prompt_tokens_by_source_total")
    assert set(of_all) == {*TIERS, "local_compute"}
    assert set(of_all.values()) == {0.0}


def test_u07_an_answer_shows_the_tiers_that_are_configured(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "my-model", "prompt": [5] * 64, "max_tokens": 2}
    details = [by_tier(client.completions.create(**ask).usage) for _ in range(2)]
    assert [list(each) for each in details] == [TIERS, TIERS]
    assert details[0] == dict.fromkeys(TIERS, 0)
    assert sum(details[1].values()) > 0 == details[1]["remote"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = client.completions.create(**ask, stream=True, stream_options=options)
    assert {tuple(by_tier(event.usage)) for event in events} == {tuple(TIERS)}


@pytest.mark.parametrize(
    ("options", "tiers"),
    [
        ({}, ["pool"]),
        ({"kv_offload": "cpu", "kv_offload_cpu_bytes": "8MiB"}, ["pool", "cpu"]),
    ],
    ids=["none", "cpu"],
)
def test_u07_the_python_api_shows_them_too(options: Mapping[str, str], tiers: list[str]) -> None:
    params = SamplingParams(max_tokens=1)
    with LLM(num_blocks=70, max_model_len=512, num_threads=1, **options) as llm:
        [output] = llm.generate([[5] * 40], params)
        assert output.cached_tokens_by_tier == dict.fromkeys(tiers, 0)
        first = next(llm.stream([5] * 40, params))
        assert list(first.cached_tokens_by_tier or {}) == tiers


# U8


def test_u08_a_model_without_a_name_answers_to_its_folder_and_its_path(
    plain: Served, client: openai.OpenAI
) -> None:
    full = str(plain.home / "models" / "my-model")
    for name in ("my-model", "models/my-model", "./models/my-model", "./models/my-model/", full):
        answer = client.completions.create(model=name, prompt=[5], max_tokens=1)
        assert answer.model == "my-model", name
    assert client.models.retrieve(full).id == "my-model"
    [listed] = client.models.list().data
    assert (listed.id, (listed.model_extra or {})["root"]) == ("my-model", "./models/my-model/")
    for name in ("other", "models", "/my-model", "./other/my-model"):
        with pytest.raises(openai.NotFoundError, match="use `my-model`"):
            client.completions.create(model=name, prompt=[5], max_tokens=1)


def test_u08_a_model_with_a_name_answers_to_that_alone(guarded: Served, web: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    [listed] = web.get("/v1/models", headers=headers).json()["data"]
    assert (listed["id"], listed["root"]) == ("tiny", "tiny"), "the path is nobody's concern"
    status = {
        name: web.get(f"/v1/models/{name}", headers=headers).status_code
        for name in ("tiny", "my-model", "models/my-model", f"{guarded.home}/models/my-model")
    }
    assert list(status.values()) == [200, 404, 404, 404]


# U9: fields, ready line, metrics


IGNORED: dict[str, Any] = {
    "metadata": {"customer": "7"}, "store": True, "service_tier": "flex", "user": "someone",
    "prompt_cache_key": "k", "safety_identifier": "s",
}  # fmt: skip


def test_u09_fields_for_records_are_taken(plain: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="my-model", messages=[{"role": "user", "content": "a"}], max_tokens=1,
        extra_body={"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "1h"}},
        **IGNORED,
    )  # fmt: skip
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    body = {"model": "my-model", "prompt": [5], "max_tokens": 1, **IGNORED}
    headers = {"authorization": f"Bearer {KEY}"}
    done = httpx.post(f"{plain.url}/v1/completions", json=body, headers=headers, timeout=30)
    assert done.status_code == 200, done.text
    with pytest.raises(openai.BadRequestError, match="does not support `verbosity`"):
        client.chat.completions.create(
            model="my-model", messages=[{"role": "user", "content": "a"}], verbosity="low"
        )


def test_u09_the_ready_line_says_where_the_tiers_are(plain: Served, guarded: Served) -> None:
    tiers = "cpu: 8 MiB, ssd: ~/.cache/stratakv/ssd (32 MiB), remote: grpc://127.0.0.1:"
    assert re.search(rf"tokens; {re.escape(tiers)}\d+ \(down\)\); Ctrl-C", plain.ready)
    assert "; cpu: 8 MiB); " in guarded.ready
    assert plain.ready.count("\n") == 1


def test_u09_disk_space_that_nobody_asked_for_is_announced(tmp_path: Path) -> None:
    """And before it is taken: these starts end at a device that is not there."""

    def said(*more: str) -> str:
        words = ["--port", "0", "--device", "cuda:99", "--kv-offload", "cpu,ssd", *more]
        done = nursery_client.run(
            [sys.executable, "-m", "stratakv.engine.cli.main", "serve", *words],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            timeout=START_SECONDS,
        )
        assert done.returncode == 2
        return done.stderr

    default = said()
    assert f"the ssd tier takes 20 GiB of the disk at once, in {tmp_path}/stratakv/ssd" in default
    assert "--kv-offload-ssd-bytes" in default and "`stratakv cache rm`" in default
    assert "at once" not in said("--kv-offload-ssd-bytes", "1GiB")
    assert not list(tmp_path.iterdir())


def test_u09_metrics_can_be_open(plain: Served, web: httpx.Client) -> None:
    open_routes = {path: web.get(path).status_code for path in ("/metrics", "/health", "/load")}
    assert open_routes == {"/metrics": 200, "/health": 200, "/load": 401}
    assert httpx.get(f"{plain.url}/metrics").status_code == 401, "unless that is asked for"


# U9: CORS and TLS


def preflight(client: httpx.Client, origin: str) -> httpx.Response:
    """What a browser asks before it sends a page's request."""
    return client.options(
        "/v1/chat/completions",
        headers={
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )


def test_u09_a_page_of_an_allowed_origin_may_use_the_server(web: httpx.Client) -> None:
    allowed = preflight(web, PAGE)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in allowed.headers
    for headers, status in (({}, 401), ({"authorization": f"Bearer {KEY}"}, 200)):
        answer = web.get("/v1/models", headers={"origin": PAGE, **headers})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
    stranger = preflight(web, "https://elsewhere.example.org")
    assert stranger.status_code == 400
    assert "access-control-allow-origin" not in stranger.headers


def test_u09_no_page_may_unless_it_is_allowed(plain: Served) -> None:
    with httpx.Client(base_url=plain.url) as client:
        refused = preflight(client, PAGE)
    assert refused.status_code >= 400
    assert not [name for name in refused.headers if name.startswith("access-control-")]


def test_u09_tls_with_the_openai_client(guarded: Served, authority: Authority) -> None:
    assert guarded.url.startswith("https://")
    web = httpx.Client(verify=authority.context(with_certificate=True))
    with openai.OpenAI(
        base_url=f"{guarded.url}/v1", api_key=KEY, http_client=web, max_retries=0
    ) as client:
        ask: dict[str, Any] = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 8}
        whole = client.completions.create(**ask, temperature=0).choices[0].text
        events = client.completions.create(**ask, temperature=0, stream=True)
        assert "".join(event.choices[0].text for event in events) == whole


def test_u09_tls_refuses_who_should_not_come_in(guarded: Served, authority: Authority) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(guarded.url.replace("https", "http") + "/health")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{guarded.url}/health", verify=authority.context(with_certificate=False))
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{guarded.url}/health", verify=ssl.create_default_context())


def test_u09_a_client_that_is_idle_does_not_hold_up_the_end(authority: Authority) -> None:
    """With TLS a connection closes when both sides say so, and an idle client says nothing."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("here")(scope, receive, send)

    async def life(client: httpx.Client) -> None:
        at = authority.folder
        tls = make_tls_context(
            ServerConfig(ssl_certfile=at / "cert.pem", ssl_keyfile=at / "key.pem")
        )
        with socket.create_server(("127.0.0.1", 0)) as sock:
            server = make_server(answer, log_level="error", shutdown_seconds=600, tls=tls)
            running = asyncio.ensure_future(server.serve([sock]))
            url = f"https://127.0.0.1:{sock.getsockname()[1]}/"
            assert (await asyncio.to_thread(client.get, url)).text == "here"
            server.should_exit = True
            await asyncio.wait_for(running, 20)  # asyncio gives up on such a client after 30

    with httpx.Client(verify=authority.context(with_certificate=False), timeout=20) as client:
        asyncio.run(life(client))


@pytest.fixture(scope="module")
def bad_files(authority: Authority) -> Path:
    """Beside the good ones: another key, one with a password, and what is none."""
    folder = authority.folder
    other = authority.ca.issue_cert("other.example.org")
    other.private_key_pem.write_to_path(folder / "other-key.pem")
    other.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    (folder / "sealed-key.pem").write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
        )
    )
    (folder / "text.pem").write_text("no PEM at all\n")
    return folder


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--ssl-certfile nowhere.pem", ["--ssl-certfile", "nowhere.pem cannot be read (No such"]),
        ("--ssl-certfile .", ["--ssl-certfile . is no ordinary file"]),
        ("--ssl-certfile text.pem", ["--ssl-certfile text.pem holds no certificate as PEM"]),
        ("--ssl-certfile cert.pem", ["cert.pem holds no private key", "with --ssl-keyfile"]),
        (
            "--ssl-certfile cert.pem --ssl-keyfile nowhere.pem",
            ["--ssl-keyfile nowhere.pem cannot be read"],
        ),
        (
            "--ssl-certfile cert.pem --ssl-keyfile text.pem",
            ["--ssl-keyfile text.pem holds no private key as PEM"],
        ),
        (
            "--ssl-certfile cert.pem --ssl-keyfile other-key.pem",
            ["--ssl-keyfile other-key.pem is not the key of", "--ssl-certfile cert.pem"],
        ),
        (
            "--ssl-certfile cert.pem --ssl-keyfile sealed-key.pem",
            ["sealed-key.pem holds a key that is encrypted", "openssl pkey"],
        ),
        ("--ssl-keyfile key.pem", ["--ssl-certfile is not", "there would be no TLS"]),
        ("--ssl-certfile both.pem --ssl-cert-reqs 2", ["who may have signed", "--ssl-ca-certs"]),
        (
            "--ssl-certfile both.pem --ssl-ca-certs ca.pem",
            ["--ssl-cert-reqs 0 asks for none", "--ssl-cert-reqs 2"],
        ),
        (
            "--ssl-certfile both.pem --ssl-ca-certs text.pem --ssl-cert-reqs 1",
            ["--ssl-ca-certs text.pem holds no certificate"],
        ),
        ("--ssl-cert-reqs 3", ["--ssl-cert-reqs takes a whole number from 0 to 2, not '3'"]),
        ("--allow-credentials", ["--allow-credentials", "--allowed-origins, which is not given"]),
        ("--allowed-methods get", ["--allowed-methods", "--allowed-origins"]),
        ("--allowed-origins * --allow-credentials", ["any page", "name the origins"]),
        (f"--allowed-origins {PAGE}/", ["no slash at the end", f"not '{PAGE}/'"]),
        ("--allowed-origins example.org", ["https://example.org", "not 'example.org'"]),
        ('--allowed-origins ["a', ["a list in JSON", "not '[\"a'"]),
        ("--allowed-origins []", ["one text or several, not '[]'"]),
        ("--allowed-origins * --allowed-headers a:b", ["--allowed-headers takes", "'a:b'"]),
    ],
)
def test_u09_files_and_origins_that_cannot_be_used_are_said_at_the_start(
    words: str,
    parts: list[str],
    bad_files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(bad_files)
    refused(["serve", "--port", "0", *words.split()], parts, capsys)
