# SPDX-License-Identifier: Apache-2.0
"""`stratakv route` as a process, what it refuses, and what it does without."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stratakv.engine.cli.main import main
from stratakv.engine.router.router import Router
from stratakv.engine.router.router_metrics import OUTCOMES
from stratakv.engine.router.router_settings import read_node

from .fake_node import FakeNode, Fault
from .rig import Exchange, check, make_config, until

SHORT = "a short prompt"
READY = re.compile(
    r"StrataKV routes at http://127\.0\.0\.1:(\d+) to 0 prefill and 1 decode nodes \(1 up\); "
)
ENGINE_PACKAGES = ("torch", "numpy", "fastapi", "tokenizers", "safetensors", "zmq", "jinja2",
                   "pydantic", "triton", "cupy")  # fmt: skip
ENGINE_FOLDERS = ("engine.scheduler", "engine.worker", "engine.core", "engine.models", "connector")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "there is no decode node"),
        (["--prefill", "http://a:1"], "there is no decode node"),
        (["--decode", "a:1"], "takes the URL of a node"),
        (["--decode", "http://a:1", "--decode", "http://a:1/"], "was given before"),
        (["--decode", "http://a:1", "--prefill", "http://a:1"], "was given before"),
        (["--decode", "http://a:1", "--health-seconds", "0"], "--health-seconds takes seconds"),
        (["--decode", "http://a:1", "--retries", "-1"], "--retries"),
        (["--decode", "http://a:1", "--tenant-header", "a b"], "--tenant-header takes the name"),
        (["--decode", "http://a:1", "--tenant-header", "Host"], "--tenant-header takes the name"),
        (["--decode", "http://a:1", "--kv-transfer-params", "yes"], "--kv-transfer-params"),
        (["--decode", "http://a:1", "--admin-key-file", "/nowhere"], "--admin-key-file /nowhere"),
        (["--decode", "http://a:1", "--node-ca-file", "/nowhere"], "all are http"),
        (["--decode", "https://a:1", "--node-ca-file", "/nowhere"], "holds no certificates"),
        (["--decode", "http://a:1", "--host", "203.0.113.1"], "no address of this machine"),
        (["--decod", "http://a:1"], "--decode"),
    ],
)
def test_bad_settings_are_one_sentence(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", *words]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1


def test_the_admin_key_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    path.write_text("two words\n")
    assert main(["route", "--decode", "http://a:1", "--admin-key-file", str(path)]) == 2
    assert "holds no key" in capsys.readouterr().err


def test_nothing_of_an_engine_is_imported() -> None:
    """Neither its packages, which a router's host need not have, nor its folders."""
    code = f"""
import sys
for name in {ENGINE_PACKAGES!r}:
    sys.modules[name] = None
import stratakv.engine.router.router, stratakv.engine.api.http.http_server
folders = tuple("stratakv." + name for name in {ENGINE_FOLDERS!r})
print([name for name in sys.modules if name.startswith(folders)])
import stratakv.engine.cli.route
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]" and not done.returncode, done.stderr


def test_a_missing_package_is_told_with_the_extra() -> None:
    code = """
import sys
sys.modules["h11"] = None
from stratakv.engine.cli.main import main
sys.exit(main(["route", "--decode", "http://a:1"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "pip install '.[router]'" in done.stderr


@asynccontextmanager
async def routing(*flags: str) -> AsyncIterator[tuple[FakeNode, asyncio.subprocess.Process, int]]:
    """A router process in front of one fake node."""
    node = FakeNode()
    await node.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stratakv.engine.cli.main", "route", "--port", "0",
        "--decode", node.url, *flags,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = READY.match((await process.stdout.readline()).decode())
        assert found
        yield node, process, int(found[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await node.stop()


async def _open(port: int) -> Exchange:
    exchange = Exchange(*await asyncio.open_connection("127.0.0.1", port))
    headers = [("content-type", "application/json")]
    body = b'{"prompt": "a short prompt", "stream": true}'
    await exchange.send("POST", "/v1/completions", headers, body)
    return exchange


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end(number: signal.Signals) -> None:
    async def run() -> None:
        async with routing() as (node, process, port):
            assert check(await (await _open(port)).read_all(), SHORT)
            node.script.append(Fault("wait"))
            running = await _open(port)
            await until(lambda: len(node.seen) == 2, "it is under way")
            process.send_signal(number)
            async with asyncio.timeout(20):
                while True:
                    try:
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                    except ConnectionError:  # refused, or it was in the queue
                        break
                    writer.close()
            assert process.returncode is None
            node.go_on.set()
            assert check(await running.read_all(), SHORT)
            async with asyncio.timeout(20):
                assert await process.wait() == 0

    asyncio.run(run())


def test_a_signal_ends_what_does_not_end() -> None:
    async def run() -> None:
        async with routing("--drain-seconds", "0.1") as (node, process, port):
            node.script.append(Fault("hang", after=2))
            running = await _open(port)
            assert await running.read_some()
            process.send_signal(signal.SIGTERM)
            answer = await running.read_all()
            assert not check(answer, SHORT)
            assert answer.events[-1]["error"]["code"] == "shutting_down"
            async with asyncio.timeout(20):
                assert await process.wait() == 0
            await until(lambda: node.num_lost == 1, "its node was told")

    asyncio.run(run())


def test_the_page_names_every_metric_and_outcome() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "prefill-decode.md").read_text()
    config = make_config(decode=(read_node("--decode", "http://a:1"),))
    text = Router(config).metrics.exposition().decode()
    kinds = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    names = {name for name in kinds if not name.endswith("_created")}
    assert set(re.findall(r"^\| `(stratakv_router_\w+)`", page, re.MULTILINE)) == names
    for outcomes in OUTCOMES.values():
        assert all(f"`{outcome}`" in page for outcome in outcomes)
