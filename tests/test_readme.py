# SPDX-License-Identifier: Apache-2.0
"""README's code blocks are run as they stand, by the real command line and a real Python.

Two models of its examples are made: `./Llama-3.1-8B` with its real config.json but two layers of
random weights and a small vocabulary, and `./Qwen3-8B` as its real config.json alone, which is all
that `plan` reads. `SUBSTITUTES` and `NOT_RUN` are all that is done otherwise than a reader would.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from .real_models import LLAMA_3_1_8B, QWEN3_8B, write_config, write_small

# Half a minute on a quiet machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent
STRATAKV = str(Path(sys.executable).parent / "stratakv")
START_SECONDS, COMMAND_SECONDS = 120.0, 120.0

# What stands in README → what is run, and why.
SUBSTITUTES = (
    ("localhost:8000", "localhost:{port}", "8000 may be taken; `serve` hears by STRATAKV_PORT"),
    ("/mnt/nvme/kv", "{home}/nvme", "a disk that this machine need not have"),
    ("--kv-offload-cpu-bytes 16GiB", "--kv-offload-cpu-bytes 256MiB", "taken at the start"),
    ("--kv-offload-ssd-bytes 200GiB", "--kv-offload-ssd-bytes 512MiB", "taken at the start"),
    (
        'kv_offload="cpu,ssd")',
        'kv_offload="cpu,ssd", kv_offload_cpu_bytes="256MiB", kv_offload_ssd_bytes="512MiB")',
        "the defaults, 4 and 20 GiB, are taken at the start",
    ),
    ("cache-server --cpu-bytes 64GiB", "cache-server --cpu-bytes 256MiB --port 0 --data-port 0",
     "more memory than this machine need have, and ports that may be taken"),
    ("make ", "make -n ", "the demo takes a minute and the suite would run this test"),
)  # fmt: skip
# First words of lines that are not run, and why.
NOT_RUN = {"pip": "tests/test_wheel.py and tests/test_package.py install it, without a network"}
# Blocks without a language that show something else than commands, by how they begin.
PICTURES = ("engine/ ",)


def blocks() -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return [(language, text) for language, text in found if not text.startswith(PICTURES)]


def commands(text: str) -> list[str]:
    """The lines of a shell block, those joined that a backslash continues."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would stand, with the models beside."""
    place = tmp_path_factory.mktemp("reader")
    write_small(place / "Llama-3.1-8B", LLAMA_3_1_8B)
    write_config(place / "Qwen3-8B", QWEN3_8B)
    return place


class Reader:
    """Does what README says, in order; a server that was started goes on until the next."""

    def __init__(self, place: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.place = place
        self._environment = os.environ | {
            "HOME": str(place),
            "STRATAKV_PORT": str(self.port),
            "PATH": f"{Path(STRATAKV).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self._environment.pop("XDG_CACHE_HOME", None)
        self._server: subprocess.Popen[bytes] | None = None

    def python(self, text: str) -> str:
        """The block as a file of its own."""
        self.stop()
        return self._run([sys.executable, "-c", self._adapted(text)])

    def shell(self, line: str) -> str:
        """One command; what it said."""
        words = shlex.split(self._adapted(line), comments=True)
        words = [re.sub(r"^~", str(self.place), word) for word in words]
        if not words or words[0] in NOT_RUN:
            return ""
        if words[:2] == ["stratakv", "serve"]:
            return self._serve(words)
        if words[:2] == ["stratakv", "cache-server"]:
            return self._cache_server(words)
        if words[0] == "curl" and self._server is None:
            self._serve(["stratakv", "serve"])
        at_root = words[0] == "make"
        words = [*words, "--fail-with-body"] if words[0] == "curl" else words
        return self._run(words, ROOT if at_root else self.place)

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            self._end(server)

    def _adapted(self, text: str) -> str:
        for old, new, _ in SUBSTITUTES:
            text = text.replace(old, new)
        return text.replace("{port}", str(self.port)).replace("{home}", str(self.place))

    def _run(self, words: list[str], place: Path | None = None) -> str:
        done = subprocess.run(
            words, cwd=place or self.place, env=self._environment, capture_output=True, text=True,
            timeout=COMMAND_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def _serve(self, words: list[str]) -> str:
        self.stop()
        log = self.place / "serve.log"
        self._server = self._start(words, log)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up():
            assert self._server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return log.read_text()

    def _cache_server(self, words: list[str]) -> str:
        log = self.place / "cache-server.log"
        server = self._start(words, log)
        deadline = time.monotonic() + START_SECONDS
        try:
            while not re.search(r":\d+", log.read_text()):  # the addresses of its ready line
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        finally:
            self._end(server)
        return log.read_text()

    def _start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(
                words, cwd=self.place, env=self._environment, stdout=out, stderr=out
            )

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def _end(self, server: subprocess.Popen[bytes]) -> None:
        server.send_signal(signal.SIGINT)
        try:
            assert server.wait(COMMAND_SECONDS) == 0
        finally:
            server.kill()
            server.wait()


@pytest.fixture
def reader(place: Path) -> Iterator[Reader]:
    reader = Reader(place)
    yield reader
    reader.stop()


# What a reader takes away from a command: words that its output holds.
EXPECTED: Mapping[str, tuple[str, ...]] = {
    "make demo": ("bench offload",),
    "stratakv serve": ("stratakv-embedded",),
    "stratakv serve ./Llama-3.1-8B": ("Llama-3.1-8B", "context 131072", "bfloat16"),
    "stratakv plan ./Qwen3-8B": ("in bfloat16", "24", "40,960"),
    "stratakv check": ("0 ",),
    "stratakv config show": ("block_size: 16",),
    "curl -s localhost:8000/metrics": ("vllm:",),
}


def test_u01_every_block_of_the_readme_runs(reader: Reader) -> None:
    """In order, as one reader would: what one writes to the disk another looks at."""
    seen = []
    for language, text in blocks():
        if language == "python":
            seen.append(reader.python(text))
            assert "{'" in seen[-1], "cached_tokens_by_tier is shown"
            continue
        assert language in ("", "sh", "bash", "console"), f"no way to run a block of {language}"
        for line in commands(text):
            said = reader.shell(line)
            seen.append(line)
            start = max((each for each in EXPECTED if line.startswith(each)), key=len, default="")
            for words in EXPECTED.get(start, ()):
                assert words in said, f"{line}\n{said}"
            if "/v1/completions" in line:
                assert json.loads(said)["choices"][0]["text"] is not None
    assert any(line.startswith("stratakv plan ./Qwen3-8B") for line in seen)
    assert any(line.startswith("stratakv serve ./Llama-3.1-8B") for line in seen)


def test_what_is_done_otherwise_is_still_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    missing = [old for old, _, _ in SUBSTITUTES if old not in text]
    assert not missing, "nothing to substitute; take it out of the table"
